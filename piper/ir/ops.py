"""What nodes of the DAG do, and the groups of devices that do it."""

from __future__ import annotations

from dataclasses import dataclass

from piper.ir.collectives import CollectiveKind
from piper.ir.passes import Pass

Group = tuple[int, ...]


def same_group(a: Group, b: Group) -> bool:
    """Whether two groups are equal: fast where they are one object, as they mostly are."""
    return a is b or a == b


COMPUTE = "compute"
COPY = "copy"
"""The stream on which state is copied on the host."""


@dataclass(frozen=True, slots=True)
class Compute:
    """One pass of one chunk for one microbatch."""

    chunk: int
    which: Pass
    microbatch: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A send with its receive: what one group has, another gets. Both divide the value along
    ``dim``, each evenly among its members and in their order."""

    source: Group
    target: Group
    dim: int = 0
    replicas: tuple[int, int] = (1, 1)
    """How many neighbours in the source, and in the target, have the same part."""
    counts: int | None = None
    """Of counts of rows that are sorted by expert, how many rows each of the source has: who gets
    a range of them gets the counts of that range."""

    @property
    def parts(self) -> tuple[int, int]:
        """Into how many parts the source and the target divide the value."""
        return len(self.source) // self.replicas[0], len(self.target) // self.replicas[1]


@dataclass(frozen=True, slots=True)
class Collective:
    """One communication of all members of a group; several groups may do the same side by side."""

    kind: CollectiveKind
    groups: tuple[Group, ...]
    rows: int | None = None
    """Of an all_to_all by counts that are known when it runs, the rows that a device has room for;
    None if all parts are equal."""
    padded: bool = False
    """Of one by counts, whether there is room for all rows, so that in a CUDA graph, where no host
    can know the counts, as much is sent as there is room for."""
    by_host: bool = False
    """Of one by counts, whether the host has to know them to begin it, as on GPUs. Elsewhere its
    stream's own thread reads them when its turn comes."""
    runs: int = 1
    """Of rows sorted by expert, or their counts: of how many sorted ranges (runs) those of a member
    may be, because a group of another size sorted them."""

    @property
    def in_turn(self) -> bool:
        """Whether it may be begun before the counts are there that its stream brings before it."""
        return self.rows is not None and not self.by_host


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer on one bucket of parameters."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Add:
    """What one chunk gives to the gradient of a value is added to what later chunks gave."""

    value: int
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Select:
    """Each member of a group takes its own part of what all of them have."""

    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A device's share of the parameters and of the optimizer's state of one bucket, copied on the
    host for a checkpoint."""

    bucket: int
    nbytes: int
    """What one device copies."""


Op = Compute | Transfer | Collective | Update | Add | Select | Copy
