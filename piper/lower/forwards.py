"""Lowers only the forwards of a placed DAG, for evaluation on the state of a training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from msgspec import structs

from piper.ir.dag.dag import Dag
from piper.ir.dag.facts import Model
from piper.ir.passes import Pass
from piper.ir.plan.lowered import Lowered
from piper.lower.lower import Settings, lower


def lower_forwards(
    placed: Dag, models: Mapping[int, Model], settings: Settings, training: Dag
) -> Lowered:
    """Plans for the forwards of ``placed``. They use the state of ``training``, a lowered step."""
    return lower(_forward_only(placed), models, replace(settings, memory_limit=None), training)


def _forward_only(dag: Dag) -> Dag:
    """``dag`` without its backwards."""
    kept = [i for i, node in enumerate(dag.nodes) if node.compute.which is Pass.F]
    moved = {old: new for new, old in enumerate(kept)}
    nodes = []
    for i in kept:
        node = dag.nodes[i]
        pairs = zip(node.after, node.after_by, strict=True)
        after = [(moved[b], by) for b, by in pairs if b in moved]
        nodes.append(
            structs.replace(
                node, after=tuple(b for b, _ in after), after_by=tuple(by for _, by in after)
            )
        )
    return replace(dag, nodes=tuple(nodes))
