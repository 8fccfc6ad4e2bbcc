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
