"""The workers of this user on this machine, as they publish themselves. Needs no torch."""

from __future__ import annotations

import json
import os
import re
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from piper.runtime.counters import AWAITED, NOWHERE, PC, PLAN

NAMELESS = "piper-at"
"""The name of the memory of a worker without a folder."""
HEADER = struct.Struct("9q")
"""Its first bytes; then come the names of all instructions."""
_FILES = re.compile(rf"/piper-[^/]+/at\.\d+$|^/memfd:{NAMELESS} ")


class Number(IntEnum):
    """The numbers in the header after those of the program counter."""

    STEPS = 3
    """Training steps so far."""
    ENDED = 4
    """When the last one ended, on the monotonic clock, in nanoseconds."""
    TOOK = 5
    """Nanoseconds from the end of the one before."""
    MEMORY = 6
    """Peak bytes."""
    LENGTH = 7
    """Bytes that follow the header."""
    GIVEN_UP = 8
    """How many calls it had got when its parent last gave one up; the parent writes this."""


class SeenInstruction(NamedTuple):
    """An instruction of a plan."""

    name: str
    node: int = NOWHERE
    """The DAG node of a communication."""
    peers: tuple[int, ...] = ()
    """The other devices of a communication."""


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """One worker process at a moment."""

    job: str
    device: int
    devices: int
    """The number of devices of its program."""
    tokens: int
    """Tokens of a batch."""
    header: tuple[int, ...]
    plans: tuple[tuple[SeenInstruction, ...], ...]
    pid: int = 0

    @property
    def pc(self) -> int:
        return self.header[PC]

    @property
    def plan(self) -> tuple[SeenInstruction, ...]:
        """The plan that it runs, or ran last."""
        return self.plans[self.header[PLAN]]

    @property
    def at(self) -> SeenInstruction | None:
        """The instruction that it runs, or ran last in a call that failed."""
        return None if self.pc == NOWHERE else self.plan[self.pc]

    @property
    def awaited(self) -> SeenInstruction | None:
        """The communication that it waits for."""
        pc = self.header[AWAITED]
        return None if pc == NOWHERE or self.at is None else self.plan[pc]

    @property
    def tokens_per_second(self) -> float:
        took = self.header[Number.TOOK]
        return self.tokens * 1e9 / took if took else 0.0


def seen_in(content: bytes, pid: int = 0) -> SeenWorker | None:
    """What a worker has published; None if it has no program yet."""
    if len(content) < HEADER.size:
        return None
    header = HEADER.unpack_from(content)
    length = header[Number.LENGTH]
    if not length or len(content) < HEADER.size + length:
        return None
    facts = json.loads(content[HEADER.size : HEADER.size + length])
    rows = facts.pop("plans")
    plans = tuple(tuple(SeenInstruction(*row) for row in plan) for plan in rows)
    return SeenWorker(header=header, plans=plans, pid=pid, **facts)


def seen_workers() -> list[SeenWorker]:
    """All workers of this user on this machine, by job and device."""
    workers: dict[tuple[int, int], SeenWorker] = {}
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with suppress(OSError):  # it may end meanwhile, or belong to someone else
            if process.stat().st_uid != os.getuid():
                continue
            for link in (process / "fd").iterdir():
                with suppress(OSError, ValueError):
                    if not _FILES.search(os.readlink(link)):
                        continue
                    facts = link.stat()
                    key = facts.st_dev, facts.st_ino
                    worker = seen_in(link.read_bytes(), int(process.name))
                    if worker is not None:  # a child of the worker has it open, too
                        workers.setdefault(key, worker)
    return sorted(workers.values(), key=lambda worker: (worker.job, worker.device))
