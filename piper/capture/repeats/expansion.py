"""Puts the traced operations of the first of equal modules in place of each call.

A graph with calls enters; the graph leaves that tracing each module would have made, or, if it may
be folded (``folds.py``), the first two parts of it. What must hold, else ``NotEqual``: the
operations of a trial read nothing but its inputs, its own parameters and buffers and those outside
of all equal modules; only its results are used outside; and the last module computes what the
first computes.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.utils import _pytree as pytree

from piper.capture.regions import Region, tags_of, with_tags
from piper.capture.repeats.call_ops import MARK, EarlierResult, LeafCall
from piper.capture.repeats.equal_modules import NotEqual
from piper.capture.repeats.folds import Fold
from piper.capture.repeats.leaf_calls import Repeats

_NOT_PLAIN = re.compile(r"[^a-zA-Z0-9]")
_SUFFIX = re.compile(r"_\d+$")


@dataclass(frozen=True, slots=True)
class _Region:
    """The operations of a trial."""

    call: LeafCall
    leaf: fx.Node
    """The call's own operation."""
    inputs: list[fx.Node]
    nodes: list[fx.Node]
    results: list[fx.Node]


@dataclass(frozen=True, slots=True)
class Expanded:
    """A program whose graph has the operations of all modules."""

    graph: fx.Graph
    inputs: list[InputSpec]
    """What each input of the graph is, in order."""
    folds: tuple[FoldedNodes, ...] = ()


@dataclass(frozen=True, slots=True)
class FoldedNodes:
    """A fold, and the operations of its parts 0 and 1."""

    fold: Fold
    one: list[fx.Node]
    two: list[fx.Node]


def expanded(program: ExportedProgram, repeats: Repeats | None, *, folded: bool) -> Expanded:
    """``program`` with operations for calls, and without the results of trials. Its operations are
    named by kind and numbered in order, so that what was traced, and removed, does not matter.
    If ``folded``, it has folds, and numbers for the operations that it has not."""
    return _Expansion(program, repeats, folded).whole()


