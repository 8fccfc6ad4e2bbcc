"""One capture, many strategies: the same programs as ``piper.compile``, without new tracing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import PiperError
from piper.ir.passes import Pass
from piper.launch.agreement import fingerprints
from piper.strategies.directives import Directive, place, replicate, shard
from tests.training import adamw, data_parallel, one_f_one_b, pipeline

WIDTH, ROWS = 6, 8


class Counting(nn.Module):
    """Records the number of rows of each call, also while tracing."""

    def __init__(self, calls: list[int] | None = None, *, modes: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.modes = modes
        self.note = (lambda rows: None) if calls is None else calls.append

    def forward(self, x: Tensor) -> Tensor:
        self.note(len(x))
        for layer in self.layers:
            with piper.annotate("layer"):
                x = layer(x).relu()
        return x + 1 if self.modes and not self.training else x


def example() -> dict[str, Any]:
    torch.manual_seed(0)
    x, y = torch.randn(2, ROWS, WIDTH)
    return {"inputs": (x,), "targets": (y,), "loss": F.mse_loss, "optimizer": adamw}


STRATEGIES: dict[str, list[Directive]] = {
    "1f1b": pipeline([[0], [1]], 4, *one_f_one_b(2, 4)),
    "data parallel": data_parallel(2, 2),
    "ZeRO-3": [*data_parallel(2, 2), replicate({}, zero=3)],
    "one device": [place({}, devices=[0])],
}


@pytest.mark.slow
@pytest.mark.parametrize("modes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_programs_are_those_of_compile(modes: bool) -> None:
    torch.manual_seed(1)
    model, how = Counting(modes=modes), example()
    captured = piper.capture(model, **how)
    for name, directives in STRATEGIES.items():
        strategy = piper.Strategy(directives)
        found, wanted = captured.compile(strategy), piper.compile(model, strategy, **how)
        assert fingerprints(found) == fingerprints(wanted), name
        assert [str(plan) for plan in found.plans] == [str(plan) for plan in wanted.plans], name
        assert found.memory == wanted.memory, name
        batch = (*how["inputs"], *how["targets"])
        with piper.launch(found) as one, piper.launch(wanted) as other:
            for _ in range(2):
                assert torch.equal(one.step(*batch).loss, other.step(*batch).loss), name
            assert torch.equal(one.evaluate(*batch).loss, other.evaluate(*batch).loss), name


def test_a_model_is_traced_once_for_each_number_of_rows() -> None:
    seen: list[int] = []
    captured = piper.capture(Counting(seen), **example())
    assert not seen  # capture is lazy
    for directives in STRATEGIES.values():
        captured.compile(piper.Strategy(directives))
    calls = list(seen)
    assert sorted(set(calls)) == [2, ROWS]  # 8 rows in 4 microbatches, or in 2 on 2 devices
    for directives in STRATEGIES.values():
        captured.compile(piper.Strategy(directives))
    assert seen == calls


def test_evaluation_traces_again_what_the_mode_changes() -> None:
    seen: list[int] = []
    captured = piper.capture(Counting(seen, modes=True), **example(), tags={})
    program = captured.compile(piper.Strategy(STRATEGIES["1f1b"]))
    assert seen == [2, 2, 2]  # training, evaluation, and training again, to compare them
    training, evaluation = (
        {
            piece.name: made.functions[Pass.F].module
            for piece, made in zip(code.pieces, code.programs[1], strict=True)
        }
        for code in program.codes
    )
    again = [name for name in evaluation if evaluation[name] is not training.get(name)]
    assert again == ["layer[3]"]


def test_evaluation_is_planned_when_it_is_first_asked_for() -> None:
    program = piper.compile(Counting(), piper.Strategy(STRATEGIES["1f1b"]), **example())
    assert "plans" not in vars(program.evaluation_step)
    kinds = {x.name[0] for plan in program.evaluation_step.plans for x in plan.instructions}
    assert "F" in kinds
    assert "B" not in kinds


def test_weights_are_those_of_the_launch() -> None:
    model, how = Counting(), example()
    program = piper.capture(model, **how).compile(piper.Strategy(STRATEGIES["1f1b"]))
    with torch.no_grad():
        model.layers[0].weight.zero_()
    with piper.launch(program) as trainer:
        assert not trainer.state_dict()["layers.0.weight"].any()


def test_what_is_refused_leaves_the_capture_as_it_was() -> None:
    captured = piper.capture(Counting(), **example())
    with pytest.raises(PiperError, match="memory_limit=100 is not enough"):
        captured.compile(piper.Strategy(STRATEGIES["1f1b"]), memory_limit=100)
    with pytest.raises(PiperError):
        captured.compile(piper.Strategy([place({}, devices=[0, 1]), shard({"layer": "*"}, dim=0)]))
    with pytest.raises(PiperError, match="strategy='1f1b' must be"):
        captured.compile("1f1b")  # type: ignore[arg-type]
    captured.compile(piper.Strategy(STRATEGIES["1f1b"]))


def test_the_dag_before_any_directive_is_of_the_whole_batch() -> None:
    calls: list[int] = []
    captured = piper.capture(Counting(calls), **example())
    dag = captured.dag
    assert dag.history == ("build",)
    assert not any(node.devices for node in dag.nodes)
    assert dag.text("F layer[0]", "F loss") == (
        "  0 F layer[0]: x0 -> v2  # 0:build\n  4 F loss[0]: v5 x1 -> v6  # 0:build"
    )
    traced = len(calls)
    assert set(calls) == {ROWS}
    *_, last = piper.Strategy(STRATEGIES["1f1b"]).steps(captured.dag)
    assert {node.devices for node in last.nodes} == {(0,), (1,)}
    assert len(calls) == traced


def test_arguments_that_there_are_not() -> None:
    model, how = nn.Linear(2, 2), example()
    with pytest.raises(PiperError, match=r"capture\(\) has no argument 'targts': did you mean"):
        piper.capture(model, **how, targts=how["targets"])
    del how["inputs"]
    with pytest.raises(PiperError, match=r"compile\(\): missing a required argument: 'inputs'"):
        piper.compile(model, piper.Strategy(STRATEGIES["one device"]), **how)
