"""The operations of a model and its loss as text, to compare two programs, which may have been
traced at different batch sizes.

Regions, node names and the order of keyword arguments do not matter. Operations, the parameters
they read and the numbers in them do. Operations that only ``outputs=`` needs are left out.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from piper.capture.graphs import ancestors, mutates
from piper.capture.repeats.expansion import Expanded
from piper.capture.repeats.folds import Fold, NotFolded, renamed
from piper.capture.trace.fingerprint import content_of, graphs_of

_NUMBER = re.compile(r"(?<![\w%.#])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.])")
_CONTENT = re.compile(r"#\w+")
_LARGE = 2.0**53
LOSS_PLACE = "the loss"


@dataclass(frozen=True, slots=True)
class OtherOperation:
    """The first operation in which two computations differ."""

    place: str
    """The path of its module, "the model", or "the loss"."""
    one: str
    two: str


@dataclass(frozen=True, slots=True)
class Computation:
    """All operations of the forward of one microbatch."""

    operations: tuple[str, ...]
    """One line each; ``%3`` is the result of the fourth."""
    places: tuple[str, ...]
    """The place of each operation: the path of its module, "the model", or "the loss"."""
    sizes: tuple[int, ...]
    """All sizes and element counts of its tensors: numbers that may depend on the batch."""
    batch: tuple[tuple[int, ...], ...]
    """The shapes of the microbatch's tensors."""

    def difference(self, other: Computation) -> OtherOperation | None:
        """The first operation that differs in ``other``, or None. If the microbatch sizes differ,
        numbers that can follow from the sizes may differ too."""
        may_differ = _sized(self, other)
        pairs = zip(self.operations, other.operations, other.places, strict=False)
        for one, two, place in pairs:
            if one != two and not _alike(one, two, may_differ):
                return _named(place, one, two)
        counts = len(self.operations), len(other.operations)
        if counts[0] == counts[1]:
            return None
        longer = max(self, other, key=lambda x: len(x.operations))
        lines = [x.operations[min(counts)] if x is longer else "nothing" for x in (self, other)]
        return _named(longer.places[min(counts)], *lines)


def computation_of(
    program: ExportedProgram,
    expanded: Expanded,
    outputs: slice,
    user_name: Callable[[str], str],
    in_loss: Callable[[Mapping[str, Any]], bool],
) -> Computation:
    """The computation of an exported program, whose operations ``expanded`` has. ``outputs`` are
    the results that only ``outputs=`` needs. ``user_name`` maps a parameter to the user's name;
    ``in_loss`` reads an operation's metadata and says whether it belongs to the loss."""
    ends = {}
    inputs = 0
    graph = expanded.graph
    for spec in expanded.inputs:
        if spec.kind is InputKind.USER_INPUT:
            ends[spec.arg.name] = f"input {inputs}"
            inputs += 1
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constant = program.constants[str(spec.target)]
            ends[spec.arg.name] = f"constant {_constant(constant)}"
        else:
            name = user_name(str(spec.target))
            ends[spec.arg.name] = f"tensor {name!r}"
    operations: list[str] = []
    places: list[str] = []
    sizes: set[int] = set()
    for part in graphs_of(program, graph):
        whole = part is graph
        needed = _needed(part, outputs if whole else slice(0, 0))
        repeats = _repeats(expanded, needed) if whole else []
        numbers: dict[fx.Node, int] = {}
        for node in (x for x in part.nodes if x in needed):
            numbers[node] = len(operations)
            operations.append(_line(node, numbers, ends if whole else {}))
            places.append(LOSS_PLACE if in_loss(node.meta) else _place(_module(node), user_name))
            for x in pytree.tree_leaves(node.meta.get("val")):
                if isinstance(x, Tensor):  # data-dependent sizes are refused later
                    sizes |= {n for n in (*x.shape, x.numel()) if isinstance(n, int)}
            for repeat in repeats:
                if node is repeat.two[-1]:
                    repeat.put(operations, places, numbers, user_name)
    shapes = [
        tuple(map(int, node.meta["val"].shape))
        for node in graph.find_nodes(op="placeholder")
        if ends.get(node.name, "").startswith("input ") and isinstance(node.meta["val"], Tensor)
    ]
    return Computation(tuple(operations), tuple(places), tuple(sorted(sizes)), tuple(shapes))


@dataclass(frozen=True, slots=True)
class _Repeat:
    """The operations of parts 0 and 1 of a fold, and those parameters of each part that part 1
    reads."""

    fold: Fold
    one: list[fx.Node]
    two: list[fx.Node]
    tensors: Mapping[fx.Node, Sequence[fx.Node]]

    def put(
        self,
        operations: list[str],
        places: list[str],
        numbers: dict[fx.Node, int],
        user_name: Callable[[str], str],
    ) -> None:
        """Add the operations of all parts after part 1. ``numbers`` get those of the last part."""
        start, size = len(operations) - len(self.two), len(self.two)
        marked = list(dict.fromkeys(x for node in self.two for x in (node, *node.all_input_nodes)))
        marks = {node: f"\0{i}\0" for i, node in enumerate(marked)}
        lines = [_line(node, marks, {}).split("\0") for node in self.two]
        two = {node: i for i, node in enumerate(self.two)}
        one = {node: i for i, node in enumerate(self.one)}
        first = self.fold.parts[1]
        modules = [_module(node) for node in self.two]
        for number, part in enumerate(self.fold.parts[2:], 2):
            here = start + (number - 1) * size
            now = [
                str(
                    here + two[node]
                    if node in two
                    else here - size + one[node]
                    if node in one
                    else numbers[self.tensors[node][number] if node in self.tensors else node]
                )
                for node in marked
            ]
            for pieces in lines:
                read = [now[int(i)] for i in pieces[1::2]]
                operations.append("".join(chain(*zip_longest(pieces[::2], read, fillvalue=""))))
            moved = {path: _place(renamed(path, first, part), user_name) for path in {*modules}}
            places += [
                LOSS_PLACE if said == LOSS_PLACE else moved[path]
                for said, path in zip(places[start : start + size], modules, strict=True)
            ]
        numbers |= {node: len(operations) - size + i for i, node in enumerate(self.two)}


