"""Exposed communication: the time in which a device communicates and does not compute."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from piper.ir.collectives import Move
from piper.ir.dag.dag import Dag
from piper.ir.ops import Collective, Compute
from piper.view.busy import union


class Span(NamedTuple):
    """The time in which a device ran a node of the DAG."""

    node: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Exposure:
    """Seconds of communication, and how many of them no compute hides."""

    seconds: float
    exposed: float

    def __add__(self, other: Exposure) -> Exposure:
        return Exposure(self.seconds + other.seconds, self.exposed + other.exposed)

    def times(self, devices: int) -> Exposure:
        """The sum over ``devices`` equal devices."""
        return Exposure(self.seconds * devices, self.exposed * devices)

    @property
    def share(self) -> float:
        """The exposed share of all communication; 0 if there is none."""
        return self.exposed / self.seconds if self.seconds else 0.0


def all_to_all(dag: Dag, spans: Sequence[Span]) -> Exposure:
    """The exposure of the all-to-all dispatch and combine on a device with these spans."""
    total = exposed = 0.0
    computing = union((s.start, s.end) for s in spans if isinstance(dag.nodes[s.node].op, Compute))
    starts = [start for start, _ in computing]
    for one in spans:
        op = dag.nodes[one.node].op
        if not isinstance(op, Collective) or op.kind is not Move.ALL_TO_ALL:
            continue
        total += one.end - one.start
        exposed += one.end - one.start
        for start, end in computing[max(0, bisect_right(starts, one.start) - 1) :]:
            if start >= one.end:
                break
            exposed -= max(0.0, min(one.end, end) - max(one.start, start))
    return Exposure(total, exposed)
