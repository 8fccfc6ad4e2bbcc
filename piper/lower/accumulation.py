"""Where gradients are added up: those of a bucket that is reduced once a step in one buffer, which
is then reduced as it is; others each for itself, to be copied into one when they are reduced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from piper.ir.dag import Bucket, Compute, Dag
from piper.ir.values import Role, parameters_of
from piper.lower.plan import Plan

LINE = 64
"""Bytes: where gradients are added up each for itself, each begins at a multiple."""


def padded(nbytes: int) -> int:
    """Bytes that a gradient takes among others."""
    return -(-nbytes // LINE) * LINE


def adds_up_in_place(bucket: Bucket, slots: Sequence[Sequence[str]]) -> bool:
    """Whether a reduction of ``bucket`` finds its gradients in its own buffer; ``slots`` are the
    parameters whose gradients each slot that it reads has."""
    if bucket.level > 1:
        return False
    found = Counter(name for names in slots for name in names)
    return all(found[name] <= 1 for name in bucket.parameters)


def gradient_names(dag: Dag, plan: Plan) -> dict[int, tuple[str, ...]]:
    """For each slot of a plan that has gradients, the parameters they are of."""
    found: dict[int, tuple[str, ...]] = {}
    for x in plan.instructions:
        if not isinstance(x.op, Compute):
            continue
        for value, slot in zip(dag.nodes[x.node].writes, x.writes, strict=True):
            if value < dag.first_extra and slot not in found:
                role = dag.table.value(value)[0].role
                if role in (Role.PARAMETER_GRADIENT, Role.TIED_GRADIENT):
                    chunk = dag.model.chunks[x.op.chunk]
                    own, tied = parameters_of(dag.model, chunk, dag.table.ties)
                    found[slot] = tied if role is Role.TIED_GRADIENT else own
    return found
