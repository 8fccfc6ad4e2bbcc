"""A measured or simulated step in the form that views need: events, streams and memory over time.

Both kinds of steps become a ``Run``, so every view can show either, or two side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Spans:
    """One device's instructions: their program counters, and the start and end of each, in seconds
    from the start of the step."""

    pcs: tuple[int, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]

    def memory(self, over_time: Sequence[tuple[int, int]]) -> tuple[tuple[float, int], ...]:
        """(seconds, bytes held from then on): an instruction allocates its outputs and workspace
        when it starts, and its frees happen when it ends. The curve begins with the step, at the
        bytes of the first instruction."""
        held: list[tuple[float, int]] = []
        now = 0.0
        for i, pc in enumerate(self.pcs):
            during, after = over_time[pc]
            now = max(now, self.start[i]) if i else 0.0
            held.append((now, during))
            if after != during:
                now = max(now, self.end[i])
                held.append((now, after))
        return tuple(held)


@dataclass(frozen=True, slots=True)
class Event:
    """One instruction on one device, with its times."""

    row: int
    """The index of its stream in ``Run.rows``."""
    start: float
    """Seconds from the start of the step."""
    end: float
    name: str
    """The name of the DAG node, as in printed DAGs and errors."""
    node: int
    pc: int
    """The program counter in the device's plan."""
    kind: str
    """"F", "B", "BI", "BW", "send", "recv", "all_reduce", ..., or "update"."""
    microbatch: int | None
    stage: str
    """Empty if it has no stage."""
    directive: str
    """The directive that made the node or last changed it, as written."""
    tags: str
    """The node's tags, for example "layer 3, PP 1, MB 0"."""
    nbytes: int = 0
    """Bytes of a communication."""
    flops: int = 0
    critical: bool = False
    """Whether it is on the critical path of the step."""


@dataclass(frozen=True, slots=True)
class StreamRow:
    """One stream of one device."""

    device: int
    """The index of the device in ``Run.devices``."""
    stream: str


@dataclass(frozen=True, slots=True)
class ShownDevice:
    """One device, or several equal ones, and the memory of each."""

    name: str
    memory: tuple[tuple[float, int], ...] = ()
    """(seconds, bytes held from then on), in order of time."""
    limit: int | None = None
    """Bytes of its memory."""


@dataclass(frozen=True, slots=True)
class Run:
    """One step."""

    title: str
    seconds: float
    devices: tuple[ShownDevice, ...]
    rows: tuple[StreamRow, ...]
    """Grouped by device, in the order of ``devices``."""
    events: tuple[Event, ...]
    """Sorted by row, then by start; the events of one row do not overlap."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Figures of the whole step, by name, formatted for people."""
