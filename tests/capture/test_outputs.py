"""Outputs beside the loss: the means of scalars, and the rows of outputs after an evaluation, equal
to those of the model itself under every strategy and launcher."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor, nn

import piper
from piper import CaptureError, annotate
from piper.ir.dag.build import build
from piper.ir.dag.values import Content
from piper.ir.plan.lowered import Lowered
from piper.ir.plan.plan import Plan
from piper.lower.forwards import lower_forwards
from piper.strategies import mesh
from piper.strategies.directives import Directive
from tests.hugging_face import FAMILIES
from tests.launch.test_torchrun import LIMIT, torchrun
from tests.plan_checker import PlanError, check
from tests.training import compiled, data_parallel, pipeline, sgd

ROWS, WIDTH, CLASSES = 12, 8, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with annotate("layer"):
                x = self.dropout(layer(x).tanh())
        with annotate("head"):
            return self.head(x)


def outputs(logits: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {
        "logits": logits,
        "right": logits.argmax(-1) == y,
        "labels": y,
        "entropy": -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean(),
    }


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(rows, WIDTH, generator=draw, dtype=torch.float64)
    return x, torch.randint(CLASSES, (rows,), generator=draw)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def program(strategy: Sequence[Directive], choose: Any = outputs, **options: Any) -> piper.Program:
    x, y = batch()
    given = {"outputs": choose, "optimizer": sgd, "loss": F.cross_entropy} | options
    loss = given.pop("loss")
    return compiled(net(), strategy, loss, [((x,), (y,))], **given)


def expected(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return outputs(model.eval()(x), y)


def assert_outputs(found: Any, wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, x in wanted.items():
        assert found[name].dtype == x.dtype
        torch.testing.assert_close(found[name], x, rtol=1e-12, atol=1e-12)


STRATEGIES = {
    "one device": data_parallel(1, 3),
    "data parallel": data_parallel(2, 3),
    "two stages of different sizes": pipeline([[0], [1, 2]], 2),
    "two stages, the last smaller": pipeline([[0, 1], [2]], 3),
}


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_an_evaluation_returns_what_the_model_does(name: str) -> None:
    made = program(STRATEGIES[name])
    x, y = batch()
    with piper.launch(made) as trainer:
        assert_outputs(trainer.evaluate(x, y).outputs, expected(net(), x, y))
        trainer.step(x, y)
        again = trainer.evaluate(x, y).outputs["logits"]
        model = net()
        model.load_state_dict(trainer.state_dict())
        torch.testing.assert_close(again, expected(model, x, y)["logits"], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_step_reports_numbers_only() -> None:
    def without_dropout(logits: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"largest": y.amax(), "mean": y.double().mean(), "rows": logits}

    x, y = batch()
    with piper.launch(program(pipeline([[0], [1, 2]], 2), without_dropout)) as trainer:
        found = trainer.step(x, y).outputs
        assert list(found) == ["largest", "mean"]
        assert float(found["mean"]) == pytest.approx(float(y.double().mean()), rel=1e-14)
        parts = [part.amax().double() for part in y.chunk(4)]  # the mean of the maxima of all parts
        assert float(found["largest"]) == pytest.approx(float(torch.stack(parts).mean()))
        assert trainer.step(x, y, report=False).outputs == {}


def test_rows_that_a_batch_was_filled_up_with_are_left_out() -> None:
    def counted(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = F.cross_entropy(logits, y, reduction="sum", ignore_index=-1)
        return total, (y >= 0).sum()

    x, y = batch(7)
    with piper.launch(program(data_parallel(2, 3), loss=counted)) as trainer:
        found = trainer.evaluate(x, y, pad=(0, -1)).outputs
        wanted = expected(net(), x, y)
        del wanted["entropy"]  # it would be over all rows, padding included
        assert_outputs(found, wanted)
        assert "entropy" in trainer.evaluate(*batch(), pad=(0, -1)).outputs


@pytest.mark.slow
def test_processes_give_the_same_bits() -> None:
    made = program(pipeline([[0], [1]], 3))
    found = []
    for on in ("virtual", "processes"):
        with piper.launch(made, on=on) as trainer:
            found.append(trainer.evaluate(*batch()).outputs)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.slow
def test_every_process_under_torchrun_has_all_rows(tmp_path: Path) -> None:
    program(pipeline([[0], [1]], 3)).save(tmp_path)
    with piper.launch(program(pipeline([[0], [1]], 3))) as trainer:
        wanted = trainer.evaluate(*batch()).outputs
    with torchrun(2, "outputs.py", tmp_path) as run:
        _, errors = run.communicate(timeout=LIMIT)
    assert run.returncode == 0, errors
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"tp": 2, "sequence_parallel": True}, id="tensor and sequence"),
        pytest.param({"pp": 2, "dp": 2}, id="pipeline"),
        pytest.param({"cp": 2}, id="context"),
    ],
)
@pytest.mark.cases(fast=0, slow=2)
def test_predictions_of_a_library_model(axes: dict[str, Any]) -> None:
    family = FAMILIES["Llama"]
    torch.manual_seed(0)
    model = family.make().double()
    given = family.batch()
    strategy = mesh(**axes, microbatches=2)
    made = piper.compile(
        model,
        strategy,
        inputs=given,
        tags=family.tags,
        outputs=lambda output: {"tokens": output.logits.argmax(-1), "logits": output.logits},
        optimizer=sgd,
    )
    with piper.launch(made) as trainer, torch.no_grad():
        found = trainer.evaluate(given).outputs
        wanted = model.eval()(**given).logits
    torch.testing.assert_close(found["logits"], wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(found["tokens"], wanted.argmax(-1))


def evaluation(made: piper.Program) -> Lowered:
    facts = made.evaluation_step.facts
    dag = made.strategy.apply(build(facts.whole))
    return lower_forwards(dag, facts.models, made.settings, made.lowered.dag)


def mutants(plan: Plan) -> Iterator[Plan]:
    for i, one in enumerate(plan.returned):
        before, after = plan.returned[:i], plan.returned[i + 1 :]
        yield replace(plan, returned=(*before, *after))
        yield replace(plan, returned=(*before, one, one, *after))
        for wrong in (
            one._replace(value=one.value + 1),
            one._replace(microbatch=one.microbatch + 1),
            one._replace(rows=one.rows._replace(devices=(9, *one.rows.devices[1:]))),
        ):
            yield replace(plan, returned=(*before, wrong, *after))
    for pc, x in enumerate(plan.instructions):
        if x.content is Content.OUTPUT and x.reads:
            less = structs.replace(x, reads=x.reads[1:])
            other = structs.replace(x, weights=(1.0,) * len(x.weights))
            for wrong_x in (less, other):
                rows = (*plan.instructions[:pc], wrong_x, *plan.instructions[pc + 1 :])
                yield replace(plan, instructions=rows)


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("name", ["data parallel", "two stages of different sizes"])
def test_plans_say_what_is_returned(name: str) -> None:
    made = program(STRATEGIES[name])
    found = evaluation(made)
    assert found.plans == made.evaluation_step.plans
    assert all(Plan.parse(str(plan)) == plan for plan in found.plans)
    models = made.evaluation_step.facts.models
    check(found.dag, found.plans, models=models)
    memory = made.lowered.memory
    check(made.lowered.dag, made.plans, memory, models=made.models, optimizer_bytes=1)
    tried = 0
    for c, plan in enumerate(found.plans):
        for mutant in mutants(plan):
            tried += 1
            plans = (*found.plans[:c], mutant, *found.plans[c + 1 :])
            with pytest.raises(PlanError):
                check(found.dag, plans, models=models)
    assert tried > 20


def test_a_program_keeps_its_outputs_in_a_file(tmp_path: Path) -> None:
    program(data_parallel(2, 3)).save(tmp_path)
    loaded = piper.Program.load(tmp_path, source=piper.Source(net()))
    x, y = batch()
    with piper.launch(loaded) as trainer:
        assert_outputs(trainer.evaluate(x, y).outputs, expected(net(), x, y))


@pytest.mark.parametrize(
    ("choose", "says"),
    [
        (lambda o, y: o, "outputs= returns a tensor: it must return a dict of tensors by name"),
        (lambda o, y: {"n": 3}, "outputs= returns an int under the name 'n'"),
        (lambda o, y: {"t": o.T}, "the output 't' has shape .5, 2., and a microbatch on one dev"),
        (lambda o, y: {"s": o.T @ o}, "the output 's' has shape .5, 5., and a microbatch on one"),
        (lambda o, y: {"k": (o.T @ o)[:2]}, "the output 'k' does not have the rows of the batch"),
    ],
)
def test_other_outputs_are_refused(choose: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        program(data_parallel(2, 3), choose)
