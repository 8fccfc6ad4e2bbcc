"""Logs to a CSV file."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path

from piper.base.errors import PiperError
from piper.base.paths import path_of
from piper.launch.loggers.logged import Logger


class CSV(Logger):
    """Writes one row for every ``every``-th step, with the evaluation after it, to the file
    ``path``, which a resumed run continues. The first column is the step."""

    def __init__(self, path: str | Path, *, every: int = 1) -> None:
        super().__init__(every)
        self._path = path_of(path)
        self._row: dict[str, object] = {}
        """The last row."""

    def begin(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = self._header()
        self._file = self._path.open("a", newline="", encoding="utf-8")
        self._start = self._file.tell()
        """Where the last row starts."""
        self._row = {}

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        same = self._row.get("step") == step
        self._row = {**(self._row if same else {"step": step}), **scalars}
        if same:
            self._file.truncate(self._start)
        if missing := [name for name in self._row if name not in self._columns]:
            self._widen(missing)
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

    def _widen(self, names: list[str]) -> None:
        """Add columns: the file is written again."""
        self._file.close()
        with self._path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        self._columns += names
        longer = self._path.with_name(f".{self._path.name}.longer")
        with longer.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        longer.replace(self._path)
        self._file = self._path.open("a", newline="", encoding="utf-8")
