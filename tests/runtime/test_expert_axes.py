"""Experts beside tensor and context parallelism: all devices share the rows, each row goes through
its experts once, and the numbers are those of one device."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.ir.ops import Compute
from piper.models import MoEConfig, MoETransformer
from piper.strategies import mesh
from tests.runtime.test_dropless import captured as hugging_face
from tests.runtime.test_dropless import check as check_hugging_face
from tests.training import Batch, Run, assert_same, plain, sgd, train

PLAN = {"*.w_qkv.weight": 0, "*.attention.w_out.weight": 1}


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


@cache
def model(*, dropless: bool) -> nn.Module:
    torch.manual_seed(0)
    config = MoEConfig(
        vocab=18,
        dim=8,
        heads=4,
        layers=1,
        mlp_dim=12,
        experts=8,
        top_k=2,
        capacity_factor=None if dropless else 1.0,
    )
    return MoETransformer(config).double()


@cache
def batches() -> list[Batch]:
    torch.manual_seed(1)
    tokens = torch.randint(16, (2, 4, 9))
    return [((one[:, :-1].clone(),), (one[:, 1:].clone(),)) for one in tokens]


@cache
def captured(*, dropless: bool) -> piper.Capture:
    inputs, targets = batches()[0]
    return piper.capture(
        model(dropless=dropless), inputs=inputs, targets=targets, loss=loss, optimizer=sgd
    )


@cache
def reference(*, dropless: bool, microbatches: int) -> Run:
    return plain(model(dropless=dropless), loss, batches(), microbatches=microbatches)


def products(program: piper.Program) -> int:
    """Floating-point operations of all experts on all devices. Rows sorted by expert count as they
    are, not up to the capacity."""
    dag, total = program.lowered.dag, 0
    for node in dag.nodes:
        if isinstance(node.op, Compute) and "EP" in node.tags:
            chunk = program.models[node.parts].chunks[node.op.chunk]
            flops = chunk.variants[dag.policy(chunk.index)].passes[node.op.which].flops
            rule, rows = dag.shards.get(chunk.index), chunk.sorted_rows
            if rule is not None and rule.ways > 1 and rows is not None:
                flops = flops * rows.rows // rule.room(rows.rows)
            total += flops * len(node.devices)
    return total


MESHES: dict[str, dict[str, Any]] = {
    "tp 2, ep 2": {"tp": 2, "ep": 2, "parameters": PLAN},
    "cp 4, ep 4": {"cp": 4, "ep": 4},
    "dp 2, tp 2, ep 4": {"dp": 2, "tp": 2, "ep": 4, "parameters": PLAN},
    "dp 2, tp 4, ep 2": {"dp": 2, "tp": 4, "ep": 2, "zero": 1, "parameters": PLAN},
    "dp 2, cp 2, tp 2, ep 8": {"dp": 2, "cp": 2, "tp": 2, "ep": 8, "zero": 2, "parameters": PLAN},
    "tp 4, ep 2, sequence": {"tp": 4, "ep": 2, "parameters": PLAN, "sequence_parallel": True},
    "cp 4, all experts": {"cp": 4, "expert_zero": 3},
    "tp 2, ep 2, ZeRO-3": {"tp": 2, "ep": 2, "microbatches": 2, "zero": 3, "parameters": PLAN},
}


@pytest.mark.cases(fast=1, slow=9)
@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("dropless", [True, False])
def test_each_row_goes_through_its_experts_once(axes: str, *, dropless: bool) -> None:
    how = MESHES[axes]
    program = captured(dropless=dropless).compile(mesh(**how))
    one = captured(dropless=dropless).compile(mesh(microbatches=how.get("microbatches", 1)))
    assert products(program) == products(one)
    parts = how.get("dp", 1) * how.get("microbatches", 1)
    wanted = reference(dropless=dropless, microbatches=parts)
    assert_same(train(program, batches()), wanted, 1e-12)


SHARDED = {"*.w_in": "column", "*.w_gate": "column", "*.experts.w_out": "row"}


@pytest.mark.cases(fast=1, slow=3)
@pytest.mark.parametrize("dropless", [True, False])
@pytest.mark.parametrize("how", [{}, {"sequence_parallel": True, "zero": 1}])
def test_each_expert_sharded(how: dict[str, Any], *, dropless: bool) -> None:
    """Expert tensor parallelism: a device has a shard of every expert, and of its products."""
    program = captured(dropless=dropless).compile(mesh(tp=2, parameters=SHARDED, **how))
    assert products(program) == products(captured(dropless=dropless).compile(mesh()))
    wanted = reference(dropless=dropless, microbatches=1)
    assert_same(train(program, batches()), wanted, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_the_plan_of_transformers(name: str) -> None:
    """gate_up_proj has two sections, each sharded separately."""
    program = check_hugging_face(name, 1, mesh(tp=2))
    assert products(program) == products(hugging_face(name).compile(mesh()))


def test_a_plan_that_is_unknown_is_the_models() -> None:
    wanted = "the model's own plan .* shards 'layers.0' by 'diagonal', which is unknown here: say"
    model(dropless=True).tensor_plan = {"layers.0": "diagonal"}  # type: ignore[assignment]
    try:
        with pytest.raises(piper.DirectiveError, match=wanted):
            captured.__wrapped__(dropless=True).compile(mesh(tp=2))
    finally:
        del model(dropless=True).tensor_plan


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss"])
@pytest.mark.parametrize(
    "axes",
    [
        {"dp": 2, "tp": 2, "ep": 4, "zero": 1},
        {"cp": 4, "ep": 4},
        {"pp": 2, "dp": 2, "tp": 2, "ep": 2, "zero": 3, "microbatches": 2},
        {"tp": 2, "cp": 2, "ep": 2, "zero": 2, "sequence_parallel": True},
    ],
)
def test_hugging_face(name: str, axes: dict[str, Any]) -> None:
    program = check_hugging_face(
        name, axes.get("dp", 1) * axes.get("microbatches", 1), mesh(**axes)
    )
    one = hugging_face(name).compile(mesh(microbatches=axes.get("microbatches", 1)))
    assert products(program) == products(one)


def redistributions(program: piper.Program) -> set[str]:
    """The layouts between which values along an axis move."""
    chunks = next(iter(program.models.values())).chunks
    moves = [s.redistribution for chunk in chunks for s in chunk.segments]
    return {move.text for move in moves if move is not None}


def test_each_device_sorts_its_own_rows() -> None:
    """Only attention, and the loss, communicate along a sharded sequence."""
    program = captured(dropless=True).compile(mesh(cp=2, ep=2))
    assert redistributions(program) == {"S(2) -> S(1)", "P(sum) -> R"}
    wanted = reference(dropless=True, microbatches=1)
    assert_same(train(program, batches()), wanted, 1e-12)


class FirstSorted(nn.Module):
    """A mixture whose result also depends on which of its rows is the first in sorted order."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.mixture = mixture

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y, routing = self.mixture(x)
        order = routing.expert.flatten().sort(stable=True).indices
        return y + order[:1].double() / len(order), routing


