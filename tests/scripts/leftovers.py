"""The descendants and listening ports of a process, read from ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path


def children(*parents: int) -> set[int]:
    """The child processes of this one, or of ``parents``, including those that ended but were not
    waited for."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _parent(entry) in (parents or {os.getpid()}):
            found.add(int(entry.name))
    return found


def grandchildren() -> set[int]:
    """The processes that children of this one have started."""
    own = children()
    return children(*own) if own else set()


def alive(process: int) -> bool:
    """Whether a process of any user has not ended."""
    try:
        return _fields(Path(f"/proc/{process}"))[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ports() -> set[int]:
    """The TCP ports that this process listens on."""
    return {port for _, port in listening(os.getpid())}


def listening(process: int) -> set[tuple[str, int]]:
    """The addresses (in the format of ``/proc/net/tcp``) and TCP ports of a process's listeners."""
    mine = {_target(link) for link in Path(f"/proc/{process}/fd").iterdir()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in mine:
                address, _, port = local.rpartition(":")
                found.add((address, int(port, 16)))
    return found


def _parent(entry: Path) -> int:
    try:
        return int(_fields(entry)[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _fields(entry: Path) -> list[str]:
    """The fields after a process's name, which may contain spaces: state, parent and so on."""
    return (entry / "stat").read_text().rpartition(")")[2].split()


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
