"""Whatever call a fault interrupts, and whatever the state consists of: training continues as if
there had been no fault."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import piper
from piper.launch.device.device import WorkerDevice
from piper.program.rerouted import rerouted
from tests.launch.test_processes import Place, no_hang, place
from tests.launch.test_recovery import CASE
from tests.launch.test_recovery import program as pair
from tests.scripts.cases import Net, batches, differences, mean_loss
from tests.scripts.fault_at import Fault, chosen, in_call
from tests.training import shared_captures

__all__ = ["place"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::piper.PiperWarning"),
]
Results = dict[str, Tensor]


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


class Counting(Net):
    """A model with state of all kinds beside its parameters."""

    def __init__(self) -> None:
        super().__init__(tied=True, dropout=0.2)
        width = self.head.in_features
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("seen", torch.zeros(width), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        with piper.annotate("embed"):
            x = self.embed(tokens)
        for layer in self.layers:
            with piper.annotate("layer"):
                x = x + self.dropout(torch.tanh(layer(x)))
        with piper.annotate("head"):
            if self.training:
                self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
                self.seen.add_(1.0)
            return self.head(x - 0.1 * self.mean + 0.01 * self.seen)


# workers import what these are made of: it must not be a module of tests
adamw = functools.partial(torch.optim.AdamW, lr=0.01)
sgd = functools.partial(torch.optim.SGD, lr=0.2, momentum=0.9)
stepped = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)


@functools.cache
def counting(model: type[Net] = Counting, **mesh: Any) -> piper.Program:
    torch.manual_seed(0)
    (x, y), _ = batches()
    strategy = piper.strategies.mesh(**mesh or {"pp": 2, "microbatches": 4, "schedule": "zb-h1"})
    optimizer = piper.EMA(adamw, decay=0.9)
    return piper.compile(
        model(), strategy, inputs=(x,), targets=(y,), loss=mean_loss, optimizer=optimizer,
        scheduler=stepped, clip_norm=0.5, on_nan="skip",
    )  # fmt: skip


@functools.cache
def replicas(**mesh: Any) -> piper.Program:
    torch.manual_seed(0)
    (x, y), _ = batches()
    return piper.compile(
        Net(tied=True, dropout=0.2).double(),
        piper.strategies.mesh(**mesh),
        inputs=(x,),
        targets=(y,),
        loss=mean_loss,
        optimizer=sgd,
        scheduler=stepped,
        clip_norm=0.5,
        outputs=lambda logits, targets: {"logits": logits, "mean": logits.mean()},
    )


def steps(trainer: piper.Trainer, count: int) -> Results:
    given = itertools.islice(itertools.cycle(batches()), trainer.steps, trainer.steps + count)
    return {f"loss {trainer.steps}": trainer.step(*batch).loss for batch in given}


Run = Callable[[piper.Trainer, Path], Results]


def launched(program: piper.Program, **options: Any) -> piper.Trainer:
    return piper.launch(
        program, on="processes", threads=1, stall=2.0, imports=["tests.scripts.fault_at"],
        **{"restarts": 3, "mirror": "1h", **options},
    )  # fmt: skip


def assert_recovers(
    program: piper.Program,
    run: Run,
    folder: Path,
    place: Place,
    faults: int | None = 1,
    **options: Any,
) -> None:
    """The results of ``run`` with the faults of the environment are those without."""
    with piper.launch(program) as trainer:
        expected = run(trainer, folder / "expected")
    with no_hang(60 * (1 + faults)), launched(program, **options) as trainer:
        found = run(trainer, folder / "found")
    assert len(trainer.recoveries) >= faults
    if options.get("recover") == "reroute":
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            assert torch.allclose(found[name], x, rtol=1e-11, atol=1e-13), name
    else:
        assert not differences(found, expected)
    place.assert_nothing_left()


@pytest.mark.parametrize("recover", ["replace", "restart"])
@pytest.mark.parametrize("mirror", ["1h", 1e-9])
def test_state_of_all_kinds(
    recover: str, mirror: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Place
) -> None:
    """Averages, a scheduler, clipping, buffers, also one that checkpoints leave out; a fault in a
    step, and one while the weights are their averages."""
    last = len(counting().plan_of(1).instructions) - 1
    faults = [(1, 2, last), (0, 4, 3)]
    texts = [chosen(*at, Fault.KILL, str(tmp_path / f"{i}")) for i, at in enumerate(faults)]
    monkeypatch.setenv("FAULT_AT", ";".join(texts))

    def run(trainer: piper.Trainer, _: Path) -> Results:
        found = steps(trainer, 4)
        with trainer.averaged():
            found["averaged"] = trainer.evaluate(*batches()[0]).loss
            found |= {f"averaged {k}": x for k, x in trainer.state_dict().items()}
        return found | steps(trainer, 3) | trainer.state_dict()

    assert_recovers(counting(), run, tmp_path, place, 2, recover=recover, mirror=mirror)


@pytest.mark.parametrize("call", ["evaluate", "save"])
def test_a_fault_after_a_switch(
    call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Place
) -> None:
    """Before its first step: the state is not the first one, and not that of another program."""
    monkeypatch.setenv("FAULT_AT", chosen(0, 2, 3, Fault.KILL, str(tmp_path / "happened")))
    meshes: list[dict[str, Any]] = [{"dp": 2}, {"pp": 2, "microbatches": 2}]
    one, other = (replicas(**mesh) for mesh in meshes)

    def run(trainer: piper.Trainer, folder: Path) -> Results:
        found = steps(trainer, 2)
        trainer.switch(other)
        if call == "evaluate":
            found["evaluated"] = trainer.evaluate(*batches()[0]).loss
        else:
            trainer.save(folder, background=True)
        return found | steps(trainer, 2) | trainer.state_dict()

    assert_recovers(one, run, tmp_path, place)


@pytest.mark.parametrize("recover", ["replace", "reroute"])
def test_a_background_save_before_the_first_step(
    recover: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Place
) -> None:
    monkeypatch.setenv("FAULT_AT", chosen(1, 1, 2, Fault.KILL, str(tmp_path / "happened")))

    def run(trainer: piper.Trainer, folder: Path) -> Results:
        trainer.save(folder, background=True)
        return steps(trainer, 3) | trainer.state_dict()

    assert_recovers(replicas(dp=2), run, tmp_path, place, recover=recover)


def test_a_checkpoint_that_is_removed_after_it_was_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Place
) -> None:
    monkeypatch.setenv("FAULT_AT", chosen(1, 3, 2, Fault.KILL, str(tmp_path / "happened")))

    def run(trainer: piper.Trainer, folder: Path) -> Results:
        found = steps(trainer, 2)
        trainer.save(folder)
        trainer.load(folder)
        for path in folder.iterdir():
            path.unlink()
        return found | steps(trainer, 3) | trainer.state_dict()

    assert_recovers(pair(CASE), run, tmp_path, place)


CALLS = [
    WorkerDevice.write_copy, WorkerDevice.write_part, WorkerDevice.begin_part,
    WorkerDevice.written_part, WorkerDevice.refusals, WorkerDevice.read_part,
    WorkerDevice.export, WorkerDevice.restore, WorkerDevice.give, WorkerDevice.prepare,
    WorkerDevice.finish, WorkerDevice.take,
]  # fmt: skip


def all_calls(trainer: piper.Trainer, folder: Path) -> Results:
    """Makes every call that has to do with state."""
    found = steps(trainer, 2)
    trainer.save(folder / "saved")
    found |= steps(trainer, 1)
    trainer.save(folder / "later", background=True)
    found |= steps(trainer, 1)
    trainer.settle_save()
    trainer.load(folder / "saved")
    found |= {f"loaded {k}": x for k, x in trainer.state_dict().items()}
    trainer.load_state_dict({k: x * 0.5 for k, x in trainer.state_dict().items()})
    first = trainer.program
    trainer.switch(replicas(pp=2, microbatches=2))
    found["evaluated"] = trainer.evaluate(*batches()[0]).loss
    found |= steps(trainer, 2)
    trainer.load(folder / "later")
    trainer.switch(first)
    return found | trainer.state_dict()


@pytest.mark.parametrize("recover", ["replace", "reroute"])
def test_a_fault_in_every_call(
    recover: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Place
) -> None:
    """Before and after the call's effect on one of two devices."""
    faults = [(method.__name__, when) for method in CALLS for when in ("before", "after")]
    texts = [
        in_call(
            1, *fault, Fault.KILL, str(tmp_path / f"{i}"), str(tmp_path / "found" / f"armed-{i}")
        )
        for i, fault in enumerate(faults)
    ]
    monkeypatch.setenv("FAULT_IN", ";".join(texts))

    def run(trainer: piper.Trainer, folder: Path) -> Results:
        trainer.save(folder / "first")
        found: Results = {}
        for i, fault in enumerate(faults):
            (folder / f"armed-{i}").touch()
            found |= {f"{k}, {fault}": x for k, x in all_calls(trainer, folder).items()}
            trainer.load(folder / "first")
        return found

    options = {"recover": recover, "restarts": len(faults)}
    assert_recovers(replicas(dp=2), run, tmp_path, place, len(faults), **options)


