"""How the chunks of a model are sharded by the tensor and context parallelism of a strategy."""

from __future__ import annotations

from piper.capture.chunks import ParameterShard
from piper.capture.local_chunks import Sharding
from piper.capture.model import Captured
from piper.capture.weight_shards import weight_shards
from piper.ir.dag import Dag


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
            for rule in rules
            if rule.ways > 1
        )
        for chunk, rules in dag.tensor.items()
    }
