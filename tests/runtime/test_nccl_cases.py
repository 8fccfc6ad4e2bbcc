"""The cases that ranks on GPUs run, here on virtual devices: they compile and equal one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import piper
from piper.models import MoEConfig
from tests.scripts.nccl_cases import CASES, CONFIG, ROWS, Case, batch, differences, numbers
from tests.training import shared_captures

ONE = piper.Strategy([piper.split(into="MB", parts=1), piper.place({}, devices=[0])])


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


@pytest.mark.cases(fast=0, slow=24)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{ranks}-{name}")
        for ranks, cases in CASES.items()
        for name, case in cases.items()
    ],
)
def test_every_case(case: Case) -> None:
    if case.options.get("compiler"):  # other tests compare Inductor
        case = replace(case, options={})
    with piper.launch(case.compile("cpu")) as trainer:
        found = numbers(trainer)
    assert all(bool(torch.isfinite(x).all()) for x in found.values())
    if case.config is CONFIG or "precision" in case.options:
        return  # dropped tokens and rounding depend on the strategy
    with piper.launch(replace(case, strategy=ONE).compile("cpu")) as trainer:
        should = numbers(trainer)
    assert not differences(found, should, exact=False)


@pytest.mark.slow
def test_outputs_of_experts_with_a_capacity() -> None:
    """Which tokens an expert takes depends on other rows; there is still one output per row."""
    assert isinstance(CONFIG, MoEConfig)
    assert CONFIG.capacity_factor is not None
    strategy = piper.Strategy([piper.split(parts=2), piper.place({}, devices=[0, 1])])
    case = Case(strategy, {"outputs": lambda found, _: {"logits": found}})
    with piper.launch(case.compile("cpu")) as trainer:
        logits = trainer.evaluate(*batch(0)).outputs["logits"]
    assert logits.shape[0] == ROWS
