"""The parts of a cut model: chunks, the values between them, and a body for each chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from piper.base.errors import CaptureError
from piper.capture.regions import Region
from piper.ir.shards import AxisPlacement, Draws, Gathered, Segment
from piper.ir.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class ChunkValue:
    """A tensor of one microbatch: an input from the batch, or the output of a chunk."""

    index: int
    name: str
    spec: TensorSpec
    producer: int | None
    """The chunk that computes it; None for a tensor of the batch."""
    placements: tuple[AxisPlacement, ...] = ()
    """Its placement along each axis where it is not replicated."""


@dataclass(frozen=True, slots=True)
class Body:
    """A chunk's forward as a function ``(*parameters, *buffers, *inputs) -> (*outputs, *updates)``.

    Chunks whose bodies have equal ``key`` run the same computation on different tensors.
    """

    module: fx.GraphModule
    parameters: int
    buffers: int
    inputs: int
    outputs: int
    updates: int
    key: str

    def fakes(self) -> list[FakeTensor]:
        """The fake tensors that the body was traced with, one for each argument."""
        return [node.meta["val"] for node in self.module.graph.find_nodes(op="placeholder")]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A maximal run of ops with one stack of regions, and the names of its body's arguments."""

    index: int
    tags: tuple[Region, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    updates: tuple[str, ...]
    body: Body
    segments: tuple[Segment, ...] = ()
    """Its segment of the region under tensor and context parallelism, one for each axis."""
    draws: Draws | None = None
    """The random draws of its segment, if it has any."""
    gathered: tuple[Gathered, ...] = ()

    @property
    def name(self) -> str:
        return "/".join(map(str, self.tags)) or "model"


@dataclass(frozen=True, slots=True)
class Cut:
    """The chunks in an order that respects every edge, and the values between them."""

    chunks: tuple[Chunk, ...]
    values: tuple[ChunkValue, ...]
    loss: int
    count: int | None
    outputs: tuple[int, ...]
    updates: frozenset[str]
    """The buffers that some chunk updates."""
    origin: tuple[int, ...] = ()
    """For each chunk, the chunk of the uncut model that it is or of which it is a segment; empty if
    no chunk is cut into segments."""

    def renumbered(
        self, chunks: list[Chunk], values: list[ChunkValue], number: Callable[[int], int]
    ) -> Cut:
        """The same step of other chunks; ``number`` gives the new number of a value."""
        return replace(
            self,
            chunks=tuple(chunks),
            values=tuple(values),
            loss=number(self.loss),
            count=None if self.count is None else number(self.count),
            outputs=tuple(map(number, self.outputs)),
        )


def refuse_empty(cut: Cut, regions: Mapping[Region, str], loss_region: Region) -> None:
    """Raise for a region without a chunk: no filter would ever match it."""
    held = {region for chunk in cut.chunks for region in chunk.tags}
    for region, where in regions.items():
        if region not in held and region != loss_region:
            raise CaptureError(
                f"region {region} is empty ({where}): it holds no operation on the batch or on "
                "parameters whose result is used; remove it, or put the operations inside"
            )
