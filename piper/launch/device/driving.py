"""Runs generators of devices to their end: those of virtual devices in turn, or that of a single
device, which waits for others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from piper.base.errors import PiperError
from piper.ir.plan.instructions import COMMUNICATING
from piper.launch.device.device import Running, WorkerDevice
from piper.launch.device.report import Report
from piper.launch.watch.faults import described
from piper.runtime.comm.loopback import Hub
from piper.runtime.counters import PC
from piper.runtime.executor import CommunicationError
from piper.runtime.pending import Pending


def in_turns(
    hub: Callable[[], Hub], devices: Sequence[WorkerDevice], runs: Sequence[Running]
) -> list[Report]:
    """The reports of all devices of one process, in a deterministic order. ``hub`` returns the
    present hub of the devices."""
    waiting: dict[int, Pending | None] = dict.fromkeys(range(len(runs)))
    reports: dict[int, Report] = {}
    try:
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
                raise PiperError(_stuck(hub(), devices, waiting))
    except BaseException:
        for run in runs:
            run.close()
        for device in devices:
            device.loaded.abandon()
        hub().clear()
        raise
    return [reports[i] for i in sorted(reports)]


def _stuck(hub: Hub, devices: Sequence[WorkerDevice], waiting: Mapping[int, Pending | None]) -> str:
    lines = ["no device can continue:"]
    for i, pending in waiting.items():
        assert pending is not None
        at = devices[i].loaded.executor.at[PC]
        lines.append(f"  device {devices[i].number} at instruction {at} waits for {pending.name}")
    return "\n".join(lines + [f"  {line}" for line in hub.waiting()])


def alone(devices: Sequence[WorkerDevice], runs: Sequence[Running]) -> list[Report]:
    """The report of the only device. The host waits for each pending communication; on a GPU it
    never has to."""
    ((device,), (run,)) = devices, runs
    while True:
        try:
            pending = next(run)
        except StopIteration as end:
            return [end.value]
        except CommunicationError as error:
            pc, cause = error.pc, error.__cause__
            assert pc is not None
            raise _lost(device, pc, cause) from cause
        try:
            pending.wait()
        except Exception as error:
            run.close()
            rows = device.loaded.running.context.plan.instructions
            names = [x.name if x.verb in COMMUNICATING else "" for x in rows]
            raise _lost(device, names.index(pending.name), error) from error


def _lost(device: WorkerDevice, pc: int, cause: BaseException | None) -> CommunicationError:
    """The error of a failed communication, which names its peers."""
    plan = device.loaded.running.context.plan
    return CommunicationError(
        f"device {device.number}, {described(plan, pc, device.number)}: "
        f"{type(cause).__name__}: {cause}; most likely one of those has ended or hangs: "
        "look at what it wrote first"
    )
