"""``fit`` and ``iterate``: the batches they take, their warnings, and their final saves."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import piper
from piper import PiperError, PiperWarning
from piper.launch.loop.fit_summary import Ended, FitSummary
from piper.launch.trainer.step_result import StepResult
from tests.scripts import resumed
from tests.scripts.resumed import ROWS, WIDTH, batch

ROOT = Path(__file__).parents[2]
BATCHES = [batch(step) for step in range(4)]
DATA = TensorDataset(*(torch.cat(x) for x in zip(*BATCHES, strict=True)))


@functools.cache
def program(**options: Any) -> piper.Program:
    return resumed.compiled(**options)


@functools.cache
def whole(steps: int) -> list[float]:
    """The losses of passes over ``BATCHES``, by calls of ``step``."""
    with piper.launch(program()) as trainer:
        return [float(trainer.step(*BATCHES[i % len(BATCHES)])) for i in range(steps)]


@pytest.fixture
def trainer() -> Iterator[piper.Trainer]:
    with piper.launch(program()) as found:
        yield found


class Heard:
    """A callback that records the losses by step."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_step(self, step: int, result: StepResult) -> None:
        self.losses[step] = float(result)

    def on_end(self) -> None: ...


@contextlib.contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PiperWarning)
        yield


# batches


def test_fit_trains_and_says_what_it_did(trainer: piper.Trainer) -> None:
    with silent():
        summary = trainer.fit(BATCHES)
    assert trainer.steps == summary.steps == summary.last_step == 4
    assert summary.loss == whole(4)[-1]
    assert summary.mean_loss == pytest.approx(sum(whole(4)) / 4)
    assert (summary.resumed_from, summary.ended) == (None, Ended.BATCHES)
    assert re.fullmatch(
        r"4 steps \(1 epoch\) in .* m?s, [\d,]+ tokens/s, to step 4: loss first \d\.\d{4}, "
        r"best \d\.\d{4} \(step \d\), last \d\.\d{4}, mean \d\.\d{4}; the batches ended",
        str(summary),
    )


def test_an_iterator_that_nobody_reads_says_so(trainer: piper.Trainer) -> None:
    with pytest.warns(PiperWarning, match=r"trainer\.iterate\(\.\.\.\) was never read") as caught:
        trainer.iterate(BATCHES)
    assert caught[0].filename == __file__
    with (
        pytest.warns(PiperWarning, match="so it has trained nothing"),
        piper.launch(program()) as t,
    ):
        held = t.iterate(BATCHES)
    with silent():
        del held
    assert trainer.steps == 0


@pytest.mark.parametrize(
    "batches",
    [
        BATCHES,
        DataLoader(TensorDataset(*(torch.cat(x) for x in zip(*BATCHES, strict=True))), ROWS),
        lambda: iter(BATCHES),
        lambda step: BATCHES[step % 4],
    ],
    ids=["a list", "a loader", "a function that yields", "a function of the step"],
)
def test_more_steps_than_batches_are_several_passes(batches: Any, trainer: piper.Trainer) -> None:
    heard = Heard()
    with silent():
        summary = trainer.fit(batches, steps=6, callbacks=[heard])
    assert list(heard.losses.values()) == whole(6)
    assert (summary.steps, summary.ended) == (6, Ended.STEPS)


def test_an_iterator_that_ends_early_is_a_warning(trainer: piper.Trainer) -> None:
    rows = iter(BATCHES)
    with pytest.warns(PiperWarning, match="the batches ended after 4 of 6 steps, and cannot be"):
        assert trainer.fit(rows, steps=6).ended is Ended.BATCHES
    with pytest.raises(PiperError, match="no batch to train on: the iterator has none left; a gen"):
        trainer.fit(rows, steps=6)


def needs_two(step: int, seed: int) -> Any: ...


def yields(step: int) -> Iterator[Any]:
    yield from BATCHES


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (needs_two, "batches is needs_two, a function of several arguments"),
        (yields, "batches is a function that yields, yields, and takes arguments"),
        (lambda: 3, "without arguments that returned an int"),
        (3, "batches is an int: give an iterable"),
    ],
)
def test_what_gives_no_batches(batches: Any, words: str, trainer: piper.Trainer) -> None:
    with pytest.raises(PiperError, match=words):
        trainer.fit(batches)


