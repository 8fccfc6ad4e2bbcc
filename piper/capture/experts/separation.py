"""Proves that a region treats each expert and each row by itself.

``prove_separate`` takes the region's forward and a layout for each argument. It returns the layout
of every value, or raises an error that names the operation and the line that mixes experts or rows.
The derivative of a function of each row alone is also one of each row alone: the backward needs no
proof of its own.

An operation has a rule, or torch's own decompositions split it until every part has one. Any other
operation is refused by name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from piper.base.errors import CaptureError
from piper.capture.blame import user_frames
from piper.capture.experts.dim_layouts import Axis, DimLayout, Mixed
from piper.capture.experts.separation_rules import Layouts, OperatorCall, plain_layouts, rule_of
from piper.capture.trace.quiet import hushed_loggers

aten = torch.ops.aten
_CURES = {
    Axis.EXPERTS: "a device holds only some of the experts, so that the numbers would change: do "
    "it outside the region, or for all experts alike (torch.bmm, torch.einsum)",
    Axis.ROWS: "a device gets the rows of other devices too, so that the numbers would change: do "
    "it outside the region",
}


def prove_separate(
    graph: fx.Graph, given: Mapping[fx.Node, DimLayout], region: str
) -> dict[fx.Node, Layouts]:
    """The layout of every value of ``graph``; ``given`` has those of its placeholders."""
    layouts: dict[fx.Node, Layouts] = dict(given)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        frames = user_frames(node.meta.get("stack_trace") or "")
        at = f"\n{frames}\n" if frames else "; "
        try:
            layouts[node] = layouts_of(node, layouts)
        except Mixed as mixed:
            raise CaptureError(
                f"region {region} mixes {mixed.axis.value}: {node.target} does not treat each "
                f"by itself{at}{_CURES[mixed.axis]}"
            ) from None
        except UnknownOperation as unknown:
            raise CaptureError(
                f"region {region} cannot run on a share of its experts: nothing is known of how "
                f"{unknown} treats experts and rows{at}do it outside the region, or write it "
                "with elementwise operations, reductions, reshapes and matrix products; one of "
                "your own that is elementwise says so: custom_op(tags=(torch.Tag.pointwise,))"
            ) from None
    return layouts


class UnknownOperation(Exception):  # noqa: N818 - becomes an error where the region is known
    """An operation that has no rule and that torch cannot decompose."""


def layouts_of(node: fx.Node, known: Mapping[fx.Node, Layouts]) -> Layouts:
    """The layout of an operation's result; raises ``Mixed`` or ``UnknownOperation``."""
    if node.target is operator.getitem:
        made = known[node.args[0]]  # type: ignore[index]
        index = node.args[1]
        assert isinstance(made, tuple)
        assert isinstance(index, int)
        picked = made[index]
        assert picked is not None
        return picked
    value = node.meta["val"]
    if not any(_axes(known[arg]) for arg in node.all_input_nodes):
        return plain_layouts(value)
    if not isinstance(node.target, OpOverload):
        raise UnknownOperation(str(node.target))
    rule = rule_of(node.target)
    if rule is None:
        return _taken_apart(node, known)
    layout_of: Callable[[fx.Node], Any] = known.__getitem__
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), layout_of)
    schema = node.target._schema.arguments
    arguments = {a.name: a.default_value for a in schema if a.has_default_value()}
    arguments |= dict(zip((a.name for a in schema), args, strict=False)) | kwargs
    return rule(OperatorCall(node.target, arguments, value))


def _axes(layouts: Layouts) -> bool:
    each = layouts if isinstance(layouts, tuple) else (layouts,)
    return any(layout.axes for layout in each if layout is not None)


@cache
def _decompositions() -> Any:
    return dict(core_aten_decompositions())  # torch rebuilds the table at each call, slowly


def _taken_apart(node: fx.Node, known: Mapping[fx.Node, Layouts]) -> Layouts:
    """The layout of the result of ``node``, from its decomposition."""
    inputs = node.all_input_nodes
    fakes = [arg.meta["val"] for arg in inputs]
    if not all(isinstance(fake, FakeTensor) for fake in fakes):
        raise UnknownOperation(str(node.target))
    # twice the rows: decompositions would not show the dimension of a single row
    given = [_tensor(known[arg]).with_rows(Fraction(2)) for arg in inputs]

    def call(*tensors: Tensor) -> Any:
        values = dict(zip(inputs, tensors, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    with torch.no_grad(), fakes[0].fake_mode:
        examples = [
            fake if layout.shape(1) == fake.shape else fake.new_empty(layout.shape(1))
            for fake, layout in zip(fakes, given, strict=True)
        ]
        try:
            with hushed_loggers():
                parts = make_fx(call, decomposition_table=_decompositions())(*examples).graph
        except (RuntimeError, ValueError, TypeError, IndexError):  # it fixes the row count
            raise UnknownOperation(str(node.target)) from None
    if any(part.target is node.target for part in parts.nodes):
        raise UnknownOperation(str(node.target))
    layouts: dict[fx.Node, Layouts] = dict(
        zip(parts.find_nodes(op="placeholder"), given, strict=True)
    )
    for part in parts.nodes:
        if part.op == "call_function":
            layouts[part] = layouts_of(part, layouts)
        elif part.op == "get_attr":
            layouts[part] = plain_layouts(part.meta["val"])
    made = parts.output_node().args[0]
    half = Fraction(1, 2)
    if isinstance(made, fx.Node):
        return _tensor(layouts[made]).with_rows(half)
    return tuple(
        _tensor(layouts[x]).with_rows(half) if isinstance(x, fx.Node) else None
        for x in pytree.tree_leaves(made)
    )


def _tensor(layouts: Layouts) -> DimLayout:
    assert isinstance(layouts, DimLayout)
    return layouts
