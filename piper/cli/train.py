"""``piper train``: ``Trainer.fit`` from the command line."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from piper.base.errors import PiperError
from piper.base.units import nbytes_of
from piper.cli.options import (
    AsJson,
    DeviceName,
    JobSettings,
    LaunchOptions,
    Limit,
    MeshSpec,
    On,
    Script,
    StrategyFile,
)
from piper.cli.output import Output
from piper.launch.launchers import Where

if TYPE_CHECKING:
    from piper.launch.trainer.step_result import StepResult


class TrainCommand(TyperCommand):
    """A command whose help also lists the settings of the script that is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["script"] = next((Path(x) for x in args if Path(x).is_file()), None)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        if (script := ctx.meta["script"]) is not None:
            from piper.cli.scripts import settings_in

            typer.echo(settings_in(script))


_STEPS_OF_EXAMPLE = 10
"""Steps of a job without batches, if none are asked for."""


def train(
    script: Script,
    strategy: StrategyFile = None,
    mesh: MeshSpec = None,
    on: On = Where.VIRTUAL,
    options: LaunchOptions = None,
    settings: JobSettings = None,
    device: DeviceName = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of the whole run; by default, until the batches end."),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Passes over the batches in the whole run; with --steps, whichever ends first.",
        ),
    ] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(min=1, help="Steps between evaluations; by default, once per epoch."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Begin a run whose checkpoints are in this folder.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Continue the run in this folder, or begin it there; saves like --save."),
    ] = None,
    load: Annotated[
        Path | None,
        typer.Option(help="Continue from this checkpoint, or from the last one of another run."),
    ] = None,
    new_settings: Annotated[
        bool,
        typer.Option("--new-settings", help="Continue with the optimizer settings of the job."),
    ] = False,
    every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 10,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints to keep.")] = 1,
    export: Annotated[
        Path | None,
        typer.Option(help="At the end, write the model to this folder, for from_pretrained."),
    ] = None,
    log_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps between printed lines; default: a bar on a terminal, else about 20 lines.",
        ),
    ] = None,
    memory_limit: Limit = None,
    as_json: AsJson = False,
) -> None:
    """Train a job under a strategy.

    With --save, a checkpoint is written every --every steps and at the end, also if an error or
    Ctrl-C ends the run. --resume and --load continue under the same or another strategy, with the
    next batches; --steps and --epochs include those before.

    Example: piper train train.py --on processes --set lr=1e-4 --steps 100 --save state
    """
    from piper.cli.scripts import job_in, launch_options, strategy_of
    from piper.launch.launch import launch

    output = Output(as_json)
    with output.guarded():
        chosen = strategy_of(strategy, mesh)
        limit = None if memory_limit is None else nbytes_of("--memory-limit", memory_limit)
        job = job_in(script, settings)
        job = job if device is None else replace(job, device=device)
        if evaluate_every is not None and job.held_out is None:
            raise PiperError("--evaluate-every needs held-out batches: Job(held_out=...)")
        if job.batches is None and epochs is not None:
            raise PiperError("--epochs needs the batches of an epoch: Job(batches=...)")
        if save is not None and resume is not None:
            raise PiperError("give --save or --resume, not both: each names the folder of the run")
        folder = save or resume
        program = job.compile(chosen, memory_limit=limit)
        given = launch_options(options)
        with (
            warnings.catch_warnings(),  # the command says in its own words that nothing is saved
            launch(program, on=on.value, shapes=job.shapes, **given) as trainer,
        ):
            warnings.filterwarnings("ignore", "nothing is saved")
            default = _STEPS_OF_EXAMPLE if job.batches is None else None
            summary = trainer.fit(
                (lambda step: trainer.example) if job.batches is None else job.batches,
                steps=steps or default,
                epochs=epochs,
                evaluate=job.held_out,
                evaluate_every=evaluate_every,
                checkpoint=folder,
                every=None if folder is None else every,
                keep=None if folder is None else keep,
                resume=load or resume is not None,
                new_settings=new_settings,
                callbacks=[_JsonLines(output)] if as_json else [],
                progress=False if as_json else log_every or True,
                pad=job.pad,
            )
            output.say(summary)
            if folder is not None:
                output.wrote(f"state after step {trainer.steps}", folder)
            if export is not None:
                trainer.export(export)
                output.wrote("model", export)
            if folder is None and export is None:
                output.note("nothing is saved: --save keeps the state, --export the model")


class _JsonLines:
    """Prints each step and each evaluation: a callback."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def on_step(self, step: int, result: StepResult) -> None:
        line = {
            "step": step,
            "loss": float(result.loss),
            "grad_norm": None if result.grad_norm is None else float(result.grad_norm),
            "seconds": result.seconds,
            "tokens_per_second": result.tokens_per_second,
            "memory_bytes": result.memory,
        }
        self._output.give(line)

    def on_evaluate(self, step: int, result: StepResult) -> None:
        self._output.give({"evaluated_after": step, "loss": float(result.loss)})

    def on_end(self) -> None: ...
