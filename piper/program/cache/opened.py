"""The files that a model's code reads while it is traced: their content may be in the program.

Python reports what it opens to audit hooks, also in libraries. A hook cannot be removed, so a
process has one, which listens only inside ``files_opened`` and only to its thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from piper.program.cache.installed import is_installed

_FILES: ContextVar[list[str] | None] = ContextVar("files", default=None)
_CODE = (".py", ".pyc", ".so", ".pth")
_SYSTEM = ("/proc/", "/sys/", "/dev/")


@contextmanager
def files_opened() -> Iterator[list[str]]:
    """A list of the files opened inside to be read, but for those of code."""
    _listen()
    files: list[str] = []
    token = _FILES.set(files)
    try:
        yield files
    finally:
        _FILES.reset(token)


@cache
def _listen() -> None:
    sys.addaudithook(_heard)


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and (files := _FILES.get()) is not None:
        path, _, flags = arguments
        if isinstance(path, str | bytes | os.PathLike) and flags & os.O_ACCMODE != os.O_WRONLY:
            name = os.path.abspath(os.fsdecode(path))
            if not (name.endswith(_CODE) or name.startswith(_SYSTEM) or is_installed(name)):
                files.append(name)
