"""``shard`` along an axis whose devices have the same rows: tensor parallelism.

Patterns select the sharded parameters and their dimensions. Sharding propagation then derives the
layouts of activations and all communication.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from piper.base.errors import DirectiveError
from piper.base.reading import shown
from piper.ir.dag.dag import Dag, Node, name_of, region_of
from piper.ir.rules import TensorRule
from piper.ir.shards import Style

ShardAlong = int | str
_STYLES = {
    "column": Style.COLUMN,
    "colwise": Style.COLUMN,
    "colwise_rep": Style.COLUMN,
    "colwise_gather_output": Style.COLUMN,
    "packed_colwise": Style.COLUMN,
    "row": Style.ROW,
    "rowwise": Style.ROW,
    "rowwise_rep": Style.ROW,
    "rowwise_split_input": Style.ROW,
    "embedding_rowwise": Style.ROW,
    "packed_rowwise": Style.ROW,
}
"""Our styles and those of ``transformers``. The latter also describe activation layouts, which are
derived here instead."""
MODEL = "model"
"""Used as a style: shard as the model declares."""


def tensor_rules(
    dag: Dag,
    me: int,
    numbers: Iterable[int],
    axis: str,
    parameters: Mapping[str, ShardAlong] | None,
    sequence: bool,
    stream: str,
) -> Dag:
    """``dag`` with the nodes ``numbers`` sharded along ``axis``."""
    rules = dict(dag.tensor)
    chosen = _Chosen(dag, parameters)
    seen: set[tuple[int, int, int]] = set()
    for number in numbers:
        node = dag.nodes[number]
        chunk = node.compute.chunk
        key = chunk, id(node.mesh), node.replicas
        if key in seen:  # another pass, or another microbatch
            continue
        seen.add(key)
        name = name_of(dag, number)
        ways, stride = _division(node, axis, name)
        wanted = chosen.of(chunk)
        rule = TensorRule(axis, ways, stride, stream, me, wanted, 1 if sequence else None)
        rules[chunk] = with_rule(dag, name, rules.get(chunk, ()), rule)
        if chunk in dag.shards:
            raise DirectiveError(
                f"{name} is already sharded by {dag.history[dag.shards[chunk].made_by]}: leave "
                "the experts' region out of the filter"
            )
    chosen.refuse_unused()
    _refuse_half_sharded(dag, rules)
    return replace(dag, tensor=rules)


def _refuse_half_sharded(dag: Dag, rules: Mapping[int, tuple[TensorRule, ...]]) -> None:
    """Refuse a parameter that its regions shard differently."""
    first: dict[str, tuple[int, TensorRule]] = {}
    for chunk, row in rules.items():
        for rule in row:
            for name in rule.parameters if rule.ways > 1 else ():
                first.setdefault(name, (chunk, rule))
    for user in dag.model.chunks:
        for name in first.keys() & set(user.parameters):
            chunk, one = first[name]
            others = [r for r in rules.get(user.index, ()) if name in r.parameters]
            if any(
                (r.ways, r.parameters[name]) == (one.ways, one.parameters[name]) for r in others
            ):
                continue
            raise DirectiveError(
                f"the parameter {name!r} is sharded {one.ways} ways along {one.axis} in "
                f"{region_of(dag, chunk)} and otherwise in {region_of(dag, user.index)}, which "
                "uses it too: shard it in both, over equal numbers of devices, or leave it out of "
                "parameters="
            )


def with_rule(
    dag: Dag, name: str, rules: tuple[TensorRule, ...], rule: TensorRule
) -> tuple[TensorRule, ...]:
    """``rules`` of the chunk of node ``name`` with ``rule`` added, unless it is there already."""
    for earlier in rules:
        again = replace(earlier, made_by=rule.made_by) == rule
        if earlier == rule or (again and not rule.parameters):  # from other microbatches
            return rules
        if earlier.made_by == rule.made_by:
            raise DirectiveError(
                f"other microbatches of {name} run on a mesh where {rule.axis} has another size or "
                "place"
            )
        if earlier.made_by != rule.made_by and (
            earlier.axis == rule.axis or (earlier.parameters and rule.parameters)
        ):
            raise DirectiveError(
                f"{name} is already sharded by {dag.history[earlier.made_by]}: its parameters are "
                "sharded along one axis"
            )
    return (*rules, rule)


def _division(node: Node, axis: str, name: str) -> tuple[int, int]:
    mesh = node.mesh
    assert mesh is not None
    stride = mesh.stride(axis)
    if mesh.size(axis) > 1 and stride >= node.replicas:
        raise DirectiveError(
            f"axis={axis!r} shards the batch in {name}: for tensor parallelism its devices must "
            "have the same rows; leave it out of place(batch=)"
        )
    return mesh.size(axis), stride


class _Chosen:
    """The parameters that patterns select, and how each is sharded."""

    def __init__(self, dag: Dag, patterns: Mapping[str, ShardAlong] | None) -> None:
        self._dag = dag
        self._given = patterns is not None
        declared = dag.model.declared
        if patterns is not None and not patterns:
            raise DirectiveError(
                "parameters={} shards nothing: name parameters, or leave parameters= out for the "
                "plan that the model declares"
            )
        if not declared and (patterns is None or MODEL in patterns.values()):
            weights = (n.split(".") for n, x in dag.model.parameters.items() if len(x.shape) == 2)
            names = list(dict.fromkeys(path[-2] for path in weights if path[-1] == "weight"))
            raise DirectiveError(
                "the model declares no plan for tensor parallelism (_tp_plan, as many transformers "
                "models have): say how its linear layers are sharded, "
                "parameters={'*.up': 'column', '*.down': 'row'}, in mesh or shard; it has "
                f"{', '.join(names[:8])}{', …' if names[8:] else ''}"
            )
        self._patterns = {"*": MODEL} if patterns is None else patterns
        plan = [(own, _declared(own, how)) for own, how in declared.items()]
        self._rules: list[tuple[str, str, int | Style | None]] = []
        for pattern, wanted in self._patterns.items():
            if wanted == MODEL:
                self._rules += [(pattern, own, how) for own, how in plan if how is not None]
            self._rules.append((pattern, "*", None if wanted == MODEL else _style(pattern, wanted)))
        self._used: set[str] = set()
        self._known: dict[int, dict[str, int | Style]] = {}

    def of(self, chunk: int) -> dict[str, int | Style]:
        """The sharded parameters of a chunk, and how each is sharded."""
        if chunk not in self._known:
            styles = ((name, self._of(name)) for name in self._dag.model.chunks[chunk].parameters)
            self._known[chunk] = {name: how for name, how in styles if how is not None}
        return self._known[chunk]

    def _of(self, name: str) -> int | Style | None:
        """How a parameter is sharded, by the first pattern that matches it."""
        for pattern, declared, how in self._rules:
            if matches(name, pattern) and matches(name, declared):
                self._used.add(pattern)
                return how
        return None

    def refuse_unused(self) -> None:
        unused = [p for p in self._patterns if p not in self._used] if self._given else []
        if unused:
            names = list(self._dag.model.parameters)
            close = [*difflib.get_close_matches(unused[0], names, n=4), *names]
            shown = list(dict.fromkeys(close))[:8]
            raise DirectiveError(
                f"parameters: the pattern {unused[0]!r} matches no parameter of the regions; there "
                f"are {', '.join(shown)}{', ...' if len(names) > 8 else ''}"
            )


def check_patterns(parameters: object) -> None:
    """Refuse ``parameters`` that is not a mapping from name patterns."""
    if parameters is None:
        return
    if not isinstance(parameters, Mapping) or not all(isinstance(p, str) for p in parameters):
        raise DirectiveError(
            f"parameters={shown(parameters)} must map patterns of names to the number of a "
            "dimension, 'column' or 'row', such as {'*.up.weight': 0}"
        )


def refuse_tied_names(patterns: Iterable[str], keys: Mapping[str, str]) -> None:
    """Refuse patterns that match only later names of a tied parameter, such as a head tied to the
    embedding. ``keys`` maps every name to the parameter's first name."""
    firsts = set(keys.values())
    for pattern in patterns:
        tied = [key for key, first in keys.items() if key != first and matches(key, pattern)]
        if tied and not any(matches(first, pattern) for first in firsts):
            raise DirectiveError(
                f"parameters: {pattern!r} names {tied[0]!r}, which is tied: it is the parameter "
                f"{keys[tied[0]]!r}. Use that name"
            )


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a parameter's name, or the name of its module."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)


