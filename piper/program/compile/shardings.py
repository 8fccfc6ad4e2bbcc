"""The sharding of a model's chunks under the tensor and context parallelism of a strategy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from piper.capture.chunk.expert_regions import sorted_rows
from piper.capture.model import Captured
from piper.capture.shard.local_chunks import Sharding
from piper.capture.shard.weights.weight_shards import weight_shards
from piper.ir.dag.dag import Dag, Node
from piper.ir.grouped import grouped
from piper.ir.ops import Compute
from piper.ir.rules import TensorRule
from piper.ir.shards import ContextAttention, ParameterShard


def shardings_of(captured: Captured, dag: Dag) -> dict[int, tuple[Sharding, ...]]:
    """The shardings of each chunk, one per axis."""
    weights: dict[str, ParameterShard] = {}
    for chunk, rules in dag.tensor.items():
        for rule in rules:
            shards = weight_shards(captured.chunks[chunk], rule.parameters, rule.ways)
            weights = {**shards, **weights}  # the first use decides how a tied weight is sharded
    shardings = {
        chunk: tuple(
            Sharding(
                rule.axis,
                rule.ways,
                rule.stride,
                {n: shard for n, shard in weights.items() if n in rule.parameters},
                rule.sequence,
                rule.split,
                rule.context,
            )
            for rule in _in_turn(rules)
            if rule.ways > 1
        )
        for chunk, rules in dag.tensor.items()
    }
    return {**shardings, **_routed(captured, dag)}


def _routed(captured: Captured, dag: Dag) -> dict[int, tuple[Sharding, ...]]:
    """The axes along which experts on sorted rows get those of each device."""
    nodes = grouped((x.op.chunk, x) for x in dag.nodes if isinstance(x.op, Compute))
    makers = {v: chunk.index for chunk in captured.chunks for v in chunk.outputs}
    routed = {}
    for chunk in captured.chunks:
        if sorted_rows(chunk.body) is None or chunk.index in dag.tensor:
            continue
        near = {makers[v] for v in chunk.inputs if v in makers}
        near |= {c.index for c in captured.chunks if not set(chunk.outputs).isdisjoint(c.inputs)}
        axes, *others = [_own_rows(dag, nodes[i], nodes[chunk.index]) for i in near] or [()]
        if axes and all(x == axes for x in others):
            routed[chunk.index] = axes
    return routed


def _own_rows(dag: Dag, nodes: Sequence[Node], experts: Sequence[Node]) -> tuple[Sharding, ...]:
    """The axes that shard the sequence at ``nodes``, if each of their devices then has rows of its
    own, and computes with them at ``experts`` too."""
    rules = [rule for rule in dag.tensor.get(nodes[0].compute.chunk, ()) if rule.ways > 1]
    sequence = all(rule.split is not None or rule.sequence is not None for rule in rules)
    ways = math.prod(rule.ways for rule in rules)
    alone = {n.replicas for n in nodes} == {ways} and {n.replicas for n in experts} == {1}
    here, there = ({(n.compute.microbatch, n.devices) for n in end} for end in (nodes, experts))
    gathers = any(rule.context is ContextAttention.ALL_GATHER for rule in rules)
    if not sequence or gathers or not alone or here != there:
        return ()
    return tuple(Sharding(rule.axis, rule.ways, rule.stride, {}, routed=True) for rule in rules)


def _in_turn(rules: Sequence[TensorRule]) -> list[TensorRule]:
    """The axes in the order in which regions are sharded. Tensor parallelism comes first: it shards
    the attention heads with their weights, and context parallelism (Ulysses) shards each shard of
    heads further. In the other order, a device's heads would not match its shard of the next
    weight. The head and tail blocks of a sequence (all-gather attention) cannot be sharded again:
    if ``sequence`` would do so, context parallelism comes first, as in ``rules``."""
    gathers = any(rule.context is ContextAttention.ALL_GATHER for rule in rules)
    twice = gathers and any(rule.sequence is not None for rule in rules)
    return list(rules) if twice else sorted(rules, key=lambda rule: not rule.parameters)
