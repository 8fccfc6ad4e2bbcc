"""How a device spends a step: computing, communicating beside it, communicating and nothing else,
waiting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from piper.ir.plan.instructions import COMMUNICATING, Verb
from piper.ir.plan.plan import Plan
from piper.view.critical import TimedSpans


@dataclass(frozen=True, slots=True)
class Busy:
    """Seconds of one step of one device."""

    computing: float
    communicating: float
    exposed: float
    """Communicating while nothing is computed."""
    idle: float
    """Computing nothing."""

    def text(self, seconds: float) -> str:
        """The same as shares of a step of so many seconds."""
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


def busy_of(plan: Plan, spans: TimedSpans, seconds: float) -> Busy:
    """How the device of ``plan`` spends a step of so many seconds."""
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
    """The time that any of ``spans`` covers, as spans that do not touch."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def length(spans: Sequence[tuple[float, float]]) -> float:
    """Of spans that do not overlap."""
    return sum(end - start for start, end in spans)
