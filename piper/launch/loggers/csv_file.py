"""Logs to a CSV file."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from piper.base.errors import PiperError, warn
from piper.base.paths import path_of
from piper.launch.loggers.logged import Logger


class CSV(Logger):
    """Writes one row for every ``every``-th step, with the evaluation after it, to the file
    ``path``. A resumed run continues the file: its rows replace those of the same and later steps.
    The first column is the step."""

    def __init__(self, path: str | Path, *, every: int = 1) -> None:
        super().__init__(every)
        self._path = path_of(path)
        self._row: dict[str, object] = {}
        """The last row."""
        self._start = 0
        """Where it starts."""

    def begin(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = self._header()
        self._open()
        self._row = {}

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if not self._row:
            self._go_to(step, scalars)
        same = self._row.get("step") == step
        self._row = {**(self._row if same else {"step": step}), **scalars}
        if same:
            self._file.truncate(self._start)
        if missing := [name for name in self._row if name not in self._columns]:
            rows = self._rows()
            self._columns += missing
            self._write_again(rows)
        self._file.seek(0, os.SEEK_END)
        self._start = self._file.tell()
        csv.DictWriter(self._file, self._columns).writerow(self._row)
        self._file.flush()  # a killed run leaves its rows

    def end(self) -> None:
        self._file.close()

    def _header(self) -> list[str]:
        """The columns of a file that exists."""
        if not self._path.exists() or not self._path.stat().st_size:
            return []
        with self._path.open(newline="", encoding="utf-8") as file:
            columns = next(csv.reader(file))
        if columns[:1] != ["step"]:
            raise PiperError(
                f"{self._path} is not a log of steps: its first column is {columns[0]!r}; "
                "give another file"
            )
        return columns

    def _go_to(self, step: int, scalars: Mapping[str, float]) -> None:
        """Drop the rows from ``step`` on, which this run writes again. A row of ``step`` without
        these scalars gets them: its run ended between the step and its evaluation."""
        rows = self._rows()
        before = [row for row in rows if int(row["step"]) < step]
        if rows and not before:
            warn(
                f"{self._path} was the log of a run to step {rows[-1]['step']}; this run begins at "
                f"step {step} and replaces it: to keep both, give each its own file"
            )
        for row in rows:
            known = {name: value for name, value in row.items() if value}
            if int(row["step"]) == step and not known.keys() & scalars.keys():
                self._row = {**known, "step": step}
        if rows:
            self._write_again(before)

    def _rows(self) -> list[dict[str, str]]:
        """The rows of the file; the last one is left out if a killed run left only a part of it."""
        with self._path.open(newline="", encoding="utf-8") as file:
            lines = file.readlines()
        whole = lines[:-1] if lines and not lines[-1].endswith("\n") else lines
        return list(csv.DictReader(whole))

    def _write_again(self, rows: Iterable[Mapping[str, str]]) -> None:
        self._file.close()
        other = self._path.with_name(f".{self._path.name}.new")
        with other.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        other.replace(self._path)
        self._open()

    def _open(self) -> None:
        self._file = self._path.open("a", newline="", encoding="utf-8")
        self._start = self._file.tell()
