"""The time of a device in a step: compute, communication (hidden or exposed) and waiting."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from piper.ir.collectives import Move
from piper.ir.dag.dag import Dag
from piper.ir.ops import Collective, Compute
from piper.ir.plan.columns import VERBS, Columns
from piper.ir.plan.instructions import COMMUNICATING, Verb
from piper.ir.plan.plan import Plan
from piper.view.runs import Spans


@dataclass(frozen=True, slots=True)
class Busy:
    """Seconds of one step of one device."""

    computing: float
    communicating: float
    exposed: float
    """Communication without concurrent compute."""
    idle: float
    """Time without compute; includes ``exposed``."""

    def text(self, seconds: float) -> str:
        """The same as shares of a step of ``seconds``."""
        waits = (self.idle - self.exposed) / seconds
        return (
            f"computes {self.computing / seconds:.1%}, exposed communication "
            f"{self.exposed / seconds:.1%}, waits {waits:.1%}"
        )

    def to_json(self) -> dict[str, float]:
        """The same as plain data."""
        return {
            "compute_seconds": self.computing,
            "communication_seconds": self.communicating,
            "exposed_communication_seconds": self.exposed,
            "idle_seconds": self.idle,
        }


def busy_of(plan: Plan, spans: Spans, seconds: float) -> Busy:
    """The times of a device with ``plan`` in a step of ``seconds``."""
    computing: list[tuple[float, float]] = []
    talking: list[tuple[float, float]] = []
    verbs = Columns.of(plan.instructions).verbs.tolist()
    for pc, start, end in zip(spans.pcs, spans.start, spans.end, strict=True):
        verb = VERBS[verbs[pc]]
        if verb is not Verb.COPY:
            (talking if verb in COMMUNICATING else computing).append((start, end))
    computed, talked = union(computing), union(talking)
    busy = length(computed)
    both = length(computed) + length(talked) - length(union([*computed, *talked]))
    return Busy(busy, length(talked), length(talked) - both, seconds - busy)


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of ``spans``, as sorted spans that do not touch."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def length(spans: Sequence[tuple[float, float]]) -> float:
    """The total length of spans that do not overlap."""
    return sum(end - start for start, end in spans)


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