class _Expansion:
    def __init__(self, program: ExportedProgram, repeats: Repeats | None, folded: bool) -> None:
        self.folded = folded
        self.folds: list[FoldedNodes] = []
        self.names = _Names()
        self.runs = repeats.runs if repeats is not None else []
        self.source = program.graph
        _drop_empty(self.source)
        self.specs = program.graph_signature.input_specs
        self.twins = repeats.twins if repeats is not None else {}
        tensors = [s for s in self.specs if s.kind in (InputKind.PARAMETER, InputKind.BUFFER)]
        self.paths = {spec.arg.name: str(spec.target) for spec in tensors}
        self.order = repeats.tensors if repeats is not None else list(self.paths.values())
        self.tensors: dict[str, fx.Node] = {}
        """The parameters and buffers of the new graph, by path."""
        self.places = {node.name: node for node in self.source.find_nodes(op="placeholder")}
        results = self.source.output_node().args[0]
        assert isinstance(results, list | tuple)
        self.results = list(results)
        self.leaves: set[fx.Node] = set()
        self.regions: dict[int, _Region] = {}
        """The first trial of each variant, by its identity."""
        self.hidden: set[fx.Node] = set()
        self.given: dict[fx.Node, list[fx.Node]] = {}
        """The inputs of the calls that were traced."""
        self.needed: dict[fx.Node, list[frozenset[fx.Node]]] = {}
        """For each call of a run, the operations of its trial that are needed."""
        if repeats is not None:
            self._read(repeats)
            self._find_needed()

    def _read(self, repeats: Repeats) -> None:
        """Find the operations of the trials, and check them."""
        kept = len(self.results) - len(repeats.results)
        extra = iter(self.results[kept:])
        self.results = self.results[:kept]
        target = torch.ops.piper_repeats.call.default
        self.leaves = set(self.source.find_nodes(op="call_function", target=target))
        leaves = {node.args[1]: node for node in self.leaves}
        members: dict[int, list[fx.Node]] = {i: [] for i in range(len(repeats.trials))}
        for node in self.source.nodes:
            mark = _mark(node)
            if mark in members:
                members[mark].append(node)
        for number, trial in enumerate(repeats.trials):
            given = next(extra)
            made: list[Any] = [next(extra) for _ in trial.results]
            (call,) = self.runs[trial.run].calls
            leaf = leaves.get(trial.run)
            if leaf is None:
                raise NotEqual(f"{call.path} is called in a block of its own, such as no_grad")
            region = _Region(call, leaf, given.args[0], members[number], made)
            self._check(region)
            self.hidden |= {given, *region.nodes}
            self.given[leaf] = region.inputs
            first = self.regions.setdefault(id(call.variant), region)
            if first is not region and self._text(first) != self._text(region):
                raise NotEqual(f"{call.path} differs from {first.call.path}")

    def _find_needed(self) -> None:
        read: set[fx.Node] = set()
        """What the needed operations of later calls read."""
        apart = self.leaves | self.hidden
        for leaf in sorted(self.leaves, reverse=True):
            run = self.runs[leaf.args[1]]  # type: ignore[index]
            inputs: Any = self.given.get(leaf, leaf.args[0])
            ends = [user for user in leaf.users if user.target is operator.getitem]
            self.hidden.update(ends)
            wanted = {
                run.results[end.args[1]]  # type: ignore[index]
                for end in ends
                if end in read or not apart.issuperset(end.users)
            }
            found: list[frozenset[fx.Node]] = []
            for i, (call, places) in reversed([*enumerate(zip(run.calls, run.given, strict=True))]):
                region = self.regions[id(call.variant)]
                nodes = {region.results[x.result] for x in wanted if x.call == i}
                nodes |= {node for node in region.nodes if node.is_impure()}
                for node in reversed(region.nodes):
                    if node in nodes:
                        nodes.update(node.all_input_nodes)
                for node, place in zip(region.inputs, places, strict=True):
                    if node in nodes:
                        if isinstance(place, EarlierResult):
                            wanted.add(place)
                        else:
                            read.add(inputs[place])
                found.append(frozenset(nodes.intersection(region.nodes)))
            self.needed[leaf] = found[::-1]

    def whole(self) -> Expanded:
        new = fx.Graph()
        now: dict[fx.Node, fx.Node] = {}
        inputs = self._inputs(new, now)
        for node in self.source.nodes:
            if node in self.hidden or node in now:
                continue
            if node in self.leaves:
                self._put(new, node, now)
            elif node.op == "output":
                results = fx.node.map_arg(tuple(self.results), now.__getitem__)
                new.output(results).meta = node.meta
            else:
                now[node] = self._copied(new, node, now.__getitem__)
                now[node].meta.get("custom", {}).pop(MARK, None)
        return Expanded(new, inputs, tuple(self.folds))

    def _inputs(self, new: fx.Graph, now: dict[fx.Node, fx.Node]) -> list[InputSpec]:
        """Makes the graph's inputs, as if no tensor had been hidden."""
        known = {str(s.target): s for s in self.specs if s.arg.name in self.paths}
        inputs: list[InputSpec] = []
        for path in self.order:
            like = known[self.twins.get(path, path)]
            node = self.places[like.arg.name]
            if path not in self.twins:
                self.tensors[path] = now[node] = self._copied(new, node, now.__getitem__)
                inputs.append(like)
                continue
            one, two = (_NOT_PLAIN.sub("_", x).lower() for x in (str(like.target), path))
            twin = self._copied(new, node, now.__getitem__, node.name.replace(one, two, 1))
            self.tensors[path] = twin
            inputs.append(replace(like, arg=TensorArgument(twin.name), target=path))
        return inputs + [s for s in self.specs if s.arg.name not in self.paths]

    def _put(self, new: fx.Graph, leaf: fx.Node, now: dict[fx.Node, fx.Node]) -> None:
        """The operations of a run; ``now`` gets the nodes of its results."""
        number = leaf.args[1]
        assert isinstance(number, int)
        run = self.runs[number]
        inputs: Any = self.given.get(leaf, leaf.args[0])
        needed = self.needed[leaf]
        alike = all(one == two for one, two in zip(needed, needed[run.period :], strict=False))
        fold = Fold.of(run) if self.folded and alike else None
        made: dict[int | EarlierResult, fx.Node] = {
            i: now[node] for i, node in enumerate(inputs) if node in now
        }
        nodes: list[fx.Node] = []
        shown = len(run.calls) if fold is None else 2 * run.period
        for i, (call, places) in enumerate(zip(run.calls[:shown], run.given, strict=False)):
            region = self.regions[id(call.variant)]
            given = {n: made[x] for n, x in zip(region.inputs, places, strict=True) if x in made}
            copies = self._copy(new, call, needed[i], given, now)
            results = enumerate(region.results)
            made |= {EarlierResult(i, j): copies[node] for j, node in results if node in copies}
            nodes += dict.fromkeys(copies.values())
        if fold is not None:
            half = len(nodes) // 2
            self.folds.append(FoldedNodes(fold, nodes[:half], nodes[half:]))
            self.names.skip(nodes[half:], len(fold.parts) - 2)
        after = len(run.calls) - shown
        for user in leaf.users:
            if user.target is operator.getitem:
                x = run.results[user.args[1]]  # type: ignore[index]
                if (end := replace(x, call=x.call - after)) in made:
                    now[user] = made[end]

    def _copy(
        self,
        new: fx.Graph,
        call: LeafCall,
        needed: frozenset[fx.Node],
        given: Mapping[fx.Node, fx.Node],
        now: Mapping[fx.Node, fx.Node],
    ) -> dict[fx.Node, fx.Node]:
        """Puts the ``needed`` operations of a call; returns them by those of the trial."""
        region = self.regions[id(call.variant)]
        made: dict[fx.Node, fx.Node] = {}

        def value(node: fx.Node) -> fx.Node:
            if node in made or node in given:
                return made.get(node) or given[node]
            own = self._relative(region, node)
            return now[node] if own is None else self.tensors[call.path + own]

        for node in region.nodes:
            if node in needed and _is_empty(node):  # it gave its name to a result of the trial
                made[node] = made[node.args[0]]  # type: ignore[index]
            elif node in needed:
                made[node] = self._copied(new, node, value)
                made[node].meta = _meta(node, region, call)
        return made

    def _copied(
        self, graph: fx.Graph, node: fx.Node, value: Callable[[fx.Node], fx.Node], name: str = ""
    ) -> fx.Node:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
        plain = node.op == "call_function"
        name = name or (self.names.next(node.name) if plain else node.name)
        target = name if node.op == "placeholder" else node.target
        made = graph.create_node(node.op, target, args, kwargs, name, node.type)
        made.meta = {**node.meta, "custom": dict(node.meta.get("custom") or {})}
        if plain:
            self.names.made(made)
        return made

    def _relative(self, region: _Region, node: fx.Node) -> str | None:
        """The path of a parameter or buffer in its module; None if it is not of the module."""
        path, own = self.paths[node.name], f"{region.call.path}."
        return f".{path.removeprefix(own)}" if path.startswith(own) else None

    def _check(self, region: _Region) -> None:
        group = region.call.variant.group
        inside, given = set(region.nodes), set(region.inputs)
        others = tuple(f"{path}." for path in group.paths if path != region.call.path)
        for node in region.nodes:
            for arg in node.all_input_nodes:
                path = self.paths.get(arg.name)
                if arg not in inside and arg not in given and path is None:
                    raise NotEqual(f"{region.call.path} reads {arg} from outside")
                if arg not in given and path is not None and path.startswith(others):
                    raise NotEqual(f"{region.call.path} reads {path}")
            for user in node.users:
                if user not in inside and user is not region.leaf and user.op != "output":
                    raise NotEqual(f"{node} of {region.call.path} is used by {user}")
            if node.op != "call_function":
                raise NotEqual(f"{region.call.path} has a {node.op}")
        if not inside.issuperset(region.results) or not inside.isdisjoint(self.results):
            raise NotEqual(f"the results of {region.call.path} are others")

    def _text(self, region: _Region) -> list[Any]:
        """The operations, in a form that is equal for equal trials."""
        numbers = {node: f"%{i}" for i, node in enumerate(region.nodes)}
        given = {node: f"input {i}" for i, node in enumerate(region.inputs)}

        def name(node: fx.Node) -> str:
            found = numbers.get(node) or given.get(node)
            return found or self._relative(region, node) or node.name

        outer = len(region.call.around)
        again = {mine: first for first, mine in region.call.regions.items()}
        lines: list[Any] = [[numbers[node] for node in region.results]]
        for node in region.nodes:
            args = fx.node.map_arg((node.args, node.kwargs), name)
            tags = [again[region] for region in tags_of(node.meta)[outer:]]
            specs = [
                (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x
                for x in pytree.tree_leaves(node.meta.get("val"))
            ]
            lines.append((node.target, repr(args), tags, specs))
        return lines


class _Names:
    """The names of operations: their kind, and the number that a graph gives them."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._skipped: Counter[str] = Counter()

    def next(self, like: str) -> str:
        """The name of the next operation that is named ``like`` this one."""
        kind = _SUFFIX.sub("", like)
        skipped = self._skipped.pop(kind, 0)
        return f"{kind}_{self._last[kind] + 1 + skipped}" if skipped else kind

    def made(self, node: fx.Node) -> None:
        kind, _, number = node.name.rpartition("_")
        if kind and number.isdigit():
            self._last[kind] = int(number)
        else:
            self._last[node.name] = 0

    def skip(self, nodes: Sequence[fx.Node], times: int) -> None:
        """Leave out the numbers of operations like ``nodes``, this many times."""
        for node in nodes:
            self._skipped[_SUFFIX.sub("", node.name)] += times


def _drop_empty(graph: fx.Graph) -> None:
    """Drop torch's checks of dtypes, and conversions that neither convert nor copy. Which of them
    there are depends on what was traced before: such a conversion returns its input, which then has
    the name of the conversion for all that follows."""
    for node in graph.nodes:
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif _is_empty(node) and graph.output_node() not in node.users:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _is_empty(node: fx.Node) -> bool:
    """Whether an operation is a conversion that neither converts nor copies."""
    if node.target not in _CONVERSIONS:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    before, after = ((x.dtype, x.device) for x in (source.meta["val"], node.meta["val"]))
    how = (*node.args[1:], *node.kwargs.values())
    return before == after and not any(x is True or isinstance(x, torch.memory_format) for x in how)


_CONVERSIONS = (torch.ops.aten.to.dtype, torch.ops.aten.to.device, torch.ops.aten.to.dtype_layout)


def _mark(node: fx.Node) -> int:
    return int((node.meta.get("custom") or {}).get(MARK, -1))


def _meta(node: fx.Node, region: _Region, call: LeafCall) -> dict[str, Any]:
    """The metadata of ``node`` as if ``call`` had been traced."""
    outer = len(region.call.around)
    again: dict[Region, Region] = {
        mine: call.regions[first] for first, mine in region.call.regions.items()
    }
    stack = (*call.around, *(again[region] for region in tags_of(node.meta)[outer:]))
    custom = dict(node.meta.get("custom") or {})
    custom.pop(MARK, None)
    meta = with_tags({**node.meta, "custom": custom}, stack)
    around = node.meta.get("nn_module_stack") or {}
    meta["nn_module_stack"] = _renamed(around, region.call.path, call.path)
    return meta


def _renamed(stack: Mapping[str, Any], one: str, two: str) -> dict[str, Any]:
    return {
        key.replace(one, two, 1): (path.replace(one, two, 1), kind)
        for key, (path, kind) in stack.items()
    }
