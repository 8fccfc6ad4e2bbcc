"""Checks the files of a checkpoint: ``damage`` compares all checksums and names damaged tensors;
``is_whole`` is a quick check of the index and the file sizes."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from piper.base.reading import MalformedError, file_bytes, open_file
from piper.ir.grouped import grouped
from piper.state.checkpoint.index import INDEX, Index
from piper.state.checkpoint.slices import Slice, all_slices
from piper.state.checkpoint.tensor_files import FileFacts, checksum


def damage(folder: Path, index: Index, files: Sequence[str]) -> list[str]:
    """One text for each of ``files`` that is damaged: its name and the first difference found."""
    held = grouped((one.location.file, one) for one in all_slices(index.tables))
    reasons = (_damage(folder, file, index.files[file], held.get(file, [])) for file in files)
    return [f"{file}: {why}" for file, why in zip(files, reasons, strict=True) if why is not None]


def is_whole(folder: Path) -> bool:
    """Whether the index is intact and every file has the size it states. File contents are not
    read: they may be terabytes."""
    try:
        files = Index.from_bytes(file_bytes(folder / INDEX)).files
        return all(size_of(folder / name) == one.bytes for name, one in files.items())
    except (OSError, MalformedError):
        return False


def size_of(path: Path) -> int:
    """The size of a checkpoint's file. It must be a regular file, not a link."""
    facts = path.lstat()
    if not stat.S_ISREG(facts.st_mode):
        raise MalformedError("it is a link, or no file at all: copy the file itself to its place")
    return facts.st_size


def _damage(folder: Path, file: str, facts: FileFacts, held: Iterable[Slice]) -> str | None:
    path = folder / file
    try:
        if (size := size_of(path)) != facts.bytes:
            return f"it has {size} bytes, not {facts.bytes}"
        with open_file(path) as content:
            if checksum(content, 0, facts.header) != facts.crc32:
                return "its header is not what was written"
            for one in sorted(held, key=lambda one: one.location.offset):
                if checksum(content, one.location.offset, one.nbytes) != one.location.crc32:
                    return f"{one.text} is not what was written (its checksum differs)"
    except FileNotFoundError:
        return "it is not there"
    except OSError as error:
        return f"it cannot be read: {error}"
    except MalformedError as error:
        return str(error)
    return None
