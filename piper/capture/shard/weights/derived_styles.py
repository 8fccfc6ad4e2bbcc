"""How to shard the parameters of a model that declares no plan for tensor parallelism."""

from __future__ import annotations

from collections.abc import Collection

from piper.capture.chunk.chunks import Chunk, Cut
from piper.capture.shard.weights.chains import Chains
from piper.capture.shard.weights.joined_graph import joined
from piper.ir.shards import Style


def derived_styles(cut: Cut, wanted: Collection[int], ways: int) -> dict[str, Style]:
    """The sharded parameters of the chunks in ``wanted`` over ``ways`` devices, by name. Parameters
    that other chunks read stay whole."""
    whole = {n for chunk in cut.chunks if chunk.index not in wanted for n in chunk.parameters}
    graph = joined(cut, wanted)
    found = Chains(graph, ways, whole).styles
    first = {name: found[node] for name, node in graph.parameters.items() if node in found}
    styles: dict[str, Style] = {}
    like: dict[str, Chunk] = {}
    for chunk in cut.chunks:
        if chunk.index in wanted:
            one = like.setdefault(chunk.body.key, chunk)
            for name, its in zip(chunk.parameters, one.parameters, strict=True):
                if its in first and name not in whole:
                    styles.setdefault(name, first.get(name, first[its]))
    return styles
