"""``piper train``: trains a job under a strategy."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from piper.base.arguments import Where
from piper.base.errors import PiperError
from piper.base.units import nbytes_of
from piper.cli.options import (
    AsJson,
    DeviceName,
    JobSettings,
    Limit,
    MeshSpec,
    On,
    Script,
    StrategyFile,
)
from piper.cli.output import Output

if TYPE_CHECKING:
    from piper.launch.trainer.data_position import AnyBatch
    from piper.launch.trainer.step_result import StepResult
    from piper.launch.trainer.trainer import Trainer
    from piper.program.job import Batches, Job


def train(
    script: Script,
    strategy: StrategyFile = None,
    mesh: MeshSpec = None,
    on: On = Where.VIRTUAL,
    settings: JobSettings = None,
    device: DeviceName = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to train; by default, until the batches end.")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Passes over the batches; with --steps, whichever ends first."),
    ] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(min=1, help="Steps between evaluations; by default, once per epoch."),
    ] = None,
    load: Annotated[
        Path | None, typer.Option(help="Resume from this checkpoint, a folder.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write checkpoints to this folder.")] = None,
    every: Annotated[
        int, typer.Option(min=1, help="Steps between printed lines, and between checkpoints.")
    ] = 10,
    memory_limit: Limit = None,
    as_json: AsJson = False,
) -> None:
    """Train a job under a strategy.

    With --save, a checkpoint is written every --every steps and at the end. --load resumes from
    it, under the same or another strategy, with the next batches.

    Example: piper train train.py --on processes --set lr=1e-4 --steps 100 --save state
    """
    from piper.cli.scripts import job_in, strategy_of
    from piper.launch.launch import launch

    output = Output(as_json)
    with output.guarded():
        chosen = strategy_of(strategy, mesh)
        limit = None if memory_limit is None else nbytes_of("--memory-limit", memory_limit)
        job = job_in(script, settings or ())
        job = job if device is None else replace(job, device=device)
        program = job.compile(chosen, memory_limit=limit)
        trainer = launch(program, on=on.value)
        with trainer:
            if load is not None:
                trainer.load(load)
                output.say(f"resuming after step {trainer.steps}")
            batches = _batches(job, trainer, steps, epochs)
            if evaluate_every is not None and job.held_out is None:
                raise PiperError("--evaluate-every needs held-out batches: Job(held_out=...)")
            last = None if steps is None else trainer.steps + steps
            for result in trainer.iterate(
                batches,
                steps=steps,
                epochs=epochs,
                evaluate=job.held_out,
                evaluate_every=evaluate_every,
                callbacks=[_Evaluations(output)],
                progress=not as_json and sys.stderr.isatty(),
            ):
                _report(output, trainer, result, every, last=trainer.steps == last)
                if save is not None and trainer.steps % every == 0:
                    trainer.save(save)
            if save is not None:
                trainer.save(save)
                output.wrote(f"state after step {trainer.steps}", save)


class _Evaluations:
    """Prints the loss of held-out batches."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def on_step(self, step: int, result: StepResult) -> None: ...

    def on_evaluate(self, step: int, result: StepResult) -> None:
        self._output.give({"evaluated_after": step, "loss": float(result.loss)})
        self._output.say(f"evaluation after step {step}: loss {float(result.loss):.4f}")

    def on_end(self) -> None: ...


def _batches(
    job: Job, trainer: Trainer, steps: int | None, epochs: int | None
) -> Iterable[AnyBatch]:
    if job.batches is not None:
        around = steps is not None or epochs is not None
        return _Following(job.batches, trainer.steps, around=around)
    if epochs is not None:
        raise PiperError("--epochs needs the batches of an epoch: Job(batches=...)")
    return itertools.repeat(trainer.example, steps if steps is not None else 10)


class _Following:
    """A job's batches for a resumed run: the first iteration skips those of earlier steps."""

    def __init__(
        self, batches: Batches | Callable[[], Batches], before: int, *, around: bool
    ) -> None:
        """Skips ``before`` batches. With ``around``, they may span several passes over the data."""
        self._batches = batches
        self.sampler = getattr(batches, "sampler", None)
        """Told the epoch by ``fit``."""
        self.batch_sampler = getattr(batches, "batch_sampler", None)
        self._before = before
        self._around = around

    def __iter__(self) -> Iterator[AnyBatch]:
        before, self._before = self._before, 0
        done = before
        while True:
            rows = iter(self._batches() if callable(self._batches) else self._batches)
            dropped = sum(1 for _ in itertools.islice(rows, before))
            before -= dropped
            for first in rows:
                return itertools.chain([first], rows)
            if not dropped:
                return rows
            if not self._around:
                raise PiperError(
                    f"the batches end after step {dropped}, and the checkpoint is of step {done}: "
                    "nothing is left to train on. --steps says how many more steps to take, in "
                    "another pass over the batches"
                )


def _report(
    output: Output, trainer: Trainer, result: StepResult, every: int, *, last: bool
) -> None:
    norm = None if result.grad_norm is None else float(result.grad_norm)
    output.give(
        {
            "step": trainer.steps,
            "loss": float(result.loss),
            "grad_norm": norm,
            "seconds": result.seconds,
            "tokens_per_second": result.tokens_per_second,
            "memory_bytes": result.memory,
        }
    )
    if trainer.steps % every == 0 or trainer.steps == 1 or last:
        rate = f"{result.tokens_per_second:,.0f} tokens/s"
        shown = "" if norm is None else f"  norm {norm:.3f}"
        output.say(f"step {trainer.steps}: loss {float(result.loss):.4f}{shown}  {rate}")
