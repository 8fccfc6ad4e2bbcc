"""The files of a checkpoint folder, and rotation: numbered checkpoints beside it, old ones
removed."""

from __future__ import annotations

import re
from pathlib import Path

from piper.base.atomic import FileKind
from piper.base.errors import PiperError, warn
from piper.state.checkpoint.index import INDEX
from piper.state.checkpoint.verify_files import is_whole

CHECKPOINT = FileKind(
    "state",
    re.compile(r"(?P<stem>device-\d{5,}|rest)(-(?P<number>\d+))?\.safetensors"),
    (INDEX,),
    b"piper checkpoint ",
)
_NUMBERED = re.compile(r"(.*?)(\d+)")


def numbered(target: Path) -> dict[int, Path]:
    """Checkpoints in the folder of ``target`` whose names differ from it only in the number at the
    end, by that number."""
    return {number: path for number, path in _beside(target) if (path / INDEX).exists()}


def keep_last(target: Path, keep: int) -> None:
    """Remove checkpoints with smaller numbers than ``target``, the newest one, so that ``keep``
    complete ones remain. Checkpoints with larger numbers stay: an earlier run got further."""
    _, newest = _parsed(target)
    kept = 1
    for number, path in reversed(_beside(target)):
        if path == target or number > newest:
            continue
        if kept >= keep:
            try:
                CHECKPOINT.remove(path)
            except (OSError, PiperError) as error:
                warn(f"keep={keep}: {path} cannot be removed: {error}")
        elif is_whole(path):
            kept += 1


def _beside(target: Path) -> list[tuple[int, Path]]:
    """Folders beside ``target`` with the same name up to the number, and ``target`` itself, sorted
    by number."""
    stem, _ = _parsed(target)
    known = []
    for path in target.parent.iterdir() if target.parent.is_dir() else ():
        other = _NUMBERED.fullmatch(path.name)
        if other is not None and other[1] == stem and path.is_dir():
            known.append((int(other[2]), path))
    return sorted(known)


def _parsed(target: Path) -> tuple[str, int]:
    match = _NUMBERED.fullmatch(target.name)
    if match is None:
        raise PiperError(
            f"keep= keeps the last of several checkpoints, whose names end in a number; "
            f"{target.name!r} does not"
        )
    return match[1], int(match[2])