def test_a_tuple_is_a_batch_and_a_loader_is_many(trainer: piper.Trainer) -> None:
    assert float(trainer.step(BATCHES[0])) == whole(1)[0]
    assert float(trainer.evaluate(list(BATCHES[1]))) == float(trainer.evaluate(*BATCHES[1]))
    for many in (iter(BATCHES), BATCHES, DataLoader(DATA, ROWS), DataLoader(DATA, 3)):
        evaluated = [float(trainer.evaluate(*batch)) for batch in BATCHES]
        assert float(trainer.evaluate(many)) == pytest.approx(sum(evaluated) / 4)
    with pytest.raises(PiperError, match=r"a list gives many: trainer\.fit\(batches\) trains"):
        trainer.step(BATCHES)
    with pytest.raises(PiperError, match=r"DataLoader gives many: trainer\.fit\(batches\) trains"):
        trainer.step(DataLoader(TensorDataset(*BATCHES[0])))


# warnings, given once


def test_the_first_loss_that_is_not_finite_is_a_warning(trainer: piper.Trainer) -> None:
    bad = (BATCHES[0][0] * float("nan"), BATCHES[0][1])
    with pytest.warns(PiperWarning, match="the loss of step 2 is nan: look at its batch") as caught:
        trainer.fit([BATCHES[0], bad, bad])
    assert len(caught) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_losses_are_looked_at_without_waiting() -> None:
    bad = (BATCHES[0][0] * float("nan"), BATCHES[0][1])
    rows = [(x.cuda(), y.cuda()) for x, y in BATCHES]  # uploading CPU batches would wait
    with piper.launch(program(device="cuda")) as trainer:
        trainer.fit(rows)
        loop = trainer.iterate(rows)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in loop:
                pass
        finally:
            torch.cuda.set_sync_debug_mode("default")
        summary = loop.summary()
        assert summary.loss == pytest.approx(whole(8)[-1], rel=0.2)
        assert summary.mean_loss is not None
        with pytest.warns(PiperWarning, match="the loss of step 9 is nan"):
            trainer.fit([bad, bad])


def test_a_program_without_an_optimizer_says_so_once() -> None:
    made = program(optimizer=None, scheduler=None)
    with piper.launch(made) as trainer:
        with pytest.warns(PiperWarning, match="compiled without optimizer=: steps compute"):
            trainer.step(*BATCHES[0])
        with silent():
            trainer.fit(BATCHES)


# epochs


def shuffled(kind: str) -> Any:
    """A loader with another order in each pass."""
    data = TensorDataset(*(torch.cat(x) for x in zip(*BATCHES, strict=True)))
    if kind == "its own generator":
        seeded = torch.Generator().manual_seed(7)
        return DataLoader(data, ROWS, shuffle=True, generator=seeded)
    torch.manual_seed(7)
    return DataLoader(data, ROWS, shuffle=True)


def epochs(
    loader: Any,
    folder: Path,
    heard: Heard,
    last: int | None = None,
    steps: int | None = None,
    every: int | None = 2,
) -> list[int]:
    """Three epochs, as in a script; killed after step ``last``."""
    taken = []
    with piper.launch(program()) as trainer:
        for _ in range(3):
            loop = trainer.iterate(
                loader, steps=steps, checkpoint=folder, every=every, resume=True, callbacks=[heard]
            )
            for _ in loop:
                if trainer.steps == last:
                    kill(trainer)
                    return taken
            taken.append(loop.summary().steps)
    return taken


def kill(trainer: piper.Trainer) -> None:
    """Stop its loops from saving, as a kill would."""
    for loop in trainer._loops:
        loop._rounds._ending._saved = None


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("steps", [None, 6])
@pytest.mark.parametrize("kind", ["its own generator", "torch's generator"])
def test_epochs_resume_where_they_were(kind: str, steps: int | None, tmp_path: Path) -> None:
    """As many steps per epoch, and the same batches in the same order, wherever it was killed."""
    size = steps or 4
    expected = Heard()
    assert epochs(shuffled(kind), tmp_path / "whole", expected, None, steps) == [size] * 3
    assert list(expected.losses) == list(range(1, 3 * size + 1))
    for last, every in ((1, 2), (size + 1, 2), (size + 3, 2), (size + 2, None)):
        heard, folder = Heard(), tmp_path / f"{last} {every}"
        epochs(shuffled(kind), folder, heard, last, steps, every)
        saved = size if every is None else (last - 1) // every * every
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PiperWarning)
            taken = epochs(shuffled(kind), folder, heard, None, steps, every)
        assert sum(taken) == 3 * size - saved
        assert heard.losses == expected.losses


