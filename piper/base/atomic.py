"""Files that take their place in a folder together, beside files of others, which stay.

    run/.state.saving-5f0c2a91-4711-9d3e21b7   being written, by process 4711 of a machine
    run/state                                  the files, by one rename, if there was no such folder

Where the folder exists, new parts enter it under names that are free, then one rename replaces the
file that names them, the marker, and then the parts of an earlier save are removed. Whatever ends
that in between, the folder has the earlier files or the new ones.

What a killed save has left is removed by the next one beside it, if its process is known to be dead
or nothing was written there for a day: another job, maybe on another machine, may write there too.
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
    """Files that are written together, by their names."""

    what: str
    """What they hold, for messages."""
    parts: re.Pattern[str]
    """With a group ``stem``, after which ``-1`` and so on may stand, the group ``number``."""
    markers: tuple[str, ...]
    """Files that name the parts: without one of them, parts are nothing."""
    head: bytes = b""
    """What a marker has near its beginning, unless others write such files too."""

    def owned(self, folder: Path) -> list[str]:
        """The names in ``folder`` that are of this kind, markers first."""
        names = sorted(os.listdir(folder))
        markers = [name for name in self.markers if name in names]
        return markers + [name for name in names if self.parts.fullmatch(name)]

    def remove(self, folder: Path) -> None:
        """Remove files of this kind, and the folder, at once, if nothing else is in it."""
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
        """A marker that another program has written: it is alone, and has not our beginning."""
        if not self.head or any(name not in self.markers for name in owned):
            return None
        for name in owned:
            with open_file(folder / name) as file:
                if self.head not in file.read(4096):
                    return name
        return None

    def _number(self, folder: Path) -> int:
        """The first number that no name in ``folder`` has."""
        matches = map(self.parts.fullmatch, os.listdir(folder))
        taken = {int(match["number"] or 0) for match in matches if match is not None}
        return next(n for n in range(len(taken) + 1) if n not in taken)


@dataclass(frozen=True, slots=True)
class Staged:
    """Files on their way into a folder."""

    kind: FileKind
    target: Path
    folder: Path
    """Where they are written."""
    number: int
    """Goes into the names of parts, unless it is 0."""

    def named(self, name: str) -> str:
        """What the part ``name`` is called in the target."""
        match = self.kind.parts.fullmatch(name)
        if match is None or not self.number:
            return name
        at = match.end("stem")
        return f"{name[:at]}-{self.number}{name[at:]}"

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """What is refused inside is told as a save that failed; what was written is forgotten."""
        try:
            with _failing(self.kind, self.target):
                yield
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def commit(self) -> None:
        """What was written takes its place. Parts are on the disk already."""
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
    """An empty folder for files that are to lie in ``target``, which need not exist."""
    target = Path(os.path.abspath(target))
    with _failing(kind, target):
        if not target.name:
            raise PiperError("this is no name for a folder")
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
    """A name in the folder ``around`` that says who uses it."""
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
    """Remove what killed saves left in ``folder``."""
    for name in os.listdir(folder):
        match = _LEFT.fullmatch(name)
        if match is not None and _dead(folder / name, match[1], int(match[2])):
            shutil.rmtree(folder / name, ignore_errors=True)


def _dead(folder: Path, machine: str, process: int) -> bool:
    """Whether nobody writes there any more. Processes of other machines cannot be asked, and a
    number may have been given to another process."""
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
    """Names those among whom a process number means one process: since the machine was started, and
    in one container."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text()
        name = started + os.readlink("/proc/self/ns/pid")
    except OSError:
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def _sync(path: Path) -> None:
    """Make a file, or the names in a folder, last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
