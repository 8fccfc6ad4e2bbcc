"""Checks paths that a user gives."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from piper.base.errors import PiperError

_SHOWN = 60


def path_of(given: object) -> Path:
    """``given`` as a path that is valid for the file system, whether it exists or not."""
    try:
        path = Path(given)  # type: ignore[arg-type]
        os.lstat(path)
    except TypeError:
        raise PiperError(f"{given!r} is not a path: give a string or a pathlib.Path") from None
    except ValueError as error:
        raise PiperError(f"{given!r} is not a path: {error}") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            text = str(given)
            raise PiperError(
                f"{text[:_SHOWN]!r}... has {len(text):,} characters, more than the file system "
                "allows: give a shorter path"
            ) from None
    return path


def write_file(given: object, text: str) -> None:
    """Write ``text`` to the file at ``given``, in folders that are made if needed."""
    path = path_of(given)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PiperError(f"{path} cannot be written: {error.strerror or error}") from error
