"""Heartbeats and failure reports that the processes of a job exchange through its store.

Every process increments its own heartbeat counter. A process that waits for peers checks whether
their counters still move, and where they are. The first process that detects a problem reports it
to all.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from piper.ir.ops import Group
from piper.launch.device.loaded_device import LoadedDevice
from piper.launch.watch.faults import described, devices, peers_of

_PERIOD = 1.0
"""Seconds between two checks of the store."""
_LONG = 5.0
"""Seconds of waiting after which a device publishes where it is and checks its peers."""
SILENT = 15.0
"""Seconds without a heartbeat after which a process counts as gone."""
_LOOKED_AFTER = 4
"""The most peers that one process checks."""
_FAILED = "failed"
_NOWHERE = "not waiting"


class Heartbeat:
    """One process's view of the others."""

    def __init__(
        self,
        store: dist.Store,
        members: Group,
        number: int,
        timeout: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store
        self._members = members
        self._number = number
        self._timeout = timeout
        self._now = now
        self._looked = 0.0
        self._said = _NOWHERE
        self._heard: dict[int, tuple[int, float]] = {}
        self.device: LoadedDevice | None = None
        """The device of this process, once it is loaded."""

    def tell(self, problem: str) -> None:
        """Report a problem to all processes; the first report wins."""
        try:
            self._store.compare_set(_FAILED, "", problem)
        except RuntimeError:
            return  # the store is gone

    def problem(self, seconds: float) -> str | None:
        """The problem, if any, when the current work has taken ``seconds`` so far."""
        now = self._now()
        if now - self._looked < _PERIOD:
            return None
        self._looked = now
        try:
            problem = self._look(seconds, now)
        except RuntimeError as error:
            return f"device {self._number} cannot reach the job's store any more: {error}"
        if problem is not None:
            self.tell(problem)
        return problem

    def _look(self, seconds: float, now: float) -> str | None:
        store = self._store
        store.add(f"alive {self._number}", 1)
        if store.check([_FAILED]):
            return f"{store.get(_FAILED).decode()} (device {self._number} ends with it)"
        if seconds < _LONG:
            self._heard.clear()
            self._say(_NOWHERE)
            return None
        pc = None if self.device is None else self.device.unfinished()
        here = "in the preparation of communication"
        waits_for = tuple(number for number in self._members if number != self._number)
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
        """Publish where this device waits."""
        if where != self._said:
            self._store.set(f"at {self._number}", where)
            self._said = where

    def _next(self, peers: tuple[int, ...]) -> tuple[int, ...]:
        """The few of ``peers`` that this device checks: its successors in a ring, so that every
        peer is checked by some device, however many there are."""
        after = [peer for peer in peers if peer > self._number]
        return (*after, *(peer for peer in peers if peer < self._number))[:_LOOKED_AFTER]

    def _silent(self, peer: int, now: float) -> bool:
        """Whether a peer's heartbeat has not moved for ``SILENT`` seconds."""
        beat = self._store.add(f"alive {peer}", 0)
        last, since = self._heard.get(peer, (-1, now))
        if beat != last:
            since = now
        self._heard[peer] = beat, since
        return now - since > SILENT

    def _where(self, peers: tuple[int, ...]) -> str:
        """Where the first eight ``peers`` are, as they published it."""
        places = []
        for peer in peers[:8]:
            known = self._store.check([f"at {peer}"])
            where = self._store.get(f"at {peer}").decode() if known else _NOWHERE
            places.append(f"device {peer} is {where}")
        return f"; {', '.join(places)}" if places else ""
