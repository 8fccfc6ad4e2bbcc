"""Files that replace an earlier set of files in a folder atomically. Other files there stay.

    run/.state.saving-5f0c2a91-4711-9d3e21b7   being written, by process 4711 of machine 5f0c2a91
    run/state                                  the files, after one rename, if the folder is new

If the folder exists, new parts enter it under unused names. Then one rename replaces the marker,
the file that lists the parts. Then the parts of the earlier save are removed. If the process dies
in between, the folder holds the complete earlier save or the complete new one.

The next save in the same place removes the leftovers of a killed save, but only if its process is
dead or nothing was written for a day: another job, perhaps on another machine, may write there too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from piper.base.errors import PiperError
from piper.base.reading import open_file

_DAY = 24 * 60 * 60.0
_LEFT = re.compile(r"\..*\.saving-([0-9a-f]{8})-(\d+)-[0-9a-f]{8}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FileKind:
    """The names of files that are saved together."""

    what: str
    """The noun for messages, such as "program"."""
    parts: re.Pattern[str]
    """Matches the name of a part. Group ``stem`` is the plain name; group ``number`` holds the
    digits of a suffix such as ``-1`` after it."""
    markers: tuple[str, ...]
    """Files that list the parts. Parts without a marker are not a valid save."""
    head: bytes = b""
    """Bytes within the first 4 KiB of every marker of ours; empty if markers are not checked."""

    def owned(self, folder: Path) -> list[str]:
        """The names in ``folder`` of this kind, markers first."""
        names = sorted(os.listdir(folder))
        markers = [name for name in self.markers if name in names]
        return markers + [name for name in names if self.parts.fullmatch(name)]

    def remove(self, folder: Path) -> None:
        """Remove the files of this kind. If the folder holds nothing else, remove it atomically."""
        owned = self.owned(folder)
        if not owned or self._foreign(folder, owned) is not None:
            return
        remove_left(folder)
        if set(os.listdir(folder)) == set(owned):
            hidden = _temporary(folder.parent, folder.name)
            os.rename(folder, hidden)
            shutil.rmtree(hidden)
            return
        for name in owned:
            (folder / name).unlink(missing_ok=True)

    def _foreign(self, folder: Path, owned: list[str]) -> str | None:
        """A marker that another program wrote: no parts are beside it and it lacks ``head``."""
        if not self.head or any(name not in self.markers for name in owned):
            return None
        for name in owned:
            with open_file(folder / name) as file:
                if self.head not in file.read(4096):
                    return name
        return None

    def _number(self, folder: Path) -> int:
        """The smallest number that no part in ``folder`` uses."""
        matches = map(self.parts.fullmatch, os.listdir(folder))
        taken = {int(match["number"] or 0) for match in matches if match is not None}
        return next(n for n in range(len(taken) + 1) if n not in taken)


@dataclass(frozen=True, slots=True)
class Staged:
    """A save in progress: files are written to ``folder`` and moved to ``target`` by ``commit``."""

    kind: FileKind
    target: Path
    folder: Path
    """The temporary folder."""
    number: int
    """The suffix of part names; 0 means no suffix."""

    def named(self, name: str) -> str:
        """The name of part ``name`` in the target."""
        match = self.kind.parts.fullmatch(name)
        if match is None or not self.number:
            return name
        at = match.end("stem")
        return f"{name[:at]}-{self.number}{name[at:]}"

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Reports an error inside as a failed save, and discards the temporary folder."""
        try:
            with _failing(self.kind, self.target):
                yield
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def commit(self) -> None:
        """Move the files into the target. The caller has already synced the parts to disk."""
        names = sorted(os.listdir(self.folder))
        parts = [name for name in names if self.kind.parts.fullmatch(name)]
        markers = [name for name in self.kind.markers if name in names]
        others = [name for name in names if name not in (*parts, *markers)]
        for name in (*others, *markers):
            _sync(self.folder / name)
        if self.folder.parent != self.target:
            _sync(self.folder)
            os.rename(self.folder, self.target)
            _sync(self.target.parent)
            return
        owned = self.kind.owned(self.target)
        earlier = owned if any(name in self.kind.markers for name in owned) else []
        new: list[str] = []
        try:
            for name in parts:
                new.append(self.named(name))
                os.replace(self.folder / name, self.target / new[-1])
            _sync(self.target)
            for name in (*others, *markers):
                os.replace(self.folder / name, self.target / name)
        except OSError:
            for name in new:
                (self.target / name).unlink(missing_ok=True)
            raise
        _sync(self.target)
        for name in earlier:
            if name not in (*new, *markers):
                (self.target / name).unlink(missing_ok=True)
        self.discard()


def stage(target: Path, kind: FileKind) -> Staged:
    """A save into ``target``, which need not exist, with an empty temporary folder."""
    target = Path(os.path.abspath(target))
    with _failing(kind, target):
        if not target.name:
            raise PiperError("this is not the name of a folder")
        if target.exists() and not target.is_dir():
            raise PiperError(f"there is a file: a {kind.what} is a folder, so use another name")
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_left(target.parent)
        around, number = target.parent, 0
        if target.is_dir():
            if (name := kind._foreign(target, kind.owned(target))) is not None:
                raise PiperError(
                    f"there is a file {name} that Piper did not write: use another folder"
                )
            remove_left(target)
            around, number = target, kind._number(target)
        folder = _temporary(around, target.name)
        folder.mkdir()
        return Staged(kind, target, folder, number)


def _temporary(around: Path, name: str) -> Path:
    """A path in the folder ``around`` whose name identifies the machine and process."""
    writer = f"{_machine()}-{os.getpid()}-{secrets.token_hex(4)}"
    return around / f".{name[:50]}.saving-{writer}"


@contextlib.contextmanager
def _failing(kind: FileKind, target: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, PiperError) as error:
        raise PiperError(
            f"the {kind.what} cannot be saved to {target}: {error}; what was there before is "
            "untouched"
        ) from error


def remove_left(folder: Path) -> None:
    """Remove the leftovers of killed saves in ``folder``."""
    for name in os.listdir(folder):
        match = _LEFT.fullmatch(name)
        if match is not None and _dead(folder / name, match[1], int(match[2])):
            shutil.rmtree(folder / name, ignore_errors=True)


def _dead(folder: Path, machine: str, process: int) -> bool:
    """Whether the writer is gone. Processes on other machines cannot be checked, and a process
    number may be reused; then only the age of the files decides."""
    if machine == _machine():
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
    try:
        last = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return False
    return time.time() - last > _DAY


@cache
def _machine() -> str:
    """Identifies the scope in which process numbers are unique: one boot of a machine and one
    container (PID namespace)."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text()
        name = started + os.readlink("/proc/self/ns/pid")
    except OSError:
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def _sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
