"""Who waits for whom among the workers of a job, and who does not go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piper.ir.grouped import grouped
from piper.launch.status.seen import Number, SeenInstruction, SeenWorker
from piper.launch.status.stopped import is_stopped
from piper.runtime.counters import NOWHERE


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker and what it waits for."""

    worker: SeenWorker
    waits_for: tuple[int, ...]
    """The devices that have not come to the communication that it waits for. It is under
    way if there is none."""
    stopped: bool
    """Whether a signal has stopped it."""


def states_of(workers: Sequence[SeenWorker]) -> list[WorkerState]:
    """The states of the workers of one job."""
    by_device = {worker.device: worker for worker in workers}
    states = []
    for worker in workers:
        behind: tuple[int, ...] = ()
        if (awaited := worker.awaited) is not None:
            behind = tuple(
                peer for peer in awaited.peers if _before(by_device.get(peer), awaited, worker)
            )
        states.append(WorkerState(worker, behind, is_stopped(worker.pid)))
    return states


def holding_up(states: Sequence[WorkerState]) -> list[WorkerState]:
    """Those for whom others wait, and who wait for nobody."""
    wanted = {device for state in states for device in state.waits_for}
    return [x for x in states if x.worker.device in wanted and (x.stopped or not x.waits_for)]


def jobs_of(workers: Sequence[SeenWorker]) -> list[list[SeenWorker]]:
    """The workers of each job."""
    return list(grouped((worker.job, worker) for worker in workers).values())


def _before(peer: SeenWorker | None, awaited: SeenInstruction, waiting: SeenWorker) -> bool:
    """Whether ``peer`` has not come to its part of a communication."""
    if peer is None:
        return True
    ahead = peer.header[Number.STEPS] - waiting.header[Number.STEPS]
    if ahead or peer.pc == NOWHERE:
        return ahead <= 0
    nodes = [x.node for x in peer.plan]
    return awaited.node in nodes and peer.pc <= nodes.index(awaited.node)
