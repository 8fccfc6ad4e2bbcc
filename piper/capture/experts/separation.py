"""Proves that a region treats each expert and each row by itself: no operation needs a
redistribution along an axis of experts, nor along an axis of rows.

The derivative of a function of each row alone is also one of each row alone: the backward needs no
proof of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from torch import fx
from torch.distributed.tensor import Shard

from piper.base.errors import CaptureError
from piper.capture.blame import user_frames
from piper.capture.chunk.chunks import Body, Chunk
from piper.capture.experts.part_rules import Axis, Mixed, PartRules, UnknownOperation, part_rules
from piper.capture.shard.placements import REPLICATED, SHARDED, Placements
from piper.ir.collectives import Placement
from piper.ir.shards import SortedRows


@dataclass(frozen=True, slots=True)
class Separate:
    """Where the experts and the rows of a region are in each of its values."""

    experts: Mapping[fx.Node, Placements]
    rows: Mapping[fx.Node, Placements]

    def places(self, node: fx.Node) -> tuple[Placements, Placements]:
        """The placements of a value along both axes."""
        return self.experts[node], self.rows[node]

    def has_parts(self, node: fx.Node) -> bool:
        """Whether a value is one tensor that has experts or rows."""
        return any(isinstance(made, SHARDED) for made in self.places(node))

    def shape(self, node: fx.Node, ways: int, times: Fraction) -> tuple[int, ...]:
        """The shape of a value on one of ``ways`` shares of the experts, with ``times`` as many
        rows."""
        shape = list(node.meta["val"].shape)
        for made, change in zip(self.places(node), (Fraction(1, ways), times), strict=True):
            if isinstance(made, SHARDED):
                shape[made.dim] = int(shape[made.dim] * change)
        return tuple(shape)


def separate(chunk: Chunk, dim: int) -> Separate:
    """Prove it for a region with experts along ``dim`` of its parameters, whose inputs have experts
    first and their rows second."""
    weights, inputs = _arguments(chunk.body)
    (experts, rows, *_) = inputs[0].meta["val"].shape
    return Separate(
        _proved(
            chunk, part_rules(experts), Axis.EXPERTS, _placed(weights, dim) | _placed(inputs, 0)
        ),
        _proved(chunk, part_rules(rows), Axis.ROWS, _placed(inputs, 1)),
    )


def separate_sorted(chunk: Chunk, sorting: SortedRows, dim: int) -> Separate:
    """The same for a region on rows that are sorted by expert, and their counts."""
    weights, inputs = _arguments(chunk.body)
    counts = [inputs.pop(sorting.counts)]
    by_expert = part_rules(sorting.experts, Axis.EXPERTS)
    by_row = part_rules(sorting.rows, Axis.ROWS)
    return Separate(
        _proved(chunk, by_expert, Axis.EXPERTS, _placed(weights, dim) | _placed(counts, 0)),
        _proved(chunk, by_row, Axis.ROWS, _placed(inputs, 0)),
    )


def _arguments(body: Body) -> tuple[list[fx.Node], list[fx.Node]]:
    """The parameters and the inputs of a region."""
    nodes = body.module.graph.find_nodes(op="placeholder")
    return nodes[: body.parameters], nodes[body.parameters + body.buffers :]


def _placed(nodes: Iterable[fx.Node], dim: int) -> dict[fx.Node, Placement]:
    return {node: Shard(dim) for node in nodes}


def _proved(
    chunk: Chunk, rules: PartRules, axis: Axis, given: Mapping[fx.Node, Placement]
) -> dict[fx.Node, Placements]:
    """The placement of every value of a region along ``axis``; ``given`` has those of arguments
    with parts. The error for an operation that mixes parts names its line."""
    graph = chunk.body.module.graph
    known: dict[fx.Node, Placements] = dict.fromkeys(graph.find_nodes(op="placeholder"), REPLICATED)
    known |= given
    for node in graph.find_nodes(op="get_attr"):
        known[node] = REPLICATED
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        frames = user_frames(node.meta.get("stack_trace") or "")
        at = f"\n{frames}\n" if frames else "; "
        try:
            known[node] = rules.of(node, known)
        except Mixed:
            raise CaptureError(
                f"region {chunk.name} mixes {axis.value}: {node.target} does not treat each "
                f"by itself{at}{_CURES[axis]}"
            ) from None
        except UnknownOperation as unknown:
            raise CaptureError(
                f"region {chunk.name} cannot run on a share of its experts: nothing is known of "
                f"how {unknown} treats experts and rows{at}do it outside the region, or write it "
                "with elementwise operations, reductions, reshapes and matrix products; one of "
                "your own that is elementwise says so: custom_op(tags=(torch.Tag.pointwise,))"
            ) from None
    return known


_CURES = {
    Axis.EXPERTS: "a device holds only some of the experts, so that the numbers would change: do "
    "it outside the region, or for all experts alike (torch.bmm, torch.einsum)",
    Axis.ROWS: "a device gets the rows of other devices too, so that the numbers would change: do "
    "it outside the region",
}