@pytest.mark.parametrize("recover", ["restart", "replace", "reroute"])
def test_a_second_fault_in_the_recovery(
    recover: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Place
) -> None:
    """Also where the first one leaves the state in memory."""
    program = replicas(dp=3)
    last = len(program.plan_of(2).instructions) - 1  # when the others have changed the state
    places = {"load": last, "read_part": last}
    if recover != "restart":
        places |= dict.fromkeys(["give_kept", "prepare", "finish", "take"], 4)
    pairs = [*itertools.product(places, (0, 1), ("before", "after"))]
    first, second = [], []
    for i, (method, device, when) in enumerate(pairs):
        mark = str(tmp_path / f"first-{i}")
        first.append(chosen(2, 3 * i + 1, places[method], Fault.KILL, mark))
        second.append(in_call(device, method, when, Fault.KILL, f"{mark}-then", mark))
    monkeypatch.setenv("FAULT_AT", ";".join(first))
    monkeypatch.setenv("FAULT_IN", ";".join(second))

    def run(trainer: piper.Trainer, _: Path) -> Results:
        found: Results = {}
        for _ in pairs:
            found |= steps(trainer, 3)
            if trainer.recoveries and trainer.recoveries[-1].lost:
                trainer.switch(trainer.program)  # the lost devices work again
        return found | trainer.state_dict()

    options = {"recover": recover, "restarts": 3 * len(pairs), "mirror": 1e-9}
    assert_recovers(program, run, tmp_path, place, len(pairs), **options)
    assert len([*tmp_path.glob("first-*-then")]) == len(pairs)


