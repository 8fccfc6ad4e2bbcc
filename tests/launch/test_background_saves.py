"""Background saves: the next step copies the state before the updates that change it, and the files
equal those of a plain save."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor, nn

import piper
from piper import PiperError, annotate
from piper.ir.plan.instructions import Verb
from piper.ir.plan.plan import Plan
from piper.state.device import snapshot
from piper.state.device.device_state import DeviceState
from tests.plan_checker import PlanError, check
from tests.state.test_checkpoints import STRATEGIES, Small, given, halving, made
from tests.state.test_optimizers import Counting
from tests.training import compiled, shared_captures


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def assert_saves_alike(program: piper.Program, folder: Path, on: str = "virtual") -> None:
    """Background and plain saves: before the first step, after it, and after the second."""
    with piper.launch(program, on=on) as trainer:
        for step in range(3):
            trainer.save(folder / f"plain{step}")
            trainer.save(folder / f"background{step}", background=True)
            trainer.step(*given(step))
    for step in range(3):
        expected = files(folder / f"plain{step}")
        assert files(folder / f"background{step}") == expected
        assert expected != files(folder / f"plain{(step + 1) % 3}")


# files


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("name", dict.fromkeys(["pp2-zero1", "zero3", "dp4", *STRATEGIES]))
def test_the_same_files_as_of_a_plain_save(name: str, tmp_path: Path) -> None:
    assert_saves_alike(made(name), tmp_path)


OPTIMIZERS: dict[str, Any] = {
    "fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True, amsgrad=True),
    "momentum": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "factored": functools.partial(torch.optim.Adafactor, lr=0.01),
}


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("optimizer", ["fused", "foreach", "momentum", "factored"])
def test_with_every_optimizer(optimizer: str, tmp_path: Path) -> None:
    options = {"optimizer": OPTIMIZERS[optimizer], "kind": Small}
    assert_saves_alike(made("pp2", **options), tmp_path)


@pytest.mark.slow
def test_with_an_optimizer_that_steps_once(tmp_path: Path) -> None:
    """The last update changes all buckets, and waits for all copies."""
    program = made("dp4", optimizer=Counting, scheduler=None)
    assert program.settings.optimizer.whole
    saving = program.saving
    check(saving.dag, saving.plans, models=saving.models, whole=True)
    assert_saves_alike(program, tmp_path)


def test_with_master_weights_and_a_schedule(tmp_path: Path) -> None:
    assert_saves_alike(made("zero1", kind=Small, precision="bf16", scheduler=halving), tmp_path)


class Normed(nn.Module):
    """Forwards change its buffers; its first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.layers[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            with annotate("layer"):
                x = torch.tanh(layer(x))
                x = self.norm(x) if i == 1 else x
        return x


@functools.cache
def normed(name: str) -> piper.Program:
    torch.manual_seed(0)
    batch = [((x,), (y,)) for x, y in [given(0)]]
    return compiled(
        Normed().double(), STRATEGIES[name], F.mse_loss, batch, optimizer=OPTIMIZERS["fused"]
    )


def test_buffers_that_forwards_change_and_frozen_parameters(tmp_path: Path) -> None:
    assert_saves_alike(normed("pp2"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pp2", "zero1"])
def test_processes_save_alike(name: str, tmp_path: Path) -> None:
    assert_saves_alike(
        normed("pp2") if name == "pp2" else made(name, kind=Small), tmp_path, "processes"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["pp2", "zero1", "zero3"])
def test_gpus_save_alike(name: str, tmp_path: Path) -> None:
    assert_saves_alike(made(name, kind=Small, device="cuda"), tmp_path)


# when the state is copied


def test_the_next_step_copies_and_no_update_comes_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    copy_piece, update = snapshot.copy_piece, DeviceState.update

    def noted_copy(into: Tensor, piece: Tensor) -> None:
        order.append("copy")
        copy_piece(into, piece)

    def noted_update(state: DeviceState, rows: Any) -> None:
        order.append("update")
        update(state, rows)

    monkeypatch.setattr(snapshot, "copy_piece", noted_copy)
    monkeypatch.setattr(DeviceState, "update", noted_update)
    with piper.launch(made("one", kind=Small)) as trainer:
        trainer.step(*given(0))
        order.clear()
        trainer.save(tmp_path / "saved", background=True)
        assert not order
        trainer.step(*given(1))
    assert order == ["copy"] * 24 + ["update"]  # 8 parameters, each with two AdamW states


def test_a_save_that_no_step_follows(tmp_path: Path) -> None:
    """Two saves in a row, an evaluation, other weights, another program, and the end."""
    with piper.launch(made("pp2", kind=Small)) as trainer:
        trainer.step(*given(0))
        trainer.save(tmp_path / "plain")
        trainer.save(tmp_path / "first", background=True)
        trainer.save(tmp_path / "second", background=True)
        trainer.evaluate(*given(0))
        trainer.step(*given(1))
        trainer.load(tmp_path / "plain")
        trainer.save(tmp_path / "third", background=True)
        trainer.load_state_dict({n: x + 1 for n, x in trainer.state_dict().items()})
        trainer.load(tmp_path / "plain")
        trainer.save(tmp_path / "fourth", background=True)
        trainer.profile(*given(1))
        trainer.load(tmp_path / "plain")
        trainer.save(tmp_path / "fifth", background=True)
        trainer.switch(made("zero1", kind=Small))
        trainer.step(*given(1))
        trainer.load(tmp_path / "plain")
        trainer.save(tmp_path / "moved")
        trainer.save(tmp_path / "last", background=True)
    expected = files(tmp_path / "plain")
    for name in ("first", "second", "third", "fourth", "fifth"):
        assert files(tmp_path / name) == expected, name
    assert files(tmp_path / "last") == files(tmp_path / "moved")


def test_what_no_update_changes_is_copied_before_other_weights_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of frozen parameters are still in flight when the step ends."""
    go, usual = threading.Event(), snapshot.Snapshot.result

    def held_up(one: snapshot.Snapshot) -> Any:
        go.wait()
        return usual(one)

    monkeypatch.setattr(snapshot.Snapshot, "result", held_up)
    with piper.launch(normed("pp2")) as trainer:
        trainer.step(*given(0))
        trainer.save(tmp_path / "plain")
        trainer.save(tmp_path / "saved", background=True)
        trainer.step(*given(1))
        trainer.load_state_dict({n: x + 1 for n, x in trainer.state_dict().items()})
        go.set()
    assert files(tmp_path / "saved") == files(tmp_path / "plain")


def test_a_step_that_fails_after_some_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State that was not copied by then has not changed either."""
    updates, usual = [0], DeviceState.update

    def failing(state: DeviceState, rows: Any) -> None:
        updates[0] += 1
        if updates[0] == 2:
            raise RuntimeError("lost")
        usual(state, rows)

    with piper.launch(made("dp4")) as trainer:
        trainer.step(*given(0))
        trainer.save(tmp_path / "plain")
        trainer.save(tmp_path / "saved", background=True)
        monkeypatch.setattr(DeviceState, "update", failing)
        with pytest.raises(PiperError, match="lost"):
            trainer.step(*given(1))
    assert files(tmp_path / "saved") == files(tmp_path / "plain")


def test_a_copy_that_fails_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(into: Tensor, piece: Tensor) -> None:
        raise MemoryError("no memory for a copy")

    with piper.launch(made("zero1", kind=Small)) as trainer:
        trainer.step(*given(0))
        trainer.save(tmp_path / "saved")
        before = files(tmp_path / "saved")
        with monkeypatch.context() as patched:
            patched.setattr(snapshot, "copy_piece", full)
            trainer.save(tmp_path / "saved", background=True)
            found = trainer.step(*given(1)).loss
            with pytest.raises(PiperError, match="no memory for a copy"):
                trainer.settle_save()
        assert files(tmp_path / "saved") == before
        trainer.load(tmp_path / "saved")
        assert torch.equal(trainer.step(*given(1)).loss, found)


def test_a_trainer_that_ends_with_an_error_finishes_its_save(tmp_path: Path) -> None:
    with contextlib.suppress(KeyError), piper.launch(made("zero1", kind=Small)) as trainer:
        trainer.save(tmp_path / "plain")
        trainer.save(tmp_path / "saved", background=True)
        raise KeyError
    assert files(tmp_path / "saved") == files(tmp_path / "plain")


def test_devices_that_are_closed_write_nothing(tmp_path: Path) -> None:
    trainer = piper.launch(made("zero1", kind=Small))
    group: Any = trainer._session.devices
    trainer.save(tmp_path / "saved", background=True)
    devices = list(group.local.devices)
    group.close(KeyError())
    for device in devices:
        assert device.writing.result().why.startswith("the trainer was closed")
    with pytest.warns(piper.PiperWarning, match="in the background is not finished: .*was closed"):
        trainer.__exit__(KeyError, KeyError(), None)
    assert not (tmp_path / "saved").exists()


# plans


def lines(plan: Plan) -> list[str]:
    """The copies and updates of a plan, and its first computation."""
    rows = str(plan).splitlines()
    first = next(row for row in rows if "] compute " in row)
    return [row for row in rows if "] copy " in row or "] update " in row or row is first]


def test_the_text_of_a_plan_that_copies() -> None:
    program = made("pp2", kind=Small)
    found = [line for plan in program.saving.plans for line in lines(plan)]
    assert "\n".join(found) == GOLDEN
    assert all(Plan.parse(str(plan)) == plan for plan in program.saving.plans)
    assert "copy bucket0" in program.saving.text()
    assert "copy" not in program.text()


GOLDEN = """\
   0 [compute] compute F layer[0] PP[0] MB[0]: s0 -> s2 s3 # 0 0F0 on 0
   7 [copy] copy bucket0:  ->  waits 4 # 28 bucket 0, 3456 bytes
  14 [compute] update bucket0: s13 s12 -> s17 frees s13 s12 waits 7! buckets 0 \
workspace 1024 # 24 bucket 0
   1 [copy] copy bucket1:  ->  # 29 bucket 1, 3456 bytes
   2 [compute] compute F layer[2] PP[1] MB[0]: s3 -> s4 s5 waits 0! # 2 2F0 on 1
  18 [compute] update bucket1: s14 s12 -> s24 frees s14 s12 waits 1! buckets 1 \
workspace 1024 # 25 bucket 1"""
"""Each copy precedes its bucket's update, which waits for the copy's end."""


def test_a_copy_begins_in_a_bubble() -> None:
    """The second stage copies while it waits for the first microbatch; the first stage copies once
    it has computed all that it can."""
    plans = made("pp2", kind=Small).saving.plans
    at = [[x.verb for x in plan.instructions].index(Verb.COPY) for plan in plans]
    computed = [
        sum(x.verb is Verb.COMPUTE for x in plan.instructions[:pc])
        for plan, pc in zip(plans, at, strict=True)
    ]
    assert computed == [4, 0]


@pytest.mark.cases(fast=5)
@pytest.mark.parametrize("name", STRATEGIES)
def test_plans_that_copy_are_right(name: str) -> None:
    program = made(name)
    saving = program.saving
    if "tp" not in name:  # the checker does not support redistributions
        check(saving.dag, saving.plans, models=saving.models)
    for plan, usual in zip(saving.plans, program.plans, strict=True):
        rest = [x for x in plan.instructions if x.verb is not Verb.COPY]
        assert [x.node for x in rest] == [x.node for x in usual.instructions]
    assert [m.peak for m in saving.memory] == [m.peak for m in program.memory]


def changed(plan: Plan, pc: int, **fields: Any) -> Plan:
    row = list(plan.instructions)
    row[pc] = structs.replace(row[pc], **fields)
    return replace(plan, instructions=tuple(row))


def test_the_checker_sees_copies_that_come_too_late() -> None:
    saving = made("dp4").saving
    (plan,) = saving.plans
    tried = 0
    for pc, x in enumerate(plan.instructions):
        if x.verb is not Verb.UPDATE:
            continue
        copies = [w for w in x.waits if plan.instructions[w].verb is Verb.COPY]
        assert copies
        without = {
            "waits": tuple(w for w in x.waits if w not in copies),
            "ends": tuple(w for w in x.ends if w not in copies),
        }
        if pc == max(i for i, y in enumerate(plan.instructions) if y.verb is Verb.UPDATE):
            tried += 1
            with pytest.raises(PlanError, match=r"before it is copied|does not wait for"):
                check(saving.dag, [changed(plan, pc, **without)], models=saving.models)
    assert tried
    (first, *_) = [i for i, x in enumerate(plan.instructions) if x.verb is Verb.COPY]
    other = changed(plan, first, verb=Verb.ADD)
    with pytest.raises(PlanError, match=r"lacks copy|has too much add"):
        check(saving.dag, [other], models=saving.models)


def test_a_simulated_step_shows_the_copies() -> None:
    saving = made("pp2", kind=Small).saving
    run = saving.simulate(piper.Cluster.of("H100", 2)).run()
    assert {event.kind for event in run.events if event.name.startswith("copy")} == {"copy"}
    assert sum(row.stream == "copy" for row in run.rows) == 2
