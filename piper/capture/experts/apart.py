"""Proves that a region treats each expert and each row by itself, and makes its graph on another
number of them.

Along an axis of experts, and along one of rows, the region is propagated as under tensor
parallelism, but every operation must read its inputs as they are made: no redistribution is ever
needed. The derivative of a function of each row alone is also one of each row alone: the backward
needs no proof of its own.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from torch import fx
from torch.distributed.tensor import Shard

from piper.base.errors import CaptureError
from piper.capture.blame import user_frames
from piper.capture.chunk.chunks import Body
from piper.capture.experts.part_rules import Mixed, PartRules, UnknownOperation, part_rules
from piper.capture.graphs import module_of
from piper.capture.shard.placement_search import Placing
from piper.capture.shard.placements import REPLICATED, TensorPlacement
from piper.capture.shard.propagate import MisfitError, propagate
from piper.capture.shard.rewrites.table import Form
from piper.capture.shard.shard_axis import PartAxis, ShardAxis
from piper.capture.trace.quiet import quiet_tracing
from piper.ir.shards import SortedRows


def on_experts(body: Body, name: str, sorting: SortedRows | None, ways: int, dim: int) -> Body:
    """The body on one of ``ways`` shares of the experts, which are along ``dim`` of parameters and
    first in inputs. Of rows that are ``sorting`` by expert, each device has those of its experts,
    so that only their counts have experts. ``name`` is for errors."""
    first = body.parameters + body.buffers
    counted = None if sorting is None else first + sorting.counts
    experts = sorting.experts if sorting else body.fakes()[first].shape[0]
    given = [Shard(dim)] * body.parameters + [REPLICATED] * body.buffers
    for i in range(first, first + body.inputs):
        given.append(Shard(0) if counted in (None, i) else REPLICATED)
    kind = PartAxis.EXPERTS
    placing = _Apart(
        part_rules(experts, kind if sorting else None), ShardAxis("experts", ways), kind, name
    )
    return _propagated(body, placing, sorting, given, REPLICATED if sorting else Shard(0))


def on_rows(body: Body, name: str, sorting: SortedRows | None, times: Fraction) -> Body:
    """The body on ``times`` as many rows, which are second in inputs, or first if they are
    ``sorting`` by expert."""
    first = body.parameters + body.buffers
    dim = 1 if sorting is None else 0
    rows = sorting.rows if sorting else body.fakes()[first].shape[1]
    given: list[TensorPlacement] = [*[REPLICATED] * first, *[Shard(dim)] * body.inputs]
    if sorting is not None:
        given[first + sorting.counts] = REPLICATED
    kind = PartAxis.ROWS
    placing = _Apart(
        part_rules(rows, kind if sorting else None), ShardAxis("rows", 1, times=times), kind, name
    )
    return _propagated(body, placing, sorting, given, Shard(dim))


def _propagated(
    body: Body, placing: _Apart, sorting: object, given: list[Any], made: TensorPlacement
) -> Body:
    """The body for arguments that are placed as ``given``, and results as ``made``."""
    ends = [None] * (body.outputs + body.updates)
    try:
        with quiet_tracing():
            local = propagate(body, placing, given, ends, [None] * body.inputs)
    except MisfitError as misfit:
        raise CaptureError(
            f"region {placing.name} cannot run on a share of its experts: its operations name the "
            f"sizes they were written for ({str(misfit).splitlines()[0]}); write it so that every "
            "size follows from its inputs and parameters, for instance with torch.bmm or "
            "torch.einsum, or reshape with -1"
        ) from misfit
    if any(placed != made for placed in local.placements):
        raise CaptureError(
            f"region {placing.name} mixes experts: it does not return one row for each row that it "
            "takes; move dispatch and combine outside"
            if placing.sorts
            else f"region {placing.name} mixes experts: it does not return experts first and rows "
            "second; move dispatch and combine outside"
        )
    key = f"{body.key} on {placing.axis} from {given}"
    sizes = body.parameters, body.buffers, body.inputs, body.outputs, body.updates
    return Body(module_of(local.graph), *sizes, key)


class _Apart(Placing):
    """Placements for which no operation needs a redistribution."""

    strict = True

    def __init__(self, rules: PartRules, axis: ShardAxis, parts: PartAxis, name: str) -> None:
        super().__init__(rules, axis, lambda _: REPLICATED)
        self._parts_of, self._kind, self.name = rules, parts, name
        self.sorts = rules.sorts_rows

    def of(self, node: fx.Node) -> Form:
        """Raises an error that names the line of an operation that mixes parts."""
        frames = user_frames(node.meta.get("stack_trace") or "")
        at = f"\n{frames}\n" if frames else "; "
        try:
            made = self._parts_of.of(node, self.made)
        except Mixed:
            raise CaptureError(
                f"region {self.name} mixes {self._kind.value}: {node.target} does not treat each "
                f"by itself{at}{_CURES[self._kind]}"
            ) from None
        except UnknownOperation as unknown:
            raise CaptureError(
                f"region {self.name} cannot run on a share of its experts: nothing is known of "
                f"how {unknown} treats experts and rows{at}do it outside the region, or write it "
                "with elementwise operations, reductions, reshapes and matrix products; one of "
                "your own that is elementwise says so: custom_op(tags=(torch.Tag.pointwise,))"
            ) from None
        return Form({x: self.made[x] for x in node.all_input_nodes}, made)


_CURES = {
    PartAxis.EXPERTS: "a device holds only some of the experts, so that the numbers would change: "
    "do it outside the region, or for all experts alike (torch.bmm, torch.einsum)",
    PartAxis.ROWS: "a device gets the rows of other devices too, so that the numbers would change: "
    "do it outside the region",
}