@pytest.mark.parametrize("recover", ["replace", "reroute"])
def test_a_second_fault_while_calls_are_repeated(
    recover: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Place
) -> None:
    """The devices that are left then hold the state of an earlier step."""
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    program = replicas(dp=3)
    last = len(program.plan_of(0).instructions) - 1  # when the others have changed the state
    faults = [chosen(0, 3, last, Fault.KILL, first), chosen(1, 1, 4, Fault.KILL, second, first)]
    monkeypatch.setenv("FAULT_AT", ";".join(faults))

    def run(trainer: piper.Trainer, _: Path) -> Results:
        return steps(trainer, 5) | trainer.state_dict()

    assert_recovers(program, run, tmp_path, place, recover=recover)
    assert Path(second).exists()


def test_a_replaced_replica_gets_the_state_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Place
) -> None:
    """Also while the weights are their averages."""
    places = [(1, 2, 4), (0, 4, 4)]
    texts = [chosen(*at, Fault.KILL, str(tmp_path / f"{i}")) for i, at in enumerate(places)]
    monkeypatch.setenv("FAULT_AT", ";".join(texts))
    recoveries = []

    def run(trainer: piper.Trainer, _: Path) -> Results:
        found = steps(trainer, 4)
        with trainer.averaged():
            found["averaged"] = trainer.evaluate(*batches()[0]).loss
            found |= {f"averaged {k}": x for k, x in trainer.state_dict().items()}
        recoveries.extend(trainer.recoveries)
        return found | steps(trainer, 2) | trainer.state_dict()

    assert_recovers(counting(Net, dp=2), run, tmp_path, place, 2)
    assert [(one.replaced, one.repeated) for one in recoveries] == [((1,), 0), ((0,), 0)]


@pytest.mark.thorough
def test_a_replica_lost_at_every_instruction(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Place
) -> None:
    """The first replica, whose place the last one takes; before the next loss it works again."""
    program = replicas(pp=2, dp=2, microbatches=2)
    first = rerouted(program).replicas[0]
    kills = [(d, pc) for d in first for pc in range(len(program.plan_of(d).instructions))]
    faults = [
        chosen(device, i, pc, Fault.KILL, str(tmp_path / f"{i}"))
        for i, (device, pc) in enumerate(kills)
    ]
    monkeypatch.setenv("FAULT_AT", ";".join(faults))

    def run(trainer: piper.Trainer, _: Path) -> Results:
        found: Results = {}
        for _ in kills:
            found |= steps(trainer, 1)
            trainer.switch(program)
        return found | trainer.state_dict()

    options = {"recover": "reroute", "restarts": len(kills)}
    assert_recovers(program, run, tmp_path, place, len(kills), **options)


def test_results_without_a_replica(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Place
) -> None:
    """An evaluation returns the rows in the order of the batch; a profile is of what ran."""
    monkeypatch.setenv("FAULT_AT", chosen(0, 1, 2, Fault.KILL, str(tmp_path / "happened")))
    profiles = []

    def run(trainer: piper.Trainer, _: Path) -> Results:
        found = steps(trainer, 2)
        evaluated = trainer.evaluate(*batches()[0])
        profiles.append(trainer.profile(*batches()[0]))
        norms = {k: torch.tensor(x.norm) for k, x in trainer.gradients(*batches()[1]).items()}
        return found | {"evaluated": evaluated.loss, **evaluated.outputs, **norms}

    program = replicas(dp=3, microbatches=2)
    assert_recovers(program, run, tmp_path, place, recover="reroute")
    _, profile = profiles
    assert list(profile.busy) == [*profile.program.devices] == [0, 1]