def test_a_summary_says_what_is_of_the_whole_run() -> None:
    found = FitSummary(
        steps=2, last_step=6, epochs=2, loss=None, first_loss=None, best_loss=None, mean_loss=None,
        evaluations=((6, 1.0),), best_evaluation=(6, 1.0), seconds=3.0, tokens_per_second=0.0,
        resumed_from=4, ended=Ended.EPOCHS,
    )  # fmt: skip
    assert str(found).startswith("2 steps (2 epochs of the run) in 3")
    assert "; 1 evaluation of the run: loss best 1.0000 (step 6), last 1.0000; " in str(found)


def test_a_summary_says_what_was_monitored() -> None:
    """The lowest loss and the lowest monitored number may be of different evaluations."""
    found = FitSummary(
        steps=3, last_step=3, epochs=0, loss=None, first_loss=None, best_loss=None, mean_loss=None,
        evaluations=((1, 0.3), (2, 0.1), (3, 0.2)), best_evaluation=(3, 0.2), seconds=3.0,
        tokens_per_second=0.0, resumed_from=None, ended=Ended.STEPS, monitored=(-0.5, -0.6, -0.9),
    )  # fmt: skip
    text = "loss best 0.1000 (step 2), last 0.2000, monitored best -0.9000 (step 3), last -0.9000;"
    assert text in str(found)


def test_later_calls_of_a_trainer_continue(tmp_path: Path, trainer: piper.Trainer) -> None:
    with silent():
        for epoch in range(3):
            summary = trainer.fit(BATCHES, checkpoint=tmp_path)
            assert (summary.steps, summary.last_step) == (4, 4 * (epoch + 1))
    with piper.launch(program()) as another:
        found = [another.fit(BATCHES, checkpoint=tmp_path, resume=True) for _ in range(2)]
        assert [x.ended for x in found] == [Ended.EARLIER] * 2
        with pytest.warns(PiperWarning, match="trains nothing: the run was resumed from step 12"):
            assert another.fit(BATCHES, checkpoint=tmp_path, resume=True).steps == 0
        assert another.fit(BATCHES, checkpoint=tmp_path, resume=True).last_step == 16
        assert str(found[0]).endswith(
            "resumed from step 12; it was done before the run was resumed"
        )


# saves


def stopped_by(error: BaseException) -> Callable[[piper.Trainer, Path], None]:
    def run(trainer: piper.Trainer, folder: Path) -> None:
        with contextlib.suppress(type(error)):
            for _ in trainer.iterate(BATCHES, checkpoint=folder):
                if trainer.steps == 3:
                    raise error

    return run


def broken(trainer: piper.Trainer, folder: Path) -> None:
    for _ in trainer.iterate(BATCHES, checkpoint=folder):
        if trainer.steps == 3:
            break


def held(trainer: piper.Trainer, folder: Path) -> None:
    loop = trainer.iterate(BATCHES, checkpoint=folder)
    for _ in range(3):
        next(loop)
    trainer.close()


def failing_callback(trainer: piper.Trainer, folder: Path) -> None:
    class Failing(Heard):
        def on_step(self, step: int, result: StepResult) -> None:
            if step == 3:
                raise OSError("no more paper")

    with pytest.raises(OSError, match="no more paper"):
        trainer.fit(BATCHES, checkpoint=folder, callbacks=[Failing()])


def failing_loader(trainer: piper.Trainer, folder: Path) -> None:
    def rows() -> Iterator[tuple[Tensor, Tensor]]:
        yield from BATCHES[:3]
        raise OSError("no more tapes")

    with pytest.raises(OSError, match="no more tapes"):
        trainer.fit(rows, checkpoint=folder)


def refused_batch(trainer: piper.Trainer, folder: Path) -> None:
    with pytest.raises(PiperError, match=r"inputs\[0\]"):
        trainer.fit([*BATCHES[:3], (torch.ones(ROWS, WIDTH + 1), BATCHES[0][1])], checkpoint=folder)


def ctrl_c(trainer: piper.Trainer, folder: Path) -> None:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)

    def rows() -> Iterator[tuple[Tensor, Tensor]]:
        yield from BATCHES[:3]
        os.kill(os.getpid(), signal.SIGINT)
        yield BATCHES[3]

    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(rows, checkpoint=folder)
    finally:
        signal.signal(signal.SIGINT, usual)


