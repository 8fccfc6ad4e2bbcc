"""How much of a communication shows: the time in which its device computes nothing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from piper.ir.collectives import CollectiveKind
from piper.ir.dag.dag import Dag
from piper.ir.ops import Collective, Compute


class Span(NamedTuple):
    """When a device was at a node of the DAG."""

    node: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Exposure:
    """Seconds of communication, and of these the seconds that nothing covers."""

    seconds: float
    exposed: float

    def __add__(self, other: Exposure) -> Exposure:
        return Exposure(self.seconds + other.seconds, self.exposed + other.exposed)

    def times(self, devices: int) -> Exposure:
        """That of so many devices that do the same."""
        return Exposure(self.seconds * devices, self.exposed * devices)

    @property
    def share(self) -> float:
        """The exposed part of the whole; 0 if there is nothing to cover."""
        return self.exposed / self.seconds if self.seconds else 0.0


def all_to_all(dag: Dag, spans: Sequence[Span]) -> Exposure:
    """How much of the all-to-all dispatch and combine is exposed, on a device that was at these
    nodes."""
    total = exposed = 0.0
    computing = _together(s for s in spans if isinstance(dag.nodes[s.node].op, Compute))
    starts = [start for start, _ in computing]
    for one in spans:
        if not _is_all_to_all(dag, one.node):
            continue
        total += one.end - one.start
        exposed += one.end - one.start
        for start, end in computing[max(0, bisect_right(starts, one.start) - 1) :]:
            if start >= one.end:
                break
            exposed -= max(0.0, min(one.end, end) - max(one.start, start))
    return Exposure(total, exposed)


def _together(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """When any of them runs, in order: those of several streams may overlap."""
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda s: s.start):
        if found and span.start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], span.end)
        else:
            found.append((span.start, span.end))
    return found


def _is_all_to_all(dag: Dag, node: int) -> bool:
    op = dag.nodes[node].op
    return isinstance(op, Collective) and op.kind is CollectiveKind.ALL_TO_ALL