def _declared(pattern: str, how: str) -> int | Style | None:
    try:
        return _style(pattern, how)
    except DirectiveError:
        raise DirectiveError(
            f"the model's own plan for tensor parallelism (tensor_plan or _tp_plan) shards "
            f"{pattern!r} by {how!r}, which is unknown here: say how parameters are sharded, "
            "parameters={'*.up.weight': 'column', '*.down.weight': 'row'}"
        ) from None


def _style(pattern: str, how: object) -> int | Style | None:
    if isinstance(how, int) and not isinstance(how, bool) and how >= 0:
        return how
    if isinstance(how, str) and how in _STYLES:
        return _STYLES[how]
    if isinstance(how, str) and how in _OTHERS:
        return None
    raise DirectiveError(
        f"parameters: {pattern!r} maps to {how!r}: give the number of a dimension, "
        "'column', 'row', 'replicate' or, for the plan that the model declares, 'model'"
    )


_OTHERS = (
    "embedding_colwise",
    "replicate",
    "all_reduce",
    "sequence_parallel",
    "replicated",
    "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
    "gather",
    "local",
    "isolated",
    "moe_tp_experts",
    "moe_identity_expert",
    "grouped_gemm",
    "ep_router",
    "ep_dispatch_experts",
)
"""Styles of ``transformers`` for modules whose parameters are replicated here."""
