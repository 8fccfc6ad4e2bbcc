"""The operations of DAG nodes, and the device groups that run them."""

from __future__ import annotations

from msgspec import Struct

from piper.ir.collectives import Move, Placement, Sharded, move_between
from piper.ir.passes import Pass

Group = tuple[int, ...]


def same_group(a: Group, b: Group) -> bool:
    """Whether two groups are equal; fast if they are one object, which is the usual case."""
    return a is b or a == b


COMPUTE = "compute"
COPY = "copy"
"""The stream of state copies to the host."""


class Compute(Struct, frozen=True, gc=False):
    """One pass of one chunk for one microbatch."""

    chunk: int
    which: Pass
    microbatch: int


class Transfer(Struct, frozen=True, gc=False):
    """A send with its receive: a value goes from the source group to the target group. Both shard
    it along ``dim``, evenly and in the order of their members."""

    source: Group
    target: Group
    dim: int = 0
    replicas: tuple[int, int] = (1, 1)
    """How many adjacent devices in the source, and in the target, hold the same part."""
    counts: int | None = None
    """Set if the value is the row counts of rows sorted by expert: the number of rows on each
    source device. A target device that gets a range of the rows gets the counts of that range."""

    @property
    def parts(self) -> tuple[int, int]:
        """The number of shards of the value in the source and in the target."""
        return len(self.source) // self.replicas[0], len(self.target) // self.replicas[1]


class Collective(Struct, frozen=True, gc=False):
    """Changes the layout of a value over all members of a group; several groups may do it side by
    side. In redistributed activations, dimension 0 indexes the parts. In the rows of experts,
    dimension 0 is that of the experts, dimension 1 that of the rows."""

    before: Placement
    after: Placement
    groups: tuple[Group, ...]
    rows: int | None = None
    """Set for an all_to_all by counts, which are known only at run time: the capacity of a device
    in rows. None if all parts are equal."""
    padded: bool = False
    """For an all_to_all by counts: whether the capacity holds all rows. Then a CUDA graph, in which
    the host cannot read the counts, sends the full capacity."""
    by_host: bool = False
    """For an all_to_all by counts: whether the host must know the counts to start it, as on GPUs.
    Elsewhere the stream's own thread reads them when it runs the collective."""
    runs: int = 1
    """For rows sorted by expert, or their counts: how many sorted runs a member's rows may consist
    of, because a group of another size sorted them."""

    @property
    def kind(self) -> Move:
        return move_between(self.before, self.after)

    @property
    def dispatches(self) -> bool:
        """Whether it takes rows to their experts."""
        return (self.before, self.after) == (Sharded(1), Sharded(0))

    @property
    def combines(self) -> bool:
        """Whether it takes rows back from their experts."""
        return (self.before, self.after) == (Sharded(0), Sharded(1))

    @property
    def in_turn(self) -> bool:
        """Whether it may be issued before its counts arrive, if the same stream brings them."""
        return self.rows is not None and not self.by_host


class Update(Struct, frozen=True, gc=False):
    """The optimizer update of one bucket of parameters."""

    bucket: int


class Add(Struct, frozen=True, gc=False):
    """Adds one chunk's gradient of a value to the gradients from later chunks."""

    value: int
    chunk: int
    microbatch: int


class Select(Struct, frozen=True, gc=False):
    """Each member of a group takes its own shard of a replicated value."""

    groups: tuple[Group, ...]


class Copy(Struct, frozen=True, gc=False):
    """Copies a device's share of one bucket's parameters and optimizer state to the host, for a
    checkpoint."""

    bucket: int
    nbytes: int
    """Bytes that one device copies."""


Op = Compute | Transfer | Collective | Update | Add | Select | Copy
