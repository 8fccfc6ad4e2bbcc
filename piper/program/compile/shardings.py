"""The sharding of a model's chunks under the tensor and context parallelism of a strategy."""

from __future__ import annotations

from collections.abc import Sequence

from piper.capture.model import Captured
from piper.capture.shard.local_chunks import Sharding
from piper.capture.shard.weight_shards import weight_shards
from piper.ir.dag.dag import Dag
from piper.ir.rules import TensorRule
from piper.ir.shards import ContextAttention, ParameterShard


def shardings_of(captured: Captured, dag: Dag) -> dict[int, tuple[Sharding, ...]]:
    """The shardings of each chunk, one per axis."""
    weights: dict[str, ParameterShard] = {}
    for chunk, rules in dag.tensor.items():
        for rule in rules:
            shards = weight_shards(captured.chunks[chunk], rule.parameters, rule.ways)
            weights = {**shards, **weights}  # the first use decides how a tied weight is sharded
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
    """The axes in the order in which regions are sharded. Tensor parallelism comes first: it shards
    the attention heads with their weights, and context parallelism (Ulysses) shards each shard of
    heads further. In the other order, a device's heads would not match its shard of the next
    weight. The head and tail blocks of a sequence (all-gather attention) cannot be sharded again:
    if ``sequence`` would do so, context parallelism comes first, as in ``rules``."""
    gathers = any(rule.context is ContextAttention.ALL_GATHER for rule in rules)
    twice = gathers and any(rule.sequence is not None for rule in rules)
    return list(rules) if twice else sorted(rules, key=lambda rule: not rule.parameters)
