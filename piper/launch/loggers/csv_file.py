"""Logs to a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from piper.base.paths import path_of
from piper.launch.loggers.logged import Logger


class CSV(Logger):
    """Appends a row ``step,name,value`` for each scalar of every ``every``-th step to the file
    ``path``, which a resumed run continues."""

    def __init__(self, path: str | Path, *, every: int = 1) -> None:
        super().__init__(every)
        self._path = path_of(path)

    def begin(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", newline="", encoding="utf-8")
        self._rows = csv.writer(self._file)
        if not self._file.tell():
            self._rows.writerow(("step", "name", "value"))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._rows.writerows((step, name, value) for name, value in scalars.items())
        self._file.flush()  # a killed run leaves its rows

    def end(self) -> None:
        self._file.close()
