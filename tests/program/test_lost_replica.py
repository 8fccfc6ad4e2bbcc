"""A program without one replica trains like the whole program: the same batch and the same random
numbers, so losses and weights are equal up to reduction order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import piper
from piper.models import DenseConfig, DenseTransformer
from piper.program.rerouted import rerouted
from piper.strategies.replicas.lost_replica import without_replica
from tests.scripts.cases import SEQ, VOCAB, Net, mean_loss
from tests.training import sgd

SCHEDULES = (
    "gpipe", "1f1b", "zb-h1", "dualpipe", "zb-v", "v-half", "dualpipev", "interleaved",
    "breadth-first",
)  # fmt: skip
MESHES: list[dict[str, Any]] = [
    *({"pp": 2, "schedule": s, "dp": d, "zero": z, "microbatches": 4}
      for (i, s), d in itertools.product(enumerate(SCHEDULES), (2, 3, 4)) for z in [(i + d) % 4]),
    *({"dp": d, "zero": z, "microbatches": m}
      for d, z, m in itertools.product((2, 3, 4), range(4), (1, 2, 3))),
    {"dp": 4, "ep": 2, "microbatches": 2},
    {"pp": 2, "dp": 6, "ep": 2, "zero": 1, "expert_zero": 1, "microbatches": 4},
    {"pp": 2, "dp": 4, "ep": 2, "schedule": "dualpipev", "microbatches": 4},
    {"dp": 4, "zero": 3, "within": 2, "microbatches": 2},
    {"pp": 2, "dp": 3, "tp": 2, "parameters": {"head": 0}, "microbatches": 2, "zero": 1},
    {"pp": 2, "dp": 2, "tp": 2, "sequence_parallel": True, "schedule": "zb-v", "microbatches": 4},
    {"dp": 3, "cp": 2, "microbatches": 2, "zero": 3},
]  # fmt: skip
"""Every schedule and every level of ZeRO, with 2 to 4 replicas."""


@functools.cache
def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = (torch.randint(0, VOCAB, (144, SEQ), generator=generator) for _ in range(6))
    return list(zip(tokens, tokens, strict=False))


@functools.cache
def captured(*, dense: bool = False) -> piper.Capture:
    torch.manual_seed(0)
    (x, y), *_ = batches()
    model: torch.nn.Module = Net(dropout=0.2)
    if dense:
        model = DenseTransformer(DenseConfig(vocab=VOCAB, dim=8, layers=4, heads=2, mlp_dim=12))
    return piper.capture(model, inputs=(x,), targets=(y,), loss=mean_loss, optimizer=sgd)


def trained(program: piper.Program) -> Iterator[Tensor]:
    """The losses, of an evaluation too, and the weights."""
    with piper.launch(program) as trainer:
        for batch in batches():
            yield trainer.step(*batch).loss
        yield trainer.evaluate(*batches()[0]).loss
        yield from trainer.state_dict().values()


@pytest.mark.cases(fast=1, slow=24)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_rest_trains_alike(mesh: dict[str, Any]) -> None:
    dense = ("tp" in mesh or "cp" in mesh) and "parameters" not in mesh
    whole = captured(dense=dense).compile(piper.strategies.mesh(**mesh))
    found = rerouted(whole)
    lost = set(found.replicas[-1])
    assert set(found.program.devices) == set(whole.devices) - lost
    for one, other in zip(trained(whole), trained(found.program), strict=True):
        assert float((one - other).abs().max() / one.abs().max()) < 1e-6


def test_nothing_is_traced_again() -> None:
    whole = captured().compile(piper.strategies.mesh(pp=2, dp=2, microbatches=4))
    program = rerouted(whole).program
    for before, after in zip(whole.codes, program.codes, strict=True):
        assert after.programs[1] is before.programs[2]


def test_the_rows_of_a_lost_replica_go_round() -> None:
    found = without_replica(piper.strategies.mesh(pp=2, dp=3, microbatches=3))
    assert found.replicas == ((0, 3), (1, 4), (2, 5))
    orders = [str(d) for d in found.strategy.directives if "order([{'PP': 0" in str(d)]
    assert [text.count("'F'") for text in orders] == [5, 4]
    text = "\n".join(str(found.strategy).splitlines()[2:7])
    assert text == (
        "    split({}, into='MB', parts=9),\n"
        "    place({'PP': 0, 'MB': [0, 2, 4, 6, 8]}, devices=[0]),\n"
        "    place({'PP': 0, 'MB': [1, 3, 5, 7]}, devices=[1]),\n"
        "    place({'PP': 1, 'MB': [0, 2, 4, 6, 8]}, devices=[3]),\n"
        "    place({'PP': 1, 'MB': [1, 3, 5, 7]}, devices=[4]),"
    )


def test_where_the_rest_divides_the_rows_groups_stay() -> None:
    found = without_replica(piper.strategies.mesh(dp=4, tp=2, microbatches=3))
    text = str(found.strategy)
    assert "parts=4" in text
    assert "devices=Mesh(range(0, 6), dp=3, tp=2)" in text


@pytest.mark.parametrize(
    ("mesh", "why"),
    [
        ({"pp": 2}, "there is only one"),
        ({"dp": 2, "ep": 2}, "one replica alone does not have all of the experts"),
        ({"dp": 2, "zero": 1, "within": 2}, "one replica alone does not have all of"),
    ],
)
def test_what_cannot_be_lost(mesh: dict[str, Any], why: str) -> None:
    with pytest.raises(piper.DirectiveError, match=f"cannot go on without a replica: {why}"):
        without_replica(piper.strategies.mesh(**mesh))


def test_an_order_of_another_form() -> None:
    strategy = piper.strategies.mesh(dp=2, microbatches=2) + piper.Strategy(
        [piper.order([{"MB": 0}], [{"MB": 1}])]
    )
    with pytest.raises(piper.DirectiveError, match="does not name each pass by its stage"):
        without_replica(strategy)
