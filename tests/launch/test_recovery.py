"""Workers that die, fail or hang are replaced, and the losses are those of a run without faults."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import piper
from tests.launch.test_processes import Place, no_hang, place
from tests.scripts.cases import ON_TWO, TIED_ASKING, Case, batches, differences
from tests.scripts.fault_at import OF_WORKERS, Fault, chosen
from tests.training import pipeline, shared_captures

__all__ = ["place"]

STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


@functools.cache
def program(case: str) -> piper.Program:
    return ON_TWO[case].compile()


def trained(trainer: piper.Trainer, steps: int = STEPS) -> dict[str, Tensor]:
    """The losses of some steps, and the state after them."""
    given = itertools.cycle(batches())
    found = {f"loss {i}": trainer.step(*next(given)).loss for i in range(steps)}
    return found | trainer.state_dict()


@functools.cache
def undisturbed(case: str, steps: int = STEPS) -> dict[str, Tensor]:
    with piper.launch(program(case)) as trainer:
        return trained(trainer, steps)


class Disturbed:
    """Launches programs with a fault at an instruction."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._set = monkeypatch.setenv
        self._mark = folder / "happened"

    def at(
        self,
        device: int,
        step: int,
        pc: int,
        kind: Fault,
        *,
        once: bool = True,
        of: piper.Program | None = None,
        **options: Any,
    ) -> piper.Trainer:
        self._mark.unlink(missing_ok=True)
        self._set("FAULT_AT", chosen(device, step, pc, kind, str(self._mark) if once else ""))
        return piper.launch(
            of or program(CASE),
            on="processes",
            threads=1,
            imports=["tests.scripts.fault_at"],
            **{"restarts": 3, "stall": 2.0, **options},
        )


@pytest.fixture
def disturbed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Disturbed:
    return Disturbed(monkeypatch, tmp_path)


CASE = "stages, tied weights, dropout"


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("kind", OF_WORKERS)
@pytest.mark.filterwarnings("ignore::piper.PiperWarning")
def test_a_fault_in_a_step(kind: Fault, disturbed: Disturbed, place: Place) -> None:
    with no_hang(), disturbed.at(1, 3, 7, kind, mirror="1h") as trainer:
        assert not differences(trained(trainer), undisturbed(CASE))
    if kind is Fault.SLOW:
        assert not trainer.recoveries
    else:
        (recovery,) = trainer.recoveries
        assert recovery.repeated == (0 if kind in (Fault.RAISE, Fault.MEMORY) else 3)
        lost = kind in (Fault.KILL, Fault.STOP, Fault.EXIT)
        assert recovery.replaced == ((1,) if lost else ())
        assert recovery.seconds > 0
    place.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::piper.PiperWarning")
def test_a_restart_replaces_all(disturbed: Disturbed, place: Place) -> None:
    with no_hang(), disturbed.at(1, 2, 7, Fault.RAISE, recover="restart") as trainer:
        assert not differences(trained(trainer, 4), undisturbed(CASE, 4))
    (recovery,) = trainer.recoveries
    assert recovery.replaced == (0, 1)
    place.assert_nothing_left()


@pytest.mark.slow
def test_a_warning_says_what_happened(disturbed: Disturbed, place: Place) -> None:
    said = r"device 1 died at instruction 7 \(.*\): killed by SIGKILL; training continues \(2 left"
    with (
        no_hang(),
        disturbed.at(1, 0, 7, Fault.KILL) as trainer,
        pytest.warns(piper.PiperWarning, match=said),
    ):
        trainer.step(*batches()[0])
    place.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::piper.PiperWarning")
def test_what_fails_again_at_once_ends_the_run(disturbed: Disturbed, place: Place) -> None:
    trainer = disturbed.at(0, 2, 5, Fault.RAISE, once=False)
    with no_hang(), pytest.raises(piper.PiperError, match="told to fail"):
        trained(trainer)
    assert len(trainer.recoveries) == 1
    place.assert_nothing_left()


@pytest.mark.slow
def test_without_restarts_left_a_fault_ends_the_run(disturbed: Disturbed, place: Place) -> None:
    trainer = disturbed.at(0, 2, 5, Fault.KILL, once=False, restarts=0)
    with no_hang(), pytest.raises(piper.PiperError, match="killed by SIGKILL"):
        trained(trainer)
    assert not trainer.recoveries
    place.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::piper.PiperWarning")
