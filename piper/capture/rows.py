"""Where the rows of the batch are in the values between chunks.

Devices that divide the batch have the first of so many parts of a value's rows, the second and so
on. That is a part of the tensor only if rows are the outermost factor of one of its dimensions:
``[rows, seq, 64]`` may be flattened to ``[rows * seq, 64]``, but transposed before that, every part
has something of every row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from piper.capture.chunks import Body, Cut
from piper.capture.expert_regions import sorted_rows
from piper.capture.graphs import returned
from piper.capture.layouts import Axis, DimLayout, Mixed
from piper.capture.mixing import UnknownOperation, layouts_of
from piper.capture.mixing_rules import Layouts, plain_layouts


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of a value are."""

    dim: int | None = None
    """The dimension that they divide, if any."""
    scrambled: bool = False
    """Whether they are known to lie otherwise than one after another in it."""


def rows_of(cut: Cut, rows: int) -> dict[int, Rows]:
    """Of every value between chunks; ``rows`` is how many a tensor of the batch has."""
    made = {value for chunk in cut.chunks for value in chunk.outputs}
    found: dict[int, DimLayout | None] = {}
    known: dict[tuple[str, _Followed], _Followed] = {}
    for chunk in cut.chunks:
        fakes = chunk.body.fakes()[chunk.body.parameters + chunk.body.buffers :]
        for value, fake in zip(chunk.inputs, fakes, strict=True):
            if value not in made:
                found[value] = _guess(fake, rows)
        given = tuple(found[value] for value in chunk.inputs)
        key = (chunk.body.key, given)
        if key not in known:
            known[key] = _followed(chunk.body, given, rows)
        found |= zip(chunk.outputs, known[key], strict=True)
    return {value: _rows(layout) for value, layout in found.items()} | _by_expert(cut)


_Followed = tuple[DimLayout | None, ...]
"""The layouts of several values; None where rows went into an operation of which nothing is known,
and may be anywhere."""


def _by_expert(cut: Cut) -> dict[int, Rows]:
    """Of rows that are sorted by expert."""
    found: dict[int, Rows] = {}
    for chunk in cut.chunks:
        rows = sorted_rows(chunk.body)
        if rows is not None:
            counts = chunk.inputs[rows.counts]
            values = (v for v in (*chunk.inputs, *chunk.outputs) if v != counts)
            found |= dict.fromkeys(values, Rows(0, scrambled=True))
    return found


def _followed(body: Body, given: _Followed, rows: int) -> _Followed:
    """The layouts of a body's outputs, from those of its inputs."""
    graph = body.module.graph
    found: dict[fx.Node, Layouts] = {}
    lost: set[fx.Node] = set()
    first = body.parameters + body.buffers
    for i, node in enumerate(graph.find_nodes(op="placeholder")):
        plain = DimLayout.of(node.meta["val"].shape)
        layout = plain if i < first else given[i - first]
        found[node] = plain if layout is None else layout
        if layout is None:
            lost.add(node)
    for node in graph.nodes:
        if node.op == "call_function":
            try:
                found[node] = layouts_of(node, found)
            except (Mixed, UnknownOperation):
                found[node] = _guesses(node.meta["val"], rows)
                if not all(_outermost(found[arg]) for arg in node.all_input_nodes):
                    lost.add(node)
            if not lost.isdisjoint(node.all_input_nodes):
                lost.add(node)
    results = returned(graph)[: body.outputs]
    layouts = [None if node in lost else found[node] for node in results]
    return tuple(layout if isinstance(layout, DimLayout) else None for layout in layouts)


def _outermost(layouts: Layouts) -> bool:
    """Whether rows, if there are any, are the first dimension, where they are looked for first."""
    if isinstance(layouts, DimLayout):
        found = _rows(layouts)
        return found.dim in (None, 0) and not found.scrambled
    return all(x is None or _outermost(x) for x in layouts)


def _guess(value: Tensor, rows: int) -> DimLayout:
    """The layout of what comes from the batch, or from an operation of which nothing is known."""
    first = bool(value.shape) and value.shape[0] == rows
    return DimLayout.of(value.shape, {0: Axis.ROWS} if first else None)


def _guesses(made: object, rows: int) -> Layouts:
    """The same of one tensor, or of several."""
    if isinstance(made, Tensor):
        return _guess(made, rows)
    if not isinstance(made, list | tuple):
        return plain_layouts(made)
    return tuple(_guess(x, rows) if isinstance(x, Tensor) else None for x in made)


def _rows(layout: DimLayout | None) -> Rows:
    """They are scrambled where something counts slower than they do in their dimension."""
    if layout is None:
        return Rows(scrambled=True)
    for number, dim in enumerate(layout.dims):
        for place, factor in enumerate(dim):
            if factor.axis is Axis.ROWS:
                return Rows(number, any(before.size > 1 for before in dim[:place]))
    return Rows()
