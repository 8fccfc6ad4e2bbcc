"""Programs compiled before, each in a folder of the user, by key. No pickle, and no code that runs.

    ~/.cache/piper/programs-1/KEY/    a saved program, and cached.json: what it is
    PIPER_CACHE                       another folder than ~/.cache/piper, or "off"

An entry appears by one rename, and all of it has checksums: several processes may read, write and
remove entries at a time, and what is damaged is compiled again. An entry's time of change is that
of its last use; the oldest are removed when all together exceed the limit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from piper.base import checked_folder
from piper.base.codec import Format
from piper.base.errors import PiperError
from piper.base.reading import file_bytes

LIMIT = 2**30
"""The bytes of all entries."""
_NAME = "programs-1"
_FORMAT = Format("cached program", 1)
_ABOUT = "cached.json"


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of an entry besides its program."""

    what: str
    """The class of its model, and its devices."""
    compiled: str
    """The local time, as text."""
    tracing: str
    warnings: tuple[str, ...]
    """The warnings of its compilation."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A cached program."""

    folder: Path
    nbytes: int
    used: float
    """When it was last used, in seconds since the epoch."""

    @property
    def about(self) -> About | None:
        """What it is; None if it cannot be read."""
        try:
            return msgspec.json.decode(file_bytes(self.folder / _ABOUT), type=About)
        except (OSError, ValueError, PiperError):
            return None

    def remove(self) -> None:
        """Remove it; another process may do so too."""
        with contextlib.suppress(OSError):
            checked_folder.PROGRAM.remove(self.folder)


@dataclass(frozen=True, slots=True)
class Entries:
    """The cached programs in a folder."""

    folder: Path

    @staticmethod
    def of_user() -> Entries | None:
        """Those of this user; None if the cache is off."""
        given = os.environ.get("PIPER_CACHE")
        if given == "off":
            return None
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return Entries(Path(given or os.path.join(home, "piper")) / _NAME)

    def __iter__(self) -> Iterator[Entry]:
        """All entries, the last used first, also those that have lost their checksums."""
        entries = []
        with contextlib.suppress(OSError):
            for folder in self.folder.glob("[!.]*"):
                with contextlib.suppress(OSError):  # another process has removed it
                    if own := checked_folder.PROGRAM.owned(folder):
                        size = sum((folder / name).stat().st_size for name in own)
                        entries.append(Entry(folder, size, (folder / own[0]).stat().st_mtime))
        return iter(sorted(entries, key=lambda entry: -entry.used))

    def find(self, key: str, names: Iterable[str]) -> tuple[About, dict[str, bytes]] | None:
        """What is known of the entry of ``key``, and the files of its program."""
        folder = self.folder / key
        if not folder.is_dir():
            return None
        try:
            files = checked_folder.read(folder, _FORMAT, (*names, _ABOUT))
            about = msgspec.json.decode(files.pop(_ABOUT), type=About)
            os.utime(folder / checked_folder.CHECKSUMS)
        except (OSError, ValueError, PiperError):  # damaged, or just removed
            return None
        return about, files

    def add(self, key: str, about: About, files: Mapping[str, bytes]) -> None:
        """Add an entry, and remove the oldest above the limit."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = {**files, _ABOUT: msgspec.json.encode(about)}
        checked_folder.write(self.folder / key, _FORMAT, content)
        used = 0
        for entry in self:
            used += entry.nbytes
            if used > LIMIT:
                entry.remove()
