"""How often ZeRO-3 gathers parameters, under schedules that run a stage many times."""

from __future__ import annotations

import pytest

from piper.ir.collectives import Move
from piper.ir.dag.build import build
from piper.ir.ops import Collective
from piper.lower.lower import lower
from piper.strategies import mesh
from tests.facts import at, chain
from tests.plan_checker import check


def gathers(schedule: str, regions: int) -> tuple[int, int]:
    """The numbers of all-gathers and of buckets of a step on two pipeline ranks, with one or two
    stages each."""
    model = chain(regions)
    strategy = mesh(pp=2, dp=2, zero=3, schedule=schedule, microbatches=4, bucket_mb=256 / 2**20)
    models = {n: at(model, n) for n in (1, 2)}
    found = lower(strategy.apply(build(model)), models)
    check(found.dag, found.plans, found.memory, models=models)
    kinds = [node.op.kind for node in found.dag.nodes if isinstance(node.op, Collective)]
    return kinds.count(Move.ALL_GATHER), len(found.dag.buckets)


@pytest.mark.parametrize("regions", [4, 8, 12])
def test_breadth_first_gathers_a_parameter_once_a_pass(regions: int) -> None:
    """For any number of regions in a stage: once for its forwards, once for its backwards."""
    count, buckets = gathers("breadth-first", regions)
    assert count <= 2 * buckets
    assert count < gathers("1f1b", regions)[0]
