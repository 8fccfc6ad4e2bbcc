"""``Trainer``, the user's handle on a running program. It drives a ``WorkerGroup`` of any kind.

Each method is a function on its ``Session``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from piper.base.arguments import named_arguments, whole_number
from piper.base.errors import PiperError
from piper.base.paths import path_of
from piper.base.tracking import Alive
from piper.capture.batch import Pad
from piper.launch.device.report import ProfileKind
from piper.launch.device.worker_group import WorkerGroup
from piper.launch.evaluation.evaluate import evaluate
from piper.launch.evaluation.held_out import HeldOut
from piper.launch.loggers.callback import Callback, TrainerCallback, checked_callbacks
from piper.launch.loop.data_position import BatchSource, Position
from piper.launch.loop.fit import Checkpoints, SavedRun
from piper.launch.loop.fit_options import FitOptions, with_options
from piper.launch.loop.fit_summary import FitSummary
from piper.launch.loop.loop import Loop, Rounds
from piper.launch.state import state_calls
from piper.launch.state.export_model import export
from piper.launch.trainer import training_calls
from piper.launch.trainer.batch_shapes import BatchShapes
from piper.launch.trainer.batch_tensors import refuse_one_batch
from piper.launch.trainer.session import Session
from piper.launch.trainer.step_result import StepResult
from piper.launch.watch.aligning import MeasuredStep
from piper.launch.watch.region_statistics import GradientStatistics, gradients_by_region
from piper.launch.watch.step_profile import Profile
from piper.program.program import Program

_ELSEWHERE = {
    **dict.fromkeys(("train", "learn"), "fit(batches) trains"),
    **dict.fromkeys(("validate", "test"), "evaluate(batches)"),
    "predict": "evaluate(batches).outputs, with outputs= of compile",
    **dict.fromkeys(("save_model", "save_pretrained", "push_to_hub"), "export(folder)"),
    "save_checkpoint": "save(folder)",
    "load_checkpoint": "load(folder)",
    **dict.fromkeys(("parameters", "named_parameters"), "state_dict(), or model().parameters()"),
    "eval": "evaluate(batches), which is in evaluation mode",
    "backward": "a step computes the gradients and updates the parameters itself",
    "optimizer": "optimizer= of compile makes it, on each device for its own parameters",
    **dict.fromkeys(("scheduler", "lr_scheduler"), "scheduler= of compile; every step advances it"),
}
"""Names of these methods in other libraries."""

_IN_BATCH = dict.fromkeys(
    ("input_ids", "labels", "attention_mask", "pixel_values"),
    "the batch as one mapping, trainer.step(batch)",
)
"""What is in a batch of transformers, and no argument."""


class Trainer:
    """Trains a compiled program. Use it in a ``with`` block: that ends its devices."""

    def __init__(self, group: WorkerGroup, shapes: BatchShapes) -> None:
        """``group`` runs the first program of ``shapes``."""
        self._session = Session(group, shapes)
        self.recoveries = group.recoveries
        """The faults from which the workers recovered (``launch(restarts=...)``)."""
        self._runs: dict[Path | None, SavedRun] = {}
        """By folder, the run of ``fit`` and ``iterate`` there."""
        self._loops: weakref.WeakSet[Loop] = weakref.WeakSet()

    if not TYPE_CHECKING:  # type checkers know the methods

        def __getattr__(self, name: str) -> object:
            hint = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(f"Trainer has no {name!r}{hint}", name=name, obj=self)

    def __enter__(self) -> Trainer:
        return self

    def __reduce__(self) -> str:
        raise PiperError(
            "a trainer cannot be copied or pickled, since its devices run: save its state with "
            "trainer.save(folder), or its weights with trainer.export(folder)"
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, RuntimeError) and "does not have a grad_fn" in str(error):
            error.add_note(
                "trainer.step(batch) has computed the gradients and updated the parameters "
                "already: leave out loss.backward(), optimizer.step() and zero_grad()"
            )
        self._close(error)

    def close(self) -> None:
        """End all devices."""
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        try:
            for loop in list(self._loops):  # left by the caller, who still refers to them
                loop.close()
        finally:
            self._session.close(error)

    @property
    def program(self) -> Program:
        """The program that runs now: of several batch shapes, that of the last batch."""
        return self._session.program

    @property
    def steps(self) -> int:
        """The number of training steps, counted over the whole run."""
        return self._session.steps

    @property
    def rank(self) -> int:
        """The rank of this process under torchrun; otherwise 0."""
        return self._session.devices.rank

    @property
    def rows(self) -> Tensor:
        """The indices of the rows of a global batch that the devices of this process read. Without
        ``torchrun``, all rows."""
        return self._session.rows

    @named_arguments(PiperError, _IN_BATCH)
    def step(
        self,
        *batch: Any,
        pad: Pad | None = None,
        report: bool = True,
        rows: bool = False,
    ) -> StepResult:
        """Train on one global batch: the inputs, then the targets, also as one tuple. With
        ``rows=True``, ``batch`` is only this process's rows of it: ``trainer.rows``, in this order.

        A batch with fewer or shorter rows is refused, or filled up if ``pad`` gives one value for
        each tensor (by name for a dict). The loss must then ignore the padding: a mean over the
        targets that count, or (sum, count), of a model that masks positions or is causal.

        With ``report=False`` the loss and gradient-norm all-reduces are left out, unless the step
        itself needs them, and neither can be read; under torchrun all processes must pass the same
        value.
        """
        return training_calls.step(self._session, batch, pad=pad, report=report, rows=rows)

    @named_arguments(PiperError, _IN_BATCH)
    def evaluate(self, *batch: Any, pad: Pad | None = None, rows: bool = False) -> StepResult:
        """Compute the loss and the outputs of one batch, or of all batches of a loader, in
        evaluation mode; nothing changes.

        Batches may have any number of rows. The loss is that of all rows together: the mean over
        them, or over the targets that count. Outputs with rows are concatenated, single numbers are
        averaged. Rows that do not fill a batch are repeated, in several forwards, so that all
        count equally; with ``pad`` they are filled up as in ``step``."""
        return evaluate(self._session, batch, pad=pad, rows=rows)

    def profile(self, *batch: Any, steps: int = 1, kernels: bool = False) -> Profile:
        """Train ``steps`` times on one global batch, and time every instruction of every device:
        with clocks on CPUs, with events on GPUs. The default batch is the one that the program was
        compiled with. With ``kernels`` the last step also runs under torch's profiler, which makes
        it slower.
        """
        whole_number("steps", steps)
        given = batch or self.example
        program = self.program
        measured: list[MeasuredStep] = []
        for step in range(steps):
            last = kernels and step == steps - 1
            what = ProfileKind.KERNELS if last else ProfileKind.TIME
            report = training_calls.observed(self._session, given, what)
            if (runs := self._session.devices.running(self.program)) is not program:
                program, measured = runs, []
            measured.append(report.measured)
        return Profile(program, tuple(measured), report.kernels)

    @property
    def example(self) -> tuple[Any, ...]:
        """The batch that the program was compiled with, inputs and then targets. An example with
        shapes only is refused."""
        example = self.program.example
        if any(x.is_meta or isinstance(x, FakeTensor) for x in example.tensors):
            raise PiperError(
                "the program was compiled with an example that has shapes only: give a batch"
            )
        return example.given

    def measure_memory(self, *batch: Any) -> Mapping[int, Alive]:
        """Train on one global batch, and count the bytes of tensors that each device holds.

        Compare them with ``program.memory``, the prediction. The first step creates the optimizer
        state: measure a later one.
        """
        report = training_calls.observed(self._session, batch, ProfileKind.MEMORY)
        return dict(sorted(report.alive.items()))

    def gradients(self, *batch: Any) -> Mapping[str, GradientStatistics]:
        """Train on one global batch, and return the norm, the largest element and the share of
        zeros of the gradients of each region, before clipping."""
        report = training_calls.observed(self._session, batch, ProfileKind.REGIONS)
        return gradients_by_region(self.program, report.gradients)

    @with_options(FitOptions)
    def fit(self, batches: BatchSource, **options: Any) -> FitSummary:
        """Train on batches, show progress, and return a summary.

        ``batches`` is an iterable of batches, each ``(*inputs, *targets)`` or a dict of inputs; a
        loader with a ``state_dict``; a function without arguments that yields them; or a function
        from a step number to its batch. ``FitOptions`` describes the options.

        With ``checkpoint`` and ``resume`` the same script can be restarted at any time. The first
        call in that folder resumes from the last checkpoint; later calls of this trainer continue,
        whatever ``resume`` says. Calls that were already done are skipped; ``steps`` and ``epochs``
        include those before the resume.
        """
        loop = self.iterate(batches, **options)
        loop.refuse_last()
        for _ in loop:
            pass
        return loop.summary()

    @with_options(FitOptions)
    def iterate(self, batches: BatchSource, **options: Any) -> Loop:
        """``fit`` as an iterator: each step runs when its result is requested. With ``checkpoint``,
        the state after the last step is saved however the loop ends, also by ``break`` or an
        error."""
        chosen = FitOptions(**options)
        refuse_one_batch(self.program, batches)
        self._session.unread.look_at_model()
        listeners = checked_callbacks(chosen.callbacks)
        everywhere: list[Callback] = [x for x in listeners if isinstance(x, TrainerCallback)]
        session = self._session
        main = self.rank == 0
        position = Position(
            batches, self.steps, epochs=chosen.epochs,
            repeat=chosen.steps is not None, random=not chosen.rows,
        )  # fmt: skip
        held_out = HeldOut(session, chosen, listeners if main else everywhere)
        saved = None
        if chosen.checkpoint is not None or chosen.resume:
            saved = Checkpoints(session, chosen)
            for loop in list(self._loops):
                if loop.folder is not None and loop.folder == saved.folder:
                    loop.close()  # it must not save after this one has begun
            held_out.go_to(saved.begin(self._runs, position))
        if not main:
            chosen, listeners = replace(chosen, progress=False), everywhere
        loop = Loop(Rounds(self, session, position, chosen, saved, held_out, listeners))
        self._loops.add(loop)
        return loop

    def settle_save(self, *, wait: bool = True) -> None:
        """Finish a background save, if there is one and, unless ``wait``, if it is written; raises
        if it failed."""
        self._session.saving.settle(wait=wait)

    def state_dict(self) -> dict[str, Any]:
        """The model's whole parameters and buffers under their own names, and what its modules add
        to a state dict (extra state, hooks)."""
        return state_calls.state_dict(self._session)

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the weights are their averages (``optimizer=piper.EMA(...)``): to evaluate, to
        export, for ``state_dict`` and ``model``. Steps, saves and loads are refused."""
        return state_calls.averaged(self._session)

    def model(self) -> nn.Module:
        """A copy of the model with the present weights, on the CPU and in evaluation mode, as for
        ``generate`` while training."""
        return state_calls.model(self._session)

    def stream_state(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters and buffers of ``state_dict``, a few at a time: no device ever holds the
        whole model, nor does the caller, unless it keeps the tensors."""
        return state_calls.stream_state(self._session)

    def load_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Replace parameters and buffers; the optimizer state is unchanged. Unless ``strict``,
        ``state`` may have only some of them; the others are unchanged."""
        state_calls.load_state_dict(self._session, state, strict=strict)

    def save(self, path: str | Path, *, keep: int | None = None, background: bool = False) -> None:
        """Write a checkpoint, the state of training, to the folder ``path``: whole or not at all.
        Every device writes its own part. ``keep`` is the number of checkpoints to keep, of those
        beside it whose names, like this one's, end in a number. With ``background`` the next step
        copies the state while it computes, and training continues while the copy is written. The
        next save and the end of the trainer wait for it; the call that finds a failure raises."""
        where = path_of(path)
        state_calls.save_state(self._session, where, None, keep, background=background)

    def load(self, path: str | Path, *, new_settings: bool = False) -> None:
        """Resume from a checkpoint of ``save``, saved under this or another strategy. Every device
        reads the slices that it needs; a refused checkpoint changes nothing. The settings of the
        optimizer, such as the learning rate, are the checkpoint's; with ``new_settings`` they are
        the program's."""
        state_calls.load_state(self._session, path_of(path), new_settings=new_settings)

    def switch(self, program: Program, *, allow: Sequence[str] = ()) -> None:
        """Continue with another program of the same model and optimizer, under another strategy and
        on other devices. The state is copied from memory to memory, and losses continue as without
        a switch. ``allow`` names what else may change: "model", "loss", "precision", "clip_norm",
        "on_nan". A refused program changes nothing."""
        state_calls.switch_to(self._session, program, allow)

    def export(
        self, path: str | Path, *, dtype: torch.dtype | None = None, file_gb: float = 5.0
    ) -> None:
        """Write the model to the folder ``path`` for ``from_pretrained`` of the transformers
        library: its configuration, if it has one, and its weights in safetensors files of about
        ``file_gb`` GB, in its own or another ``dtype``. Every device writes its own part. For a
        model with peft adapters, write the active adapter in peft's format instead."""
        export(self._session, path, dtype=dtype, file_gb=file_gb)