ENDS: dict[str, Callable[[piper.Trainer, Path], None]] = {
    "break": broken,
    "a held iterator": held,
    "an error": stopped_by(ValueError()),
    "SystemExit": stopped_by(SystemExit()),
    "a callback": failing_callback,
    "a loader": failing_loader,
    "a refused batch": refused_batch,
    "Ctrl-C": ctrl_c,
}


@pytest.mark.parametrize("end", ENDS)
def test_whatever_ends_it_the_last_step_is_saved(end: str, tmp_path: Path) -> None:
    with piper.launch(program()) as trainer:
        ENDS[end](trainer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    with piper.launch(program()) as trainer:
        heard = Heard()
        trainer.fit(BATCHES, checkpoint=tmp_path, resume=True, callbacks=[heard])
        assert heard.losses == {4: whole(4)[-1]}


def test_a_loop_that_was_left_saves_before_the_next_begins(tmp_path: Path) -> None:
    """Not after it, with the data position of the first loop."""
    with piper.launch(program()) as trainer:
        first = trainer.iterate(BATCHES, checkpoint=tmp_path)
        next(first)
        trainer.fit(BATCHES[1:], checkpoint=tmp_path)
        assert list(first) == []
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000001", "step-00000004"]
    with piper.launch(program()) as trainer:
        calls = [trainer.fit(BATCHES, checkpoint=tmp_path, resume=True) for _ in range(3)]
        assert [call.steps for call in calls] == [0, 0, 4]


def test_nothing_is_saved_before_the_first_step(tmp_path: Path, trainer: piper.Trainer) -> None:
    with pytest.raises(PiperError, match=r"inputs\[0\]"):
        trainer.fit([BATCHES[0][:1] * 2, BATCHES[0][::-1], (3, 4)], checkpoint=tmp_path / "run")
    assert trainer.steps == 2
    with piper.launch(program()) as another, pytest.raises(PiperError):
        another.fit([(3, 4)], checkpoint=tmp_path / "none")
    assert not list((tmp_path / "none").iterdir())


def test_nothing_is_saved_of_a_batch_that_was_skipped(tmp_path: Path) -> None:
    """With on_nan="stop" a resumed run gets the same batch again."""
    bad = (BATCHES[0][0] * float("nan"), BATCHES[0][1])
    with (
        piper.launch(program(on_nan="stop")) as trainer,
        pytest.warns(PiperWarning, match="the loss of step 2 is nan"),
        pytest.raises(PiperError, match="on_nan='stop'"),
    ):
        trainer.fit([BATCHES[0], bad], checkpoint=tmp_path, every=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_save_that_fails_at_a_break_is_an_error(tmp_path: Path, trainer: piper.Trainer) -> None:
    loop = trainer.iterate(BATCHES, checkpoint=tmp_path / "run")
    next(loop)
    (tmp_path / "run").rmdir()
    (tmp_path / "run").touch()
    with pytest.raises(PiperError, match="cannot be saved"):
        loop.close()


def test_a_background_save_ends_without_a_with_block(tmp_path: Path) -> None:
    trainer = piper.launch(program())
    trainer.save(tmp_path / "collected", background=True)
    del trainer
    gc.collect()
    assert (tmp_path / "collected" / "index.json").exists()
    (tmp_path / "lost").mkdir()
    trainer = piper.launch(program())
    trainer.save(tmp_path / "lost" / "state", background=True)
    (saving,) = (tmp_path / "lost").iterdir()
    saving.rename(tmp_path / "elsewhere")
    with pytest.warns(PiperWarning, match="the save to .*state in the background is not finished"):
        del trainer


@pytest.mark.slow
@pytest.mark.parametrize("on", ["virtual", "processes", "torchrun"])
def test_a_background_save_ends_with_the_interpreter(on: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, piper\n"
        "from tests.scripts.resumed import batch, compiled\n"
        f"trainer = piper.launch(compiled(), on={on!r})\n"
        "trainer.step(*batch(0))\n"
        f"trainer.save({str(tmp_path / 'state')!r}, background=True)\n"
    )
    start = [sys.executable]
    if on == "torchrun":
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*start, str(script)], env=environment, check=True, timeout=120)
    assert (tmp_path / "state" / "index.json").exists()


@pytest.mark.slow
def test_processes_leave_together(tmp_path: Path) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(ROOT / "tests" / "scripts" / "leaving.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*start, script, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.stdout.count("done") == 2, done.stderr
