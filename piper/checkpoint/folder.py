"""The folder of a checkpoint: whole or absent, whatever happens while it is written.

    run/state             the checkpoint
    run/.state.saving     being written; becomes run/state by one rename
    run/.state.previous   what run/state was, between two renames where it is replaced

What a killed save has left is removed by the next one. If it was killed between the two renames,
the previous checkpoint is the one that is found.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from piper.checkpoint.index import INDEX
from piper.errors import PiperError


def saving(target: Path) -> Path:
    return target.parent / f".{target.name}.saving"


def _previous(target: Path) -> Path:
    return target.parent / f".{target.name}.previous"


@contextlib.contextmanager
def failing(target: Path) -> Iterator[None]:
    """Whatever the disk refuses inside is told as a save that failed."""
    try:
        yield
    except (OSError, PiperError) as error:
        discard(target)
        raise failed(target, error) from error


def failed(target: Path, error: object) -> PiperError:
    return PiperError(
        f"the state cannot be saved to {target}: {error}; what was there before is untouched"
    )


def discard(target: Path) -> None:
    """Forget what has been written so far."""
    shutil.rmtree(saving(target), ignore_errors=True)


def prepare(target: Path, marks: Sequence[str] = (INDEX,)) -> Path:
    """An empty folder in which a checkpoint can be written that is to become ``target``. A folder
    that is replaced has one of the files ``marks``."""
    with failing(target):
        _refuse_other(target, marks)
        _recover(target)
        for path in _leftovers(target):
            shutil.rmtree(path)
        saving(target).mkdir()
    return saving(target)


def _leftovers(target: Path) -> list[Path]:
    """What killed saves of this checkpoint left, and of those that are numbered like it."""
    match = _NUMBERED.fullmatch(target.name)
    stem, number = (re.escape(match[1]), r"\d+") if match else (re.escape(target.name), "")
    name = re.compile(rf"\.{stem}{number}\.saving")
    return [path for path in target.parent.iterdir() if name.fullmatch(path.name)]


def _refuse_other(target: Path, marks: Sequence[str]) -> None:
    """What is replaced must be a checkpoint, or nothing."""
    if not target.name:
        raise PiperError("this is no name for a checkpoint")
    if target.is_dir():
        if any(target.iterdir()) and not any((target / name).exists() for name in marks):
            raise PiperError("there is a folder with something else in it: use another name")
    elif target.exists():
        raise PiperError("there is a file: a checkpoint is a folder, so use another name")


def _recover(target: Path) -> None:
    """Undo the first of two renames if the second one did not happen."""
    previous = _previous(target)
    if not previous.exists():
        return
    if target.exists():
        shutil.rmtree(previous)
    else:
        os.rename(previous, target)


def commit(target: Path) -> None:
    """What was written becomes the checkpoint."""
    written, previous = saving(target), _previous(target)
    _sync(written)
    if target.exists() and any(target.iterdir()):
        os.rename(target, previous)
        try:
            os.rename(written, target)
        except OSError:
            os.rename(previous, target)
            raise
        shutil.rmtree(previous, ignore_errors=True)
    else:
        os.rename(written, target)
    _sync(target.parent)


def _sync(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def found(target: Path) -> Path:
    """Where the checkpoint ``target`` is."""
    previous = _previous(target)
    there = os.path.exists(previous)  # no, if only this name is too long
    return previous if not target.exists() and there else target


_NUMBERED = re.compile(r"(.*?)(\d+)")


def numbered(target: Path) -> dict[int, Path]:
    """The checkpoints beside ``target`` whose names differ from its own in the number at the end,
    by this number."""
    match = _NUMBERED.fullmatch(target.name)
    if match is None:
        raise PiperError(
            f"keep= keeps the last of several checkpoints, whose names end in a number; "
            f"{target.name!r} does not"
        )
    known = {}
    for path in target.parent.iterdir() if target.parent.is_dir() else ():
        other = _NUMBERED.fullmatch(path.name)
        if other is not None and other[1] == match[1] and (path / INDEX).exists():
            known[int(other[2])] = path
    return dict(sorted(known.items()))


def keep_last(target: Path, keep: int) -> None:
    """Remove all checkpoints but the last ``keep`` of those beside ``target``."""
    for path in list(numbered(target).values())[:-keep]:
        hidden = saving(path)  # a half removed one is no checkpoint either
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)
