"""Rows of the batch that go between groups of different size: the dimension that they shard."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from piper.base.errors import DirectiveError
from piper.ir.dag.dag import Dag, Node, name_of
from piper.ir.dag.facts import Model
from piper.ir.ops import Compute


class RegroupedRows:
    """``models`` holds the model's facts at the shapes of each number of parts."""

    def __init__(self, dag: Dag, models: Mapping[int, Model]) -> None:
        self._dag = dag
        self._models = models

    @cached_property
    def _parts(self) -> dict[tuple[int, int], int]:
        """The parts of the rows of each chunk and microbatch."""
        return {
            (node.op.chunk, node.op.microbatch): node.parts
            for node in self._dag.nodes
            if isinstance(node.op, Compute)
        }

    def dimension(self, value: int, maker: int, reader: int) -> int:
        """The batch dimension of a value that its maker and its reader shard into different numbers
        of parts. Refuses one that does not go from group to group."""
        dag = self._dag
        made, read = dag.nodes[maker], dag.nodes[reader]
        here, there = (
            self._models.get(node.parts, dag.model).values[dag.table.value(dag.plain(value))[0].of]
            for node in (made, read)
        )
        edge = (
            f"{name_of(dag, maker)} on {list(made.devices)} feeds {name_of(dag, reader)} on "
            f"{list(read.devices)}"
        )
        places = f"{dag.history[made.sends.made_by]}, {dag.history[read.sends.made_by]}"
        dim = _divided(here.shape, there.shape, made.parts, read.parts)
        if dim is None:
            raise DirectiveError(
                f"{edge}: the value {here.name} has shape {list(here.shape)} on each of "
                f"{made.parts} devices and {list(there.shape)} on each of {read.parts}: it is "
                "not sharded by rows of the batch and cannot go between groups of different size; "
                f"give both regions groups of one size ({places})"
            )
        if not all(self._may_shard(node, here.order) for node in (made, read)):
            raise DirectiveError(
                f"{edge}: the rows of the batch do not lie one after another in the value "
                f"{here.name}, of shape {list(here.shape)} (transposed and then flattened, for "
                "example), so that groups of different size cannot shard it anew: let it cross "
                "with the batch as the outermost dimension, or give both regions groups of one "
                f"size ({places})"
            )
        return dim

    def _may_shard(self, node: Node, order: int | None) -> bool:
        """Whether a node may hold an arbitrary part of rows that the chunk ``order`` reordered: it
        computes each row independently, or its rows are in as many parts as that chunk's."""
        op = node.op
        if order is None or not isinstance(op, Compute):
            return True
        model = self._models.get(node.parts, self._dag.model)
        chunk, values = model.chunks[op.chunk], model.values
        if chunk.index != order and any(values[v].order == order for v in chunk.outputs):
            return True
        return node.parts == self._parts[order, op.microbatch]


def _divided(here: tuple[int, ...], there: tuple[int, ...], source: int, target: int) -> int | None:
    """The sharded dimension of a value with shape ``here`` on each of ``source`` devices and
    ``there`` on each of ``target``: the only one that differs, with equal totals."""
    if len(here) != len(there):
        return None
    other = [d for d, (a, b) in enumerate(zip(here, there, strict=True)) if a != b]
    if len(other) != 1 or here[other[0]] * source != there[other[0]] * target:
        return None
    return other[0]
