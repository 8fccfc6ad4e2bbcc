"""Files that belong together in one folder, with a checksum of each: read whole, or not at all.

checksums.json says what the folder holds and the SHA-256 of every file. New files take the place of
earlier ones only when all of them are written: a full disk leaves what was there.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from piper.codec import Format
from piper.errors import PiperError
from piper.reading import MalformedError, parsed, table, wrong

CHECKSUMS = "checksums.json"


def write(folder: Path, kind: Format, files: Mapping[str, bytes]) -> None:
    """Put ``files`` into ``folder``, which holds a ``kind`` from then on."""
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    last = json.dumps(kind.headed({"sha256": sums}), indent=1).encode()
    written: dict[str, Path] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for name, content in (*files.items(), (CHECKSUMS, last)):
                written[name] = folder / f".{name}.{secrets.token_hex(8)}"
                with written[name].open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            for name in list(written):
                os.replace(written[name], folder / name)
                del written[name]
        finally:
            for path in written.values():
                path.unlink(missing_ok=True)
    except OSError as error:
        raise PiperError(
            f"the program cannot be saved to {folder}: {error}; what was there before is untouched"
        ) from error


def read(folder: Path, kind: Format, names: Iterable[str]) -> dict[str, bytes]:
    """The files of ``folder``, as they were written."""
    try:
        index = (folder / CHECKSUMS).read_bytes()
    except FileNotFoundError as error:
        if (folder / "program.json").exists():
            raise PiperError(
                f"{folder} holds a program of an earlier Piper: compile it and save it again"
            ) from error
        raise PiperError(f"{folder} is no saved program: {error}") from error
    except OSError as error:
        raise PiperError(f"the program in {folder} cannot be read: {error}") from error
    try:
        sums = _sums(index, kind, names)
    except MalformedError as error:
        raise PiperError(f"the program in {folder} cannot be read: {CHECKSUMS}: {error}") from None
    found = {}
    for name, expected in sums.items():
        try:
            found[name] = (folder / name).read_bytes()
        except OSError as error:
            raise PiperError(f"the program in {folder} cannot be read: {error}") from error
        if hashlib.sha256(found[name]).hexdigest() != expected:
            raise PiperError(
                f"the program in {folder} is damaged: {name} is not what was saved (its checksum "
                "differs); save the program again"
            )
    return found


def _sums(index: bytes, kind: Format, names: Iterable[str]) -> dict[str, str]:
    data = table(kind.content(parsed(index)), ("sha256",))
    sums: dict[str, str] = table(data["sha256"], names)
    for expected in sums.values():
        if type(expected) is not str:
            raise wrong(expected, "a checksum")
    return sums