def _repeats(expanded: Expanded, needed: set[fx.Node]) -> list[_Repeat]:
    """The folds of a graph; ``needed`` gets the tensors of their parts. Raises ``NotFolded`` if
    only one of the two parts is needed."""
    paths = {spec.arg.name: str(spec.target) for spec in expanded.inputs}
    nodes = {paths[x.name]: x for x in expanded.graph.find_nodes(op="placeholder")}
    repeats = []
    for folded in expanded.folds:
        both = [[node in needed for node in part] for part in (folded.one, folded.two)]
        if both[0] != both[1] or not any(both[1]):
            raise NotFolded
        one, two = ([x for x in part if x in needed] for part in (folded.one, folded.two))
        parts = folded.fold.parts
        tensors: dict[fx.Node, Sequence[fx.Node]] = {}
        for tensor in {x for node in two for x in node.all_input_nodes if x.op == "placeholder"}:
            path = paths[tensor.name]
            names = [renamed(path, parts[1], part) for part in parts]
            if names.count(path) < len(names):
                tensors[tensor] = [nodes[name] for name in names]
                needed |= set(tensors[tensor])
        repeats.append(_Repeat(folded.fold, one, two, tensors))
    return repeats


def _needed(graph: fx.Graph, outputs: slice) -> set[fx.Node]:
    """The nodes that mutating ops, and results other than ``outputs``, depend on."""
    results = list(pytree.tree_leaves(graph.output_node().args[0]))
    del results[outputs]
    roots = [x for x in results if isinstance(x, fx.Node)]
    roots += [x for x in graph.nodes if mutates(x)]
    return ancestors(roots, ())


def _line(node: fx.Node, numbers: Mapping[fx.Node, int | str], ends: Mapping[str, str]) -> str:
    if node.op == "placeholder":
        return ends.get(node.name, "argument")
    args = [_text(x, numbers) for x in node.args]
    args += [f"{key}={_text(x, numbers)}" for key, x in sorted(node.kwargs.items())]
    return f"{node.target}({', '.join(args)})"


def _text(item: Any, numbers: Mapping[fx.Node, int | str]) -> str:
    if isinstance(item, fx.Node):
        return f"%{numbers.get(item, '?')}"
    if isinstance(item, list | tuple):
        return f"[{', '.join(_text(x, numbers) for x in item)}]"
    return str(item)


def _constant(constant: Any) -> str:
    if not isinstance(constant, Tensor):
        return type(constant).__name__
    digest = hashlib.blake2b(content_of(constant).encode(), digest_size=8).hexdigest()
    return f"{constant.dtype} {list(constant.shape)} #{digest}"


def _module(node: fx.Node) -> str:
    """The path of the module that an operation is of."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).removeprefix("L['self'].") if stack else ""


def _place(module: str, user_name: Callable[[str], str]) -> str:
    return "the model" if module in ("", "model") else user_name(module)


def _named(place: str, one: str, two: str) -> OtherOperation:
    names = [line.partition("(")[0] for line in (one, two)]
    return OtherOperation(place, *((one, two) if names[0] == names[1] else names))


def _alike(one: str, two: str, may_differ: Callable[[float, float], bool]) -> bool:
    """Whether two operations differ only in numbers that may differ."""
    if _NUMBER.sub("0", _CONTENT.sub("", one)) != _NUMBER.sub("0", _CONTENT.sub("", two)):
        return False
    pairs = [*zip(_NUMBER.findall(one), _NUMBER.findall(two), strict=True)]
    unlike = [(float(a), float(b)) for a, b in pairs if a != b]
    return bool(unlike) and all(may_differ(a, b) for a, b in unlike)


def _sized(one: Computation, two: Computation) -> Callable[[float, float], bool]:
    """A predicate: may a number of ``one`` and a number of ``two`` differ, because both follow from
    batch sizes?"""
    if one.batch == two.batch or [*map(len, one.batch)] != [*map(len, two.batch)]:
        return lambda a, b: False
    ratios = {y[0] / x[0] for x, y in zip(one.batch, two.batch, strict=True) if x and x[0]}
    rows_alone = all(x[1:] == y[1:] for x, y in zip(one.batch, two.batch, strict=True))

    def sizes(a: float, b: float) -> bool:
        pairs = (a, b), (1 / a if a else 0.0, 1 / b if b else 0.0)
        return any(_near(x, one.sizes) and _near(y, two.sizes) for x, y in pairs)

    if not rows_alone or len(ratios) != 1:
        return sizes
    (ratio,) = ratios

    def rows(a: float, b: float) -> bool:
        """Row counts, also rounded (a capacity), their squares, or their reciprocals."""
        if a < 1 and b < 1:
            return math.isclose(a, b * ratio) and sizes(a, b)
        rounded = min(1 + ratio, a * ratio / 8)
        exact = math.isclose(b, a * ratio) or math.isclose(b, a * ratio**2)
        return (exact or abs(b - a * ratio) <= rounded) and sizes(a, b)

    return rows


def _near(x: float, sizes: tuple[int, ...]) -> bool:
    return abs(x) < _LARGE and math.isclose(x, round(x), rel_tol=1e-9) and round(x) in sizes