def test_calls_since_the_copy_are_repeated(
    disturbed: Disturbed, place: Place, tmp_path: Path
) -> None:
    """Also a background save under way, and new weights."""
    weights = {name: x * 0.5 for name, x in undisturbed(CASE).items() if "." in name}

    def run(trainer: piper.Trainer, folder: Path) -> dict[str, Tensor]:
        found = {"first": trainer.step(*batches()[0]).loss}
        trainer.save(folder, background=True)
        found["second"] = trainer.step(*batches()[1]).loss
        trainer.load_state_dict(weights, strict=False)
        found["third"] = trainer.step(*batches()[0]).loss
        found["fourth"] = trainer.step(*batches()[1]).loss
        return found | trainer.state_dict()

    with piper.launch(program(CASE)) as trainer:
        expected = run(trainer, tmp_path / "expected")
    with no_hang(), disturbed.at(1, 2, 7, Fault.KILL, mirror="1h") as trainer:
        assert not differences(run(trainer, tmp_path / "saved"), expected)
    (recovery,) = trainer.recoveries
    assert recovery.repeated == 4
    for path in (tmp_path / "expected").iterdir():
        assert (tmp_path / "saved" / path.name).read_bytes() == path.read_bytes()
    place.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::piper.PiperWarning")
def test_a_copy_before_every_step(disturbed: Disturbed, place: Place) -> None:
    with no_hang(), disturbed.at(0, 4, 3, Fault.STOP, mirror=1e-9) as trainer:
        assert not differences(trained(trainer), undisturbed(CASE))
    (recovery,) = trainer.recoveries
    assert recovery.repeated <= 4
    place.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::piper.PiperWarning")
def test_a_fault_after_a_switch(disturbed: Disturbed, place: Place) -> None:
    """The state of the next program is copied before its first step."""
    other = Case(pipeline([[1], [0]], 2), TIED_ASKING).compile()
    with piper.launch(program(CASE)) as trainer:
        trained(trainer, 2)
        trainer.switch(other)
        expected = trained(trainer, 4)
    with no_hang(), disturbed.at(1, 4, 7, Fault.KILL) as trainer:
        trained(trainer, 2)
        trainer.switch(other)
        assert not differences(trained(trainer, 4), expected)
    assert len(trainer.recoveries) == 1
    place.assert_nothing_left()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::piper.PiperWarning")
@pytest.mark.parametrize("case", ["stages", CASE])
def test_a_kill_at_every_instruction(
    case: str, place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One in each step."""
    plans = [(d, len(program(case).plan_of(d).instructions)) for d in program(case).devices]
    kills = [(device, pc) for device, count in plans for pc in range(count)]
    faults = [
        chosen(device, i, pc, Fault.KILL, str(tmp_path / str(i)))
        for i, (device, pc) in enumerate(kills)
    ]
    monkeypatch.setenv("FAULT_AT", ";".join(faults))
    imports = ["tests.scripts.fault_at"]
    options = {"threads": 1, "imports": imports, "restarts": len(kills), "stall": 2.0}
    with (
        no_hang(30 * len(kills)),
        piper.launch(program(case), on="processes", **options) as trainer,
    ):
        assert not differences(trained(trainer, len(kills)), undisturbed(case, len(kills)))
        assert len(trainer.recoveries) == len(kills)
    seconds = [fault.seconds for fault in trainer.recoveries]
    print(f"{len(kills)}, median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s")
    place.assert_nothing_left()


@pytest.mark.parametrize("restarts", [-1, True, 1.5, "2"])
def test_restarts_that_are_no_count(restarts: object) -> None:
    with pytest.raises(piper.PiperError, match="must be a whole number, at least 0"):
        piper.launch(program(CASE), on="processes", restarts=restarts)


def test_an_unknown_way_to_recover() -> None:
    with pytest.raises(piper.PiperError, match="recover='retry' is unknown: one of replace"):
        piper.launch(program(CASE), on="processes", restarts=1, recover="retry")
