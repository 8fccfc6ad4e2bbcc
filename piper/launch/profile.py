"""What a step took, instruction by instruction, on every device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from piper.program import Program
from piper.runtime.recording import Measured
from piper.view.exposed import Exposure, Span, exchanges


@dataclass(frozen=True)
class Profile:
    """By device, the instructions of its plan with the time at which each began and ended, in
    seconds on a clock that all processes of one machine share."""

    program: Program = field(repr=False)
    measured: Mapping[int, tuple[Measured, ...]] = field(repr=False)

    @cached_property
    def spans(self) -> Mapping[int, list[Span]]:
        """By device, the same as nodes of the DAG."""
        return {
            device: [Span(nodes[one.place], one.start, one.end) for one in self.measured[device]]
            for device in sorted(self.measured)
            for nodes in [[x.node for x in self.program.plan_of(device).instructions]]
        }

    @property
    def seconds(self) -> float:
        """From the first instruction's begin to the last one's end."""
        every = [one for row in self.measured.values() for one in row]
        return max(one.end for one in every) - min(one.start for one in every)

    @property
    def exchanges(self) -> Exposure:
        """How much of the exchanges between experts shows, over all devices."""
        parts = (exchanges(self.program.dag, spans) for spans in self.spans.values())
        return sum(parts, start=Exposure(0.0, 0.0))
