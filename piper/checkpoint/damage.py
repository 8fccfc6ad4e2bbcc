"""Whether the files of a checkpoint are what was written, and which tensors lie where they are
not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from piper.checkpoint.files import FileFacts, checksum
from piper.checkpoint.index import Index, Slice


def damage(folder: Path, index: Index, files: Sequence[str]) -> list[str]:
    """What is wrong with ``files``, one text each."""
    held: dict[str, list[tuple[str, Slice, int]]] = {}
    for table, entries in index.tensors.tables():
        for name, entry in entries.items():
            for one in entry.slices:
                size = one.box.numel * entry.dtype.itemsize
                held.setdefault(one.file, []).append((f"{table} {name}{one.box.text}", one, size))
    found = (_damage(folder, file, index.files[file], held.get(file, [])) for file in files)
    return [f"{file}: {why}" for file, why in zip(files, found, strict=True) if why is not None]


def _damage(
    folder: Path, file: str, facts: FileFacts, held: Iterable[tuple[str, Slice, int]]
) -> str | None:
    path = folder / file
    try:
        if (size := path.stat().st_size) != facts.bytes:
            return f"it has {size} bytes, not {facts.bytes}"
        with path.open("rb", buffering=0) as content:
            if checksum(content, 0, facts.header) != facts.crc32:
                return "its header is not what was written"
            for name, one, size in sorted(held, key=lambda row: row[1].offset):
                if checksum(content, one.offset, size) != one.crc32:
                    return f"{name} is not what was written (its checksum differs)"
    except FileNotFoundError:
        return "it is not there"
    except OSError as error:
        return f"it cannot be read: {error}"
    return None
