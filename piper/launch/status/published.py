"""What a worker publishes of its device, in memory that other processes can read.

The memory is a file in the folder of the workers, or one without a name (under torchrun), which the
process holds open. Nothing listens, and nothing is written to a disk.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from typing import Any

from piper.ir.plan.instructions import COMMUNICATING, Instruction
from piper.launch.device.device import WorkerDevice
from piper.launch.device.loaded_device import memory_of
from piper.launch.status.seen import HEADER, NAMELESS, Number
from piper.launch.watch.faults import peers_of
from piper.runtime.counters import AWAITED, NOWHERE, PC


class Published:
    """The published place of one device."""

    def __init__(self, file: int) -> None:
        """``file`` is the descriptor of the memory; it stays open."""
        self._file = file
        os.pwrite(file, bytes(HEADER.size), 0)  # an error on a full disk; the mapping would crash
        self._at = memoryview(mmap.mmap(file, HEADER.size)).cast("q")
        self._calls = 0
        self._at[PC] = self._at[AWAITED] = NOWHERE
        self._known: tuple[Any, int] = None, 0

    @staticmethod
    def nameless() -> Published | None:
        """In memory without a file; None where the system has none."""
        if not hasattr(os, "memfd_create"):
            return None
        return Published(os.memfd_create(NAMELESS))

    def forget(self) -> None:
        """The device has no plans any more."""
        self._known = None, 0

    def begin(self) -> None:
        """A call begins: no instruction runs yet."""
        self._calls += 1
        self._at[PC] = self._at[AWAITED] = NOWHERE

    @property
    def is_given_up(self) -> bool:
        """Whether the call under way has failed elsewhere."""
        return self._at[Number.GIVEN_UP] >= self._calls

    def end(self, device: WorkerDevice, job: str) -> None:
        """A call ended without an error."""
        self._at[PC] = NOWHERE
        if device.waits:
            return
        loaded = device.loaded
        if self._known != (loaded, len(loaded.plans)):
            self._known = loaded, len(loaded.plans)
            self._describe(device, job)
            loaded.executor.at = self._at
        made = device.state.steps - self._at[Number.STEPS]
        if made:
            now = time.monotonic_ns()
            self._at[Number.TOOK] = (now - self._at[Number.ENDED]) // max(made, 1)
            self._at[Number.ENDED] = now
            self._at[Number.STEPS] += made
        self._at[Number.MEMORY] = memory_of(device.state.where)

    def _describe(self, device: WorkerDevice, job: str) -> None:
        """Write the instructions of the device's plans."""
        program, number = device.loaded.program, device.number
        facts = {
            "job": job,
            "device": number,
            "devices": len(program.devices),
            "tokens": program.tokens,
            "plans": [[_row(x, number) for x in p.instructions] for p in device.loaded.plans],
        }
        content = json.dumps(facts).encode()
        self._at[Number.LENGTH] = 0
        os.pwrite(self._file, content, HEADER.size)
        self._at[Number.LENGTH] = len(content)
        self._at[Number.ENDED] = time.monotonic_ns()


def _row(x: Instruction, device: int) -> list[Any]:
    """The name of an instruction; of a communication also its node and the other devices."""
    return [x.name, x.node, peers_of(x, device)] if x.verb in COMMUNICATING else [x.name]
