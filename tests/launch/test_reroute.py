"""After the loss of a data-parallel replica the others train on its rows: the losses are those of a
run without faults, up to the order of sums."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import piper
from tests.launch.test_processes import Place, no_hang, place
from tests.launch.test_recovery import Disturbed, disturbed
from tests.scripts.cases import Net, batches, mean_loss, sum_and_count
from tests.scripts.fault_at import Fault, chosen
from tests.training import sgd, shared_captures

__all__ = ["disturbed", "place"]

STEPS = 5
MESHES = {
    "replicas": {"dp": 3, "microbatches": 2},
    "stages of replicas, ZeRO-1": {"pp": 2, "dp": 2, "microbatches": 2, "zero": 1},
    "stages of replicas": {"pp": 2, "dp": 2, "microbatches": 4, "schedule": "zb-h1"},
    "experts": {"dp": 4, "ep": 2, "zero": 3},
}


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


@functools.cache
def program(name: str) -> piper.Program:
    torch.manual_seed(0)
    model = Net(tied=True, dropout=0.2)
    (x, y), _ = batches()
    strategy = piper.strategies.mesh(**MESHES[name])
    loss = sum_and_count if name == "replicas" else mean_loss
    return piper.compile(
        model, strategy, inputs=(x,), targets=(y,), loss=loss, optimizer=sgd, clip_norm=1.0
    )


def trained(trainer: piper.Trainer, folder: Path) -> dict[str, Tensor]:
    """The losses, also of an evaluation, and the weights, also from a checkpoint written in the
    background during the last step."""
    given = itertools.cycle(batches())
    found = {f"loss {i}": trainer.step(*next(given)).loss for i in range(STEPS)}
    found["evaluated"] = trainer.evaluate(*batches()[0]).loss
    trainer.save(folder / "saved", background=True)
    found["last loss"] = trainer.step(*next(given)).loss
    weights = trainer.state_dict()
    trainer.load(folder / "saved")
    return found | weights | {f"saved {k}": x for k, x in trainer.state_dict().items()}


@functools.cache
def undisturbed(name: str, folder: Path) -> dict[str, Tensor]:
    with piper.launch(program(name)) as trainer:
        return trained(trainer, folder)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert float((found[name] - x).abs().max() / x.abs().max()) < 1e-6, name


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("kind", [Fault.KILL, Fault.STOP, Fault.EXIT])
@pytest.mark.parametrize("device", [1, 0, 2])
@pytest.mark.parametrize("name", list(MESHES))
@pytest.mark.filterwarnings("ignore::piper.PiperWarning")
def test_a_lost_replica(
    name: str, device: int, kind: Fault, disturbed: Disturbed, place: Place, tmp_path: Path
) -> None:
    of = program(name)
    with no_hang(), disturbed.at(device, 2, 4, kind, of=of, recover="reroute") as trainer:
        assert_close(trained(trainer, tmp_path / "disturbed"), undisturbed(name, tmp_path))
    (recovery,) = trainer.recoveries
    assert device in recovery.lost
    assert not recovery.replaced
    place.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::piper.PiperWarning")
def test_the_state_stays_in_memory(disturbed: Disturbed, place: Place) -> None:
    """A fault before the first update repeats nothing."""
    of = program("stages of replicas")
    with no_hang(), disturbed.at(3, 2, 4, Fault.KILL, of=of, recover="reroute") as trainer:
        for i in range(4):
            trainer.step(*batches()[i % 2])
    (recovery,) = trainer.recoveries
    assert (recovery.lost, recovery.repeated, recovery.replaced) == ((1, 3), 0, ())
    place.assert_nothing_left()


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", list(MESHES))
@pytest.mark.filterwarnings("ignore::piper.PiperWarning")
def test_lost_devices_return(
    name: str, place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A switch to the program gives it all of its devices again, and it can lose others."""
    losses = itertools.product((0, 1, 2), (Fault.KILL, Fault.STOP))
    faults = [
        chosen(device, 2 * i, 4, kind, str(tmp_path / f"{i}"))
        for i, (device, kind) in enumerate(losses)
    ]
    monkeypatch.setenv("FAULT_AT", ";".join(faults))
    given = list(itertools.islice(itertools.cycle(batches()), 2 * len(faults)))

    def run(trainer: piper.Trainer) -> dict[str, Tensor]:
        found = {}
        for i, batch in enumerate(given):
            found[f"loss {i}"] = trainer.step(*batch).loss
            if i % 2:
                trainer.switch(trainer.program)
        return found | trainer.state_dict()

    with piper.launch(program(name)) as trainer:
        expected = run(trainer)
    options = {"threads": 1, "recover": "reroute", "restarts": len(faults), "stall": 2.0}
    imports = ["tests.scripts.fault_at"]
    with (
        no_hang(30 * len(faults)),
        piper.launch(program(name), on="processes", imports=imports, **options) as trainer,
    ):
        assert_close(run(trainer), expected)
    assert len(trainer.recoveries) == len(faults)
    assert all(recovery.lost for recovery in trainer.recoveries)
    place.assert_nothing_left()


def test_what_cannot_be_rerouted() -> None:
    (x, y), _ = batches()
    one = piper.compile(Net(), piper.strategies.mesh(), inputs=(x,), targets=(y,), loss=mean_loss)
    with pytest.raises(piper.PiperError, match=r"there is only one, or each .*\. Use recover"):
        piper.launch(one, on="processes", recover="reroute", restarts=1)
    with pytest.raises(piper.PiperError, match="say how often"):
        piper.launch(one, on="processes", recover="reroute")
