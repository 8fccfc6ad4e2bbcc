"""The files of a saved program in one folder, with a checksum of each: all are valid, or none load.

checksums.json names the format and the SHA-256 of every file. New files replace earlier ones only
after all are written, so a full disk keeps the earlier program. Both are in the folder meanwhile,
so a program that is saved again has names such as program-1.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from piper.base.atomic import FileKind, stage
from piper.base.codec import Format, decode
from piper.base.errors import PiperError
from piper.base.reading import MalformedError, file_bytes, parsed, shown, within

CHECKSUMS = "checksums.json"
_FILE_BYTES = 2**36
"""Largest file to read, in bytes. The constants of a model are smaller."""
PROGRAM = FileKind(
    "program",
    re.compile(
        r"(?P<stem>program|graphs|constants|cached)(-(?P<number>\d+))?(?P<ending>\.json|\.pt)"
    ),
    (CHECKSUMS,),
    b"piper program ",
)


class _Checksums(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: dict[str, str]


def write(folder: Path, kind: Format, files: Mapping[str, bytes]) -> None:
    """Save ``files`` to ``folder`` in the format ``kind``."""
    staged = stage(folder, PROGRAM)
    with staged.failing():
        sums = {}
        for name, content in files.items():
            sums[staged.named(name)] = hashlib.sha256(content).hexdigest()
            with (staged.folder / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        last = json.dumps(kind.headed({"sha256": sums}), indent=1)
        (staged.folder / CHECKSUMS).write_text(last)
        staged.commit()


def read(folder: Path, kind: Format, names: Iterable[str]) -> dict[str, bytes]:
    """The contents of the files ``names`` in ``folder``, after checking their checksums."""
    try:
        if not (folder / CHECKSUMS).exists():
            if (folder / "program.json").exists():
                raise PiperError(
                    f"{folder} holds a program of an earlier Piper: compile it and save it again"
                )
            raise PiperError(f"{folder} is not a saved program: there is no {CHECKSUMS}")
        index = file_bytes(folder / CHECKSUMS)
        with within(CHECKSUMS):
            sums = _sums(index, kind, names)
        files = {name: file_bytes(folder / sums[name][0], _FILE_BYTES) for name in sums}
    except (OSError, MalformedError) as error:
        raise PiperError(f"the program in {folder} cannot be read: {error}") from error
    for name, (actual, expected) in sums.items():
        if hashlib.sha256(files[name]).hexdigest() != expected:
            raise PiperError(
                f"the program in {folder} is damaged: {actual} is not what was saved (its checksum "
                "differs); save the program again"
            )
    return files


def _sums(index: bytes, kind: Format, names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Maps the plain name of a file to its name in the folder and its checksum."""
    file: _Checksums = decode(_Checksums, kind.content(parsed(index)))
    sums = {}
    for actual, expected in file.sha256.items():
        match = PROGRAM.parts.fullmatch(actual)
        plain = actual if match is None else match["stem"] + match["ending"]
        sums[plain] = (actual, expected)
    if sums.keys() != set(names):
        raise MalformedError(f"it names {', '.join(map(shown, sums))}, not {', '.join(names)}")
    return sums
