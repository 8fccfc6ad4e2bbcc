"""Runs generators of devices to their end: those of virtual devices in turn, or that of a single
device, which waits for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from piper.base.errors import PiperError
from piper.ir.plan.instructions import COMMUNICATING
from piper.launch.device.device import Running, WorkerDevice
from piper.launch.device.report import Report
from piper.launch.watch.faults import described
from piper.runtime.comm.loopback import Hub
from piper.runtime.executor import CommunicationError
from piper.runtime.pending import Pending


class Linked(Protocol):
    """Links between devices of one process."""

    hub: Hub


class InTurns:
    """All devices of one process, in a deterministic order."""

    def __init__(self, links: Linked) -> None:
        self._links = links

    def __call__(self, devices: Sequence[WorkerDevice], runs: Sequence[Running]) -> list[Report]:
        try:
            return self._turns(devices, runs)
        except BaseException:
            for run in runs:
                run.close()
            for device in devices:
                device.loaded.abandon()
            self._links.hub.clear()
            raise

    def _turns(self, devices: Sequence[WorkerDevice], runs: Sequence[Running]) -> list[Report]:
        waiting: dict[int, Pending | None] = dict.fromkeys(range(len(runs)))
        reports: dict[int, Report] = {}
        while waiting:
            moved = False
            for i, pending in list(waiting.items()):
                if pending is not None and not pending.done():
                    continue
                moved = True
                try:
                    waiting[i] = next(runs[i])
                except StopIteration as end:
                    del waiting[i]
                    reports[i] = end.value
            if not moved:
                raise PiperError(self._stuck(devices, waiting))
        return [reports[i] for i in sorted(reports)]

    def _stuck(self, devices: Sequence[WorkerDevice], waiting: dict[int, Pending | None]) -> str:
        lines = ["no device can continue:"]
        for i, pending in waiting.items():
            device = devices[i]
            assert pending is not None
            at = device.loaded.executor.at[0]
            lines.append(f"  device {device.number} at instruction {at} waits for {pending.name}")
        lines += [f"  {line}" for line in self._links.hub.waiting()]
        return "\n".join(lines)


class _LostError(CommunicationError):
    """A communication failed while the host waited for it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def alone(devices: Sequence[WorkerDevice], runs: Sequence[Running]) -> list[Report]:
    """The report of the only device. A communication error names its peers."""
    ((device,), (run,)) = devices, runs
    try:
        return [_finished(run)]
    except CommunicationError as error:
        plan = device.loaded.running.context.plan
        pc, cause = error.pc, error.__cause__
        if isinstance(error, _LostError):
            names = [x.name if x.verb in COMMUNICATING else "" for x in plan.instructions]
            pc = names.index(error.name)
        assert pc is not None
        raise CommunicationError(
            f"device {device.number}, {described(plan, pc, device.number)}: "
            f"{type(cause).__name__}: {cause}; most likely one of those has ended or hangs: "
            "look at what it wrote first"
        ) from cause


def _finished(run: Running) -> Report:
    """Run a step to its end. The host waits for each pending communication; on a GPU it never has
    to."""
    while True:
        try:
            pending = next(run)
        except StopIteration as end:
            report: Report = end.value
            return report
        try:
            pending.wait()
        except Exception as error:
            run.close()
            raise _LostError(pending.name) from error
