"""A step that ran, or was simulated, as a picture needs it: who did what when, and what it held.

Simulated and measured steps become the same ``Run``, so that every picture can show either, or two
of them side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Event:
    """One instruction on one device, and when it ran."""

    row: int
    """The index of its stream in ``Run.rows``."""
    start: float
    """Seconds from the begin of the step."""
    end: float
    name: str
    """The node of the DAG, as texts and errors call it."""
    node: int
    pc: int
    """In the device's plan."""
    kind: str
    """"F", "B", "BI", "BW", "send", "recv", "all_reduce", ..., or "update"."""
    microbatch: int | None
    stage: str
    """Empty if it belongs to none."""
    directive: str
    """The one that made the node or changed it last, as written."""
    tags: str
    """All of the node's tags, "layer 3, PP 1, MB 0"."""
    nbytes: int = 0
    """What a communication moves."""
    flops: int = 0
    critical: bool = False
    """Whether the step would end sooner if this did."""


@dataclass(frozen=True, slots=True)
class StreamRow:
    """One stream of one device."""

    device: int
    """The index of the device in ``Run.devices``."""
    stream: str


@dataclass(frozen=True, slots=True)
class ShownDevice:
    """One device, or several that do the same, and what each holds."""

    name: str
    memory: tuple[tuple[float, int], ...] = ()
    """Bytes from a moment on, in the order of time."""
    limit: int | None = None
    """Bytes that it has."""


@dataclass(frozen=True, slots=True)
class Run:
    """One step."""

    title: str
    seconds: float
    devices: tuple[ShownDevice, ...]
    rows: tuple[StreamRow, ...]
    """Those of one device stand together, in the order of ``devices``."""
    events: tuple[Event, ...]
    """In the order of rows, and within a row of begin; those of one row do not overlap."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What is known of the whole: a name and its figure, to be read."""
