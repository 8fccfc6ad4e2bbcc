"""What the processes of a job tell each other through its store while something takes long.

Every process counts up a number that says that it lives. One that waits for others looks whether
theirs still move, and where they are; the first that knows what is wrong tells all.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from piper.launch.device.device import LoadedDevice
from piper.launch.watch.faults import described, devices, peers_of
from piper.program.program import Program

_PERIOD = 1.0
"""Seconds between two looks at the store."""
_LONG = 5.0
"""Seconds after which a device says where it is, and looks after those that it waits for."""
SILENT = 15.0
"""Seconds without a sign of life after which a process counts as gone."""
_LOOKED_AFTER = 4
"""The most processes that one looks after."""
_FAILED = "failed"
_NOWHERE = "not waiting"


class Neighbours:
    """One process's view of the others."""

    def __init__(
        self,
        store: dist.Store,
        program: Program,
        number: int,
        timeout: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store
        self._program = program
        self._number = number
        self._timeout = timeout
        self._now = now
        self._looked = 0.0
        self._said = _NOWHERE
        self._heard: dict[int, tuple[int, float]] = {}
        self.device: LoadedDevice | None = None
        """The device of this process, once it is there."""

    def tell(self, problem: str) -> None:
        """Let all others know what went wrong; the first who says something is believed."""
        try:
            self._store.compare_set(_FAILED, "", problem)
        except RuntimeError:
            return  # nobody can be told any more

    def problem(self, seconds: float) -> str | None:
        """What is wrong, if anything is, after so many seconds with one thing."""
        now = self._now()
        if now - self._looked < _PERIOD:
            return None
        self._looked = now
        try:
            found = self._look(seconds, now)
        except RuntimeError as error:
            return f"device {self._number} cannot reach the job's store any more: {error}"
        if found is not None:
            self.tell(found)
        return found

    def _look(self, seconds: float, now: float) -> str | None:
        store = self._store
        store.add(f"alive {self._number}", 1)
        if store.check([_FAILED]):
            return f"{store.get(_FAILED).decode()} (device {self._number} ends with it)"
        if seconds < _LONG:
            self._heard.clear()
            self._say(_NOWHERE)
            return None
        pc = None if self.device is None else self.device.running.bound.unfinished()
        here, waits_for = "in the preparation of communication", self._others()
        if pc is not None and self.device is not None:
            plan = self.device.running.context.plan
            here = f"at {described(plan, pc, self._number)}"
            waits_for = peers_of(plan.instructions[pc], self._number)
        elif self.device is not None:
            here = "within a step"
        self._say(here)
        gone = tuple(peer for peer in self._next(waits_for) if self._silent(peer, now))
        if gone:
            return (
                f"{devices(gone)} gave no sign of life for {SILENT:g} s (killed, stopped, or the "
                f"machine is gone), while device {self._number} waited {here}"
            )
        if seconds > self._timeout:
            return (
                f"device {self._number} has waited {seconds:.0f} s {here}{self._where(waits_for)}"
            )
        return None

    def _say(self, where: str) -> None:
        """Let the others know where this device waits."""
        if where != self._said:
            self._store.set(f"at {self._number}", where)
            self._said = where

    def _next(self, peers: tuple[int, ...]) -> tuple[int, ...]:
        """The few of ``peers`` that this device looks after: those that follow it in a ring, so
        that somebody looks after each, whatever their number."""
        after = [peer for peer in peers if peer > self._number]
        return (*after, *(peer for peer in peers if peer < self._number))[:_LOOKED_AFTER]

    def _others(self) -> tuple[int, ...]:
        return tuple(number for number in self._program.devices if number != self._number)

    def _silent(self, peer: int, now: float) -> bool:
        """Whether a process's number has not moved for long."""
        beat = self._store.add(f"alive {peer}", 0)
        last, since = self._heard.get(peer, (-1, now))
        if beat != last:
            since = now
        self._heard[peer] = beat, since
        return now - since > SILENT

    def _where(self, peers: tuple[int, ...]) -> str:
        """Where others are, as they say."""
        found = []
        for peer in peers[:8]:
            known = self._store.check([f"at {peer}"])
            where = self._store.get(f"at {peer}").decode() if known else _NOWHERE
            found.append(f"device {peer} is {where}")
        return f"; {', '.join(found)}" if found else ""
