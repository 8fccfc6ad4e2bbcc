"""Files that belong together in one folder, with a checksum of each: read whole, or not at all.

checksums.json says what the folder holds and the SHA-256 of every file. New files take the place of
earlier ones only when all of them are written: a full disk leaves what was there. Meanwhile both
are in the folder, so a program that was saved again has names such as program-1.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from piper.base.atomic import FileKind, stage
from piper.base.codec import Format
from piper.base.errors import PiperError
from piper.base.reading import MalformedError, file_bytes, parsed, table, wrong

CHECKSUMS = "checksums.json"
_FILE_BYTES = 2**36
"""More than a model has constants."""
PROGRAM = FileKind(
    "program",
    re.compile(r"(?P<stem>program|graphs|constants)(-(?P<number>\d+))?(?P<ending>\.json|\.pt)"),
    (CHECKSUMS,),
    b"piper program ",
)


def write(folder: Path, kind: Format, files: Mapping[str, bytes]) -> None:
    """Put ``files`` into ``folder``, which holds a ``kind`` from then on."""
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
    """The files of ``folder``, as they were written."""
    try:
        index = file_bytes(folder / CHECKSUMS)
    except FileNotFoundError as error:
        if (folder / "program.json").exists():
            raise PiperError(
                f"{folder} holds a program of an earlier Piper: compile it and save it again"
            ) from error
        raise PiperError(f"{folder} is no saved program: {error}") from error
    except (OSError, MalformedError) as error:
        raise PiperError(f"the program in {folder} cannot be read: {error}") from error
    try:
        sums = _sums(index, kind, names)
    except MalformedError as error:
        raise PiperError(f"the program in {folder} cannot be read: {CHECKSUMS}: {error}") from None
    files = {}
    for name, (actual, expected) in sums.items():
        try:
            files[name] = file_bytes(folder / actual, _FILE_BYTES)
        except (OSError, MalformedError) as error:
            raise PiperError(f"the program in {folder} cannot be read: {error}") from error
        if hashlib.sha256(files[name]).hexdigest() != expected:
            raise PiperError(
                f"the program in {folder} is damaged: {actual} is not what was saved (its checksum "
                "differs); save the program again"
            )
    return files


def _sums(index: bytes, kind: Format, names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """By the plain name of a file, its name here and its checksum."""
    data = table(kind.content(parsed(index)), ("sha256",))
    if type(data["sha256"]) is not dict:
        raise wrong(data["sha256"], "an object")
    sums = {}
    for actual, expected in data["sha256"].items():
        if type(expected) is not str:
            raise wrong(expected, "a checksum")
        match = PROGRAM.parts.fullmatch(actual)
        plain = actual if match is None else match["stem"] + match["ending"]
        sums[plain] = (actual, expected)
    return table(sums, names)
