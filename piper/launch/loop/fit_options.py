"""The arguments of ``Trainer.fit`` and ``Trainer.iterate``, spelled once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from piper.base.arguments import named_arguments, whole_number
from piper.base.errors import PiperError
from piper.base.units import class_text
from piper.capture.batch import Pad
from piper.launch.loggers.callback import Callback
from piper.launch.loop.data_position import AnyBatch, BatchSource
from piper.launch.trainer.step_result import StepResult

HeldOutBatches = Iterable[AnyBatch] | Callable[[], Iterable[AnyBatch]]

_ELSEWHERE = {
    **dict.fromkeys(("num_train_epochs", "num_epochs", "max_epochs", "n_epochs"), "epochs"),
    **dict.fromkeys(("max_steps", "num_steps", "num_train_steps"), "steps"),
    **dict.fromkeys(("eval_dataset", "val_dataloaders", "validation_data"), "evaluate"),
    **dict.fromkeys(("eval_steps", "val_check_interval"), "evaluate_every"),
    **dict.fromkeys(("resume_from_checkpoint", "ckpt_path"), "resume"),
    **dict.fromkeys(("output_dir", "default_root_dir"), "checkpoint"),
    **dict.fromkeys(("save_steps", "save_every"), "every"),
    **dict.fromkeys(("logging_steps", "log_every_n_steps"), "progress"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "accumulate"),
        "mesh(..., microbatches=), the argument of piper.compile",
    ),
    "save_total_limit": "keep",
    **dict.fromkeys(("load_best_model_at_end", "save_best", "save_best_only"), "keep_best"),
    "metric_for_best_model": "monitor",
}
"""Names of these options in other libraries."""

P = ParamSpec("P")
S = TypeVar("S")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """How to train on batches. With ``steps`` and ``epochs``, whichever ends first ends the run."""

    epochs: int | None = None
    """The number of passes over the batches. A sampler with ``set_epoch`` is told the number of
    each pass."""
    steps: int | None = None
    """The number of steps, in several passes if needed. Without it and ``epochs``, one pass."""
    evaluate: HeldOutBatches | None = None
    """Held-out batches, or a function that yields them. They are evaluated after every epoch and at
    the end."""
    evaluate_every: int | None = None
    """Evaluate after every so many steps instead, and at the end."""
    averaged: bool = False
    """Evaluate the averages of the weights (``optimizer=piper.EMA(...)``)."""
    monitor: Callable[[StepResult], float] | None = None
    """A number from the result of an evaluation, for ``patience`` and ``keep_best``: the lowest is
    the best. By default the loss."""
    patience: int | None = None
    """End after so many evaluations without a lower ``monitor``."""
    checkpoint: str | Path | None = None
    """A folder. The state is saved there at the end, also if an error, Ctrl-C or SIGTERM ends the
    run."""
    every: int | None = None
    """Also save after every so many steps."""
    resume: bool | str | Path = False
    """Resume from the last checkpoint in the folder, if there is one, with the same losses as an
    uninterrupted run. A path: else from that checkpoint, or from the last one of the run there."""
    new_settings: bool = False
    """Resume with the settings of the program's optimizer, such as another learning rate, in place
    of the checkpoint's."""
    keep: int | None = None
    """The number of checkpoints to keep, beside the best one."""
    keep_best: bool = False
    """Save the state to the folder ``best`` in ``checkpoint`` after each evaluation whose
    ``monitor`` is lower than all before."""
    background: bool = False
    """Write all checkpoints but the last while training continues."""
    callbacks: Sequence[Callback] = ()
    """Called after each step, in the process of rank 0."""
    progress: bool | int = True
    """Show progress in the process of rank 0: a bar on a terminal, else a line every few steps. A
    number: a line every so many steps."""
    rows: bool = False
    """Each batch is this process's rows of a global batch."""
    pad: Pad | None = None
    """Values that fill up smaller batches and shorter rows, also of ``evaluate``; see
    ``Trainer.step``."""

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "evaluate_every", "patience", "every", "keep"):
            if (number := getattr(self, name)) is not None:
                whole_number(name, number, int(name != "steps"), otherwise=", or None")
        if self.progress not in (True, False):
            whole_number("progress", self.progress, otherwise=", or a bool")
        saves = self.every is not None or self.resume is True or self.keep is not None
        if self.checkpoint is None and (saves or self.background or self.keep_best):
            raise PiperError(
                "every=, resume=, keep=, keep_best= and background= need checkpoint=, a folder"
            )
        judges = self.evaluate_every or self.patience or self.keep_best or self.monitor
        if self.evaluate is None and judges:
            raise PiperError(
                "evaluate_every=, monitor=, patience= and keep_best= need evaluate=, held-out "
                "batches"
            )
        if self.monitor is not None and not callable(self.monitor):
            raise PiperError(
                f"monitor={self.monitor!r} must be a function of an evaluation's result, such as "
                'lambda result: -result.outputs["accuracy"]'
            )
        again = isinstance(self.evaluate, Iterable) or callable(self.evaluate)
        if self.evaluate is not None and (isinstance(self.evaluate, Iterator) or not again):
            raise PiperError(
                f"evaluate= is {class_text(self.evaluate)}, and the batches are read several "
                "times: give a list, a loader, or a function that yields batches"
            )


def with_options(
    options: Callable[P, object],
) -> Callable[
    [Callable[Concatenate[S, BatchSource, ...], R]], Callable[Concatenate[S, BatchSource, P], R]
]:
    """A decorator: a method of batches has the keyword arguments of ``options``."""

    def decorate(method: Callable[..., R]) -> Any:
        signature = inspect.signature(method)
        own = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD]
        named = inspect.signature(options).parameters.values()
        method.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *named]
        )
        return named_arguments(PiperError, _ELSEWHERE)(method)

    return decorate