@pytest.mark.slow
def test_rows_whose_order_matters_are_sorted_together() -> None:
    odd = copy.deepcopy(model(dropless=True))
    odd.layers[0].mlp = FirstSorted(odd.layers[0].mlp)  # type: ignore[index, union-attr]
    inputs, targets = batches()[0]
    program = piper.compile(
        odd, mesh(cp=2, ep=2), inputs=inputs, targets=targets, loss=loss, optimizer=sgd
    )
    assert any("of [" in text for text in redistributions(program))
    assert_same(train(program, batches()), plain(odd, loss, batches(), microbatches=1), 1e-12)


@pytest.mark.slow
def test_computed_again() -> None:
    strategy = mesh(cp=2, tp=2, ep=4, parameters=PLAN) + piper.Strategy([piper.remat({}, "all")])
    program = captured(dropless=True).compile(strategy)
    wanted = reference(dropless=True, microbatches=1)
    assert_same(train(program, batches()), wanted, 1e-12)


def test_sorted_rows_along_a_sequence_are_refused() -> None:
    """The error says what to write instead."""
    strategy = [
        piper.place({}, devices=piper.Mesh(range(2), dp=1, cp=2), batch="dp", sequence="cp"),
        piper.shard({"EP": "*"}, ways=2),
    ]
    wanted = r"sorted by expert, but place\(.*shard\(\.\.\., batch=\['dp', 'cp'\]\), as mesh does"
    with pytest.raises(piper.DirectiveError, match=wanted):
        captured(dropless=True).compile(piper.Strategy(strategy))


def test_rows_that_do_not_divide_are_refused() -> None:
    """64 rows: 4 sequences of 8 tokens, each to 2 experts."""
    wanted = "has 64 rows sorted by expert on each of 1 device, which 3 devices cannot share evenly"
    with pytest.raises(piper.CaptureError, match=wanted):
        captured(dropless=True).compile(
            mesh(tp=3, expert_zero=0, parameters={"embedding.weight": 0})
        )


def test_what_batch_names() -> None:
    def refused(match: str, **options: Any) -> None:
        place = piper.place({}, devices=piper.Mesh(range(2), dp=1, tp=2), batch="dp")
        with pytest.raises(piper.DirectiveError, match=match):
            captured(dropless=True).compile(
                piper.Strategy([place, piper.shard({"EP": "*"}, **options)])
            )

    refused("axis='cp': F .* has the axes dp, tp", ways=2, batch=["dp", "cp"])
    refused("batch=.* and axis='tp': .*say how many ways", axis="tp", batch=["dp", "tp"])
    with pytest.raises(
        piper.DirectiveError, match=r"dp \* cp \* tp = 8 devices .*\[1, 2, 4, 8\] do"
    ):
        mesh(dp=2, cp=2, tp=2, ep=3)


def test_in_a_folder(tmp_path: Path) -> None:
    """A stored program includes the code of experts with rows over all devices, and loads again."""
    program = captured(dropless=True).compile(mesh(cp=2, ep=2))
    program.save(tmp_path / "program")
    read = piper.Program.load(tmp_path / "program")
    assert read.text() == program.text()
