"""How the chunks of a model are sharded by the tensor and context parallelism of a strategy."""

from __future__ import annotations

from collections.abc import Sequence

from piper.capture.model import Captured
from piper.capture.shard.local_chunks import Sharding
from piper.capture.shard.weight_shards import weight_shards
from piper.ir.dag.dag import Dag
from piper.ir.rules import TensorRule
from piper.ir.shards import ContextAttention, ParameterShard


def shardings_of(captured: Captured, dag: Dag) -> dict[int, tuple[Sharding, ...]]:
    """By chunk, one for each axis."""
    weights: dict[str, ParameterShard] = {}
    for chunk, rules in dag.tensor.items():
        for rule in rules:
            found = weight_shards(captured.chunks[chunk], rule.parameters, rule.ways)
            weights = {**found, **weights}  # a tied weight is sharded as where it is used first
    return {
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


def _in_turn(rules: Sequence[TensorRule]) -> list[TensorRule]:
    """The axes in the order in which regions are sharded. Heads are sharded with the weights that
    make them, and each of these shards by attention under context parallelism: the other way
    round, a device would have other heads than its part of the next weight. Heads and tails of a
    sequence are not sharded again: where ``sequence`` would, context parallelism is first."""
    gathers = any(rule.context is ContextAttention.ALL_GATHER for rule in rules)
    twice = gathers and any(rule.sequence is not None for rule in rules)
    return list(rules) if twice else sorted(rules, key=lambda rule: not rule.parameters)
