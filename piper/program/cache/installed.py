"""Which code is installed (the standard library, packages and Piper), and which is the user's."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType

PIPER = Path(__file__).resolve().parents[2]


def _both(paths: Iterable[str | None]) -> Iterator[str]:
    """Each folder as it is written, and without links."""
    for path in filter(None, paths):
        yield from (os.path.join(path, ""), os.path.join(os.path.realpath(path), ""))


_PATHS = sysconfig.get_paths()
_KINDS = ("stdlib", "platstdlib", "purelib", "platlib")
_FOLDERS = (*(_PATHS[kind] for kind in _KINDS), *site.getsitepackages(), site.USER_SITE)
_INSTALLED = (*_both([*_FOLDERS, str(PIPER)]), "<frozen ")


@cache
def is_installed(file: str) -> bool:
    """Whether a file with code is of an installed package."""
    return file.startswith(_INSTALLED)


def is_users(function: FunctionType) -> bool:
    """Whether the user has written a function, in a file or a session."""
    file = function.__code__.co_filename
    written = not file.startswith("<") or function.__module__ == "__main__"
    return written and not is_installed(file)


def is_of_installed(item: type | ModuleType) -> bool:
    """Whether a class or a module is of an installed package."""
    name = item.__name__ if isinstance(item, ModuleType) else item.__module__
    while (module := sys.modules.get(name)) is not None:
        if (file := file_of(module)) is not None:
            return is_installed(file)
        name, dot, _ = name.rpartition(".")
        if not dot:  # a module of the interpreter, or one without a file
            return module.__spec__ is not None
    return False


def loaded_modules() -> list[tuple[str, ModuleType]]:
    """All modules of this process, by name."""
    return sorted((n, m) for n, m in list(sys.modules.items()) if isinstance(m, ModuleType))


def file_of(module: ModuleType) -> str | None:
    """The file of a module, if it has one. A lazy module is not loaded for this."""
    file = vars(module).get("__file__")
    return file if isinstance(file, str) else None


def distributions() -> list[str]:
    """The names and versions of all installed distributions."""
    folders = {folder for folder in _INSTALLED if os.path.isdir(folder)}
    names = {name for folder in folders for name in os.listdir(folder)}
    return sorted(name for name in names if name.endswith((".dist-info", ".egg-info", ".pth")))


def files_in(package: str) -> Iterator[tuple[str, int, int]]:
    """The files with code of an installed package, with their sizes and times of change."""
    for root in getattr(sys.modules.get(package), "__path__", ()):
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(names):
                if name.endswith((".py", ".so")):
                    path = os.path.join(folder, name)
                    about = os.stat(path)
                    yield path, about.st_size, about.st_mtime_ns
