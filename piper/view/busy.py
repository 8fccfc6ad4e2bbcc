"""The time of a device in a step: compute, communication (hidden or exposed) and waiting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    for i, pc in enumerate(spans.pcs):
        verb = plan.instructions[pc].verb
        if verb is not Verb.COPY:
            row = talking if verb in COMMUNICATING else computing
            row.append((spans.start[i], spans.end[i]))
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
