"""``Trainer``, the user's handle on a running program. It drives a ``WorkerGroup`` of any kind."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from piper.base.errors import PiperError
from piper.base.modes import without_modes
from piper.base.paths import path_of
from piper.base.tracking import Alive
from piper.base.units import class_text
from piper.capture.batch import Pad
from piper.capture.code.executables import Executables
from piper.capture.code.totals import Totals, summed
from piper.launch import running
from piper.launch.device.device import WorkerDevice
from piper.launch.device.report import ProfileKind, Report
from piper.launch.device.worker_group import WorkerGroup, everyone
from piper.launch.evaluation.held_out import HeldOut
from piper.launch.evaluation.pieces import EvaluationSums, RowPiece, RowPieces
from piper.launch.loggers.callback import Callback, TrainerCallback, checked_callbacks
from piper.launch.state.background_saves import BackgroundSave, PendingSave
from piper.launch.state.export_model import export, given_source
from piper.launch.state.saving import Save, load, prepare, save, tensor_of, whole_state
from piper.launch.state.switch import Change, changes_named, switch
from piper.launch.trainer.batch_shapes import BatchShapes
from piper.launch.trainer.batch_tensors import (
    batch_in,
    batches_in,
    counted_padding,
    first_tensor,
    padded,
    rows_in,
    sums_of,
    tensors_of,
    tensors_of_rows,
    tokens_of,
)
from piper.launch.trainer.data_position import BatchSource, Position
from piper.launch.trainer.fit import Checkpoints, SavedRun
from piper.launch.trainer.fit_options import FitOptions, with_options
from piper.launch.trainer.fit_summary import FitSummary
from piper.launch.trainer.loop import Loop, Rounds
from piper.launch.trainer.notices import Notice, Notices
from piper.launch.trainer.step_result import StepResult
from piper.launch.watch.interrupts import held_back
from piper.launch.watch.region_statistics import GradientStatistics, gradients_by_region
from piper.launch.watch.step_profile import Profile
from piper.program.program import Program
from piper.state.checkpoint.plain_values import from_json
from piper.state.checkpoint.slices import runs
from piper.state.optimizer.ema import EMA

_AT_ONCE = 4 * 1024 * 1024
"""Elements that are gathered, or sent out, at a time."""


class Trainer:
    """Trains a compiled program. Use it in a ``with`` block: that ends its devices."""

    def __init__(self, group: WorkerGroup, shapes: BatchShapes) -> None:
        """``group`` runs the first program of ``shapes``."""
        self.program = shapes.first
        self._shapes = shapes
        self.steps = 0
        self._worker_group: WorkerGroup | None = group
        self.recoveries = group.recoveries
        """The faults from which the workers recovered (``launch(restarts=...)``)."""
        self._saving = PendingSave()
        # runs even without close(); registered after the group's finalizer, so called before it
        weakref.finalize(self, self._saving.settle_late)
        self._rest: dict[str, Tensor] = {}
        """Model tensors that no device holds, if loaded; the others have their initial values."""
        self._runs: dict[Path | None, SavedRun] = {}
        """By folder, the run of ``fit`` and ``iterate`` there."""
        self._loops: weakref.WeakSet[Loop] = weakref.WeakSet()
        self.notices = Notices(silent=group.rank != 0)
        self._is_averaged = False
        self.failed = False
        """Whether the last step or evaluation ended with an error."""

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(error)

    def close(self) -> None:
        """End all devices."""
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        if self._worker_group is None:
            return
        try:
            for loop in list(self._loops):  # left by the caller, who still refers to them
                loop.close()
            if error is None:
                self.settle_save()
            else:
                self._saving.settle_late(error)
        finally:
            self._worker_group.close(error)
            self._worker_group = None

    @property
    def rank(self) -> int:
        """The rank of this process under torchrun; otherwise 0."""
        return self._devices.rank

    @cached_property
    def rows(self) -> Tensor:
        """The indices of the rows of a global batch that the devices of this process read. Without
        ``torchrun``, all rows."""
        own = running.rows_of(self._devices)
        with without_modes():
            if own is None:
                return torch.arange(self.program.example.size)
            return torch.tensor(own).long()

    def step(
        self,
        *batch: Any,
        pad: Pad | None = None,
        report: bool = True,
        rows: bool = False,
    ) -> StepResult:
        """Train on one global batch: the inputs, then the targets, also as one tuple. With
        ``rows=True``, ``batch`` is only this process's rows of it: ``trainer.rows``, in this order.

        A smaller batch is refused, or padded if ``pad`` gives one value for each tensor (by name
        for a dict). The loss must then ignore the padding: a mean over the targets that count, or
        (sum, count). With ``report=False`` the loss and gradient-norm all-reduces are left out,
        unless the step itself needs them, and neither can be read; under torchrun all processes
        must pass the same value.
        """
        return self.step_on(batch, pad=pad, report=report, rows=rows)

    def step_on(
        self,
        batch: Sequence[Any],
        *,
        pad: Pad | None,
        rows: bool,
        report: bool = True,
        observe: ProfileKind | None = None,
    ) -> StepResult:
        """``step``, measured if ``observe`` says what to measure."""
        if self.program.training.optimizer is None:
            self.notices.give(
                Notice.OPTIMIZER,
                "the program was compiled without optimizer=: steps compute gradients, and update "
                "no parameter; give piper.compile an optimizer, or trainer.evaluate the batches",
            )
        with self._undisturbed():
            self.settle_save(wait=False)
            result = self._step(batch, pad, report=report, rows=rows, observe=observe)
            self.steps += 1
        if (loss := result.loss_on_host) is not None:
            self.notices.look_at(self.steps, loss)
        if self.program.training.on_nan == "stop" and result.skipped:
            raise PiperError(
                f"the gradients of step {self.steps} are not finite (on_nan='stop'): it changed no "
                "parameter and no state of the optimizer. Look at its batch, at the learning rate "
                "and, in bf16, at the loss; on_nan='skip' continues with the next batch"
            )
        return result

    def evaluate(self, *batch: Any, pad: Pad | None = None, rows: bool = False) -> StepResult:
        """Compute the loss and the outputs of one batch, or of all batches of a loader, in
        evaluation mode; nothing changes.

        Batches may have any number of rows. The loss is that of all rows together: the mean over
        them, or over the targets that count. Outputs with rows are concatenated, single numbers are
        averaged. Rows that do not fill a batch are repeated, in several forwards, so that all
        count equally; with ``pad`` they are filled up as in ``step``."""
        start = time.perf_counter()
        self.failed = True
        found: Iterable[RowPiece] = self._pieces(batches_in(self.program, batch), pad, rows=rows)
        totals: list[Tensor] = []
        if (wanted := self.program.codes[1].totals) is not None:
            found = list(found)
            totals = self._totals_of(wanted, found, rows=rows)
        sums = EvaluationSums()
        for piece in found:
            with self._undisturbed():
                self._go_to_shape_of(piece.batch, rows=rows)
                given = [*self._tensors(piece.batch, rows=rows), *totals]
                report = running.evaluate(self._whole, self.program, given, own_rows=rows)
                sums.add(report, self.program, piece)
        with self._undisturbed():
            report = sums.report(self.program)
            self.failed = False
            seconds = time.perf_counter() - start
            return StepResult(report, self.program, seconds, sums.tokens, sums.rows, evaluated=True)

    def _pieces(
        self, batches: Iterable[Sequence[Any]], pad: Pad | None, *, rows: bool
    ) -> Iterator[RowPiece]:
        """All batches in pieces of the program's size."""
        pieces = RowPieces(self._shapes, pad, rows=rows)
        for batch in batches:
            with self._undisturbed():
                found = pieces.of(batch)
                self._look_at_padding(batch, pad)
            yield from found
        with self._undisturbed():
            found = pieces.rest()
        yield from found

    def _totals_of(self, totals: Totals, pieces: Sequence[RowPiece], *, rows: bool) -> list[Tensor]:
        """The totals over all rows, as inputs of every piece."""
        if not pieces:
            return []
        sums = []
        with self._undisturbed():
            for piece in pieces:
                program = self._program_for(piece.batch, rows=rows)
                tensors = self._tensors(piece.batch, program, rows=rows)
                terms = self._sums(program.codes[1], tensors, rows=rows)
                sums.append([x / piece.copies for x in terms])
            parts = sum(totals.parts / piece.copies for piece in pieces)
            return totals.of_sums(summed(sums), parts)

    def profile(self, *batch: Any, steps: int = 1, kernels: bool = False) -> Profile:
        """Train ``steps`` times on one global batch, and time every instruction of every device:
        with clocks on CPUs, with events on GPUs. The default batch is the one that the program was
        compiled with. With ``kernels`` the last step also runs under torch's profiler, which makes
        it slower.
        """
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise PiperError(f"steps={steps!r} must be a whole number, at least 1")
        given = batch or self.example
        measured = []
        for step in range(steps):
            last = kernels and step == steps - 1
            report = self._observed(given, ProfileKind.KERNELS if last else ProfileKind.TIME)
            measured.append(report.measured)
        return Profile(self.program, tuple(measured), report.kernels)

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
        return dict(sorted(self._observed(batch, ProfileKind.MEMORY).alive.items()))

    def gradients(self, *batch: Any) -> Mapping[str, GradientStatistics]:
        """Train on one global batch, and return the norm, the largest element and the share of
        zeros of the gradients of each region, before clipping."""
        return gradients_by_region(
            self.program, self._observed(batch, ProfileKind.REGIONS).gradients
        )

    def _observed(self, batch: Sequence[Any], what: ProfileKind) -> Report:
        """The report of a step on ``batch`` with ``what`` in it."""
        with self._undisturbed():
            report = running.train(self._whole, self.program, self._inputs(batch), observe=what)
            self.steps += 1
        return report

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
        listeners = checked_callbacks(chosen.callbacks)
        everywhere: list[Callback] = [x for x in listeners if isinstance(x, TrainerCallback)]
        group = self._devices
        position = Position(
            batches, self.steps, epochs=chosen.epochs,
            repeat=chosen.steps is not None, random=not chosen.rows,
        )  # fmt: skip
        held_out = HeldOut(self, chosen, listeners if self.rank == 0 else everywhere)
        saved = None
        if chosen.checkpoint is not None or chosen.resume:
            saved = Checkpoints(self, group, chosen)
            for loop in list(self._loops):
                if loop.folder is not None and loop.folder == saved.folder:
                    loop.close()  # it must not save after this one has begun
            held_out.go_to(saved.begin(self._runs, position))
        if self.rank != 0:
            chosen, listeners = replace(chosen, progress=False), everywhere
        loop = Loop(Rounds(self, group, position, chosen, saved, held_out, listeners))
        self._loops.add(loop)
        return loop

    def save_at(self, path: Path, data: Any, keep: int | None, *, background: bool) -> None:
        """``save``, with the position in the data."""
        self._refuse_averaged()
        with self._undisturbed():
            self.settle_save()
            group = self._whole
            one = Save(self.program, prepare(group, path, keep), self._rest, data, keep)
            if background:
                self._saving.begin(BackgroundSave(group, one))
            else:
                save(group, one)

    def settle_save(self, *, wait: bool = True) -> None:
        """Finish a background save, if there is one and, unless ``wait``, if it is written; raises
        if it failed."""
        self._saving.settle(wait=wait)

    def load_at(self, path: Path, *, new_settings: bool) -> Any:
        """``load``; returns the position in the data that was saved with the state."""
        self._refuse_averaged()
        with self._undisturbed():
            self.settle_save()
            group, program = self._devices, self.program
            index, self._rest = load(group, program, path, new_settings=new_settings)
            self.steps = index.steps
        return from_json(index.data)

    def state_dict(self) -> dict[str, Any]:
        """The model's whole parameters and buffers under their own names, and what its modules add
        to a state dict (extra state, hooks)."""
        with self._undisturbed():
            state = whole_state(self.program, running.export(self._whole), self._rest)
        source = self.program.source
        return state if source is None else self.program.names.with_added(source, state)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the weights are their averages (``optimizer=piper.EMA(...)``): to evaluate, to
        export, for ``state_dict`` and ``model``. Steps, saves and loads are refused."""
        if not isinstance(self.program.training.optimizer, EMA):
            raise PiperError(
                "the weights of this program are not averaged: compile it with optimizer=piper.EMA("
                "lambda parameters: ..., decay=0.999)"
            )
        self._refuse_averaged()
        self._swap_averages()
        self._is_averaged = True
        try:
            yield
        finally:
            self._is_averaged = False
            if self._worker_group is not None and not self._worker_group.damaged:
                self._swap_averages()

    def _swap_averages(self) -> None:
        with self._undisturbed():
            self._whole.call(WorkerDevice.swap_averages)

    def _refuse_averaged(self) -> None:
        if self._is_averaged:
            raise PiperError(
                "within trainer.averaged() the weights are their averages, which cannot be trained "
                "or saved: evaluate and export there, and end the block before the next step"
            )

    def model(self) -> nn.Module:
        """A copy of the model with the present weights, on the CPU and in evaluation mode, as for
        ``generate`` while training."""
        source = given_source(self.program)
        with self._undisturbed():
            find = tensor_of(self.program, running.export(self._whole), self._rest)
            known = dict((*source.parameters(), *source.buffers()))
            tensors = {name: find(name).to(own.dtype) for name, own in known.items()}
            return source.with_tensors(tensors).model.eval()

    def stream_state(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters and buffers of ``state_dict``, a few at a time: no device ever holds the
        whole model, nor does the caller, unless it keeps the tensors."""
        names = self.program.names
        for keys in runs(names.keys, names.elements.__getitem__, _AT_ONCE):
            only = frozenset(names.keys[key] for key in keys)
            with self._undisturbed():
                find = tensor_of(self.program, running.export(self._whole, only), self._rest)
            for key in keys:
                with self._undisturbed():
                    tensor = find(names.keys[key])
                yield key, tensor

    def load_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Replace parameters and buffers; the optimizer state is unchanged. Unless ``strict``,
        ``state`` may have only some of them; the others are unchanged."""
        self._refuse_closed()
        tensors = self.program.names.checked(state, strict=strict)
        with self._undisturbed():
            group = self._devices
            if group.agreement is not None:
                group.agreement.refuse_other_tensors(tensors)
            for run in runs(tensors, lambda name: tensors[name].numel(), _AT_ONCE):
                # no device is sent the whole model
                running.restore(group, {name: tensors[name] for name in run})
            held = self.program.held_names
            rest = {n: x.clone() for n, x in tensors.items() if n not in held}
            self._rest = rest if strict else {**self._rest, **rest}

    def save(self, path: str | Path, *, keep: int | None = None, background: bool = False) -> None:
        """Write a checkpoint, the state of training, to the folder ``path``: whole or not at all.
        Every device writes its own part. ``keep`` is the number of checkpoints to keep, of those
        beside it whose names, like this one's, end in a number. With ``background`` the next step
        copies the state while it computes, and training continues while the copy is written. The
        next save and the end of the trainer wait for it; the call that finds a failure raises."""
        self.save_at(path_of(path), None, keep, background=background)

    def load(self, path: str | Path, *, new_settings: bool = False) -> None:
        """Resume from a checkpoint of ``save``, saved under this or another strategy. Every device
        reads the slices that it needs; a refused checkpoint changes nothing. The settings of the
        optimizer, such as the learning rate, are the checkpoint's; with ``new_settings`` they are
        the program's."""
        self.load_at(path_of(path), new_settings=new_settings)

    def switch(self, program: Program, *, allow: Sequence[str] = ()) -> None:
        """Continue with another program of the same model and optimizer, under another strategy and
        on other devices. The state is copied from memory to memory, and losses continue as without
        a switch. ``allow`` names what else may change: "model", "loss", "precision", "clip_norm",
        "on_nan". A refused program changes nothing."""
        self._refuse_averaged()
        changes = changes_named(allow)
        with self._undisturbed():
            self._go_on_with(program, changes)
            self._shapes = BatchShapes(program, self._shapes.most)

    def export(
        self, path: str | Path, *, dtype: torch.dtype | None = None, file_gb: float = 5.0
    ) -> None:
        """Write the model to the folder ``path`` for ``from_pretrained`` of the transformers
        library: its configuration, if it has one, and its weights in safetensors files of about
        ``file_gb`` GB, in its own or another ``dtype``. Every device writes its own part. For a
        model with peft adapters, write the active adapter in peft's format instead."""
        size = int(file_gb * 10**9)
        with self._undisturbed():
            export(self._whole, self.program, path, self._rest, dtype=dtype, file_bytes=size)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Inside, interrupts are held back, and the caller's torch modes are off."""
        with without_modes(self.program.training.default_dtype), held_back():
            yield

    def _refuse_closed(self) -> None:
        if self._worker_group is None:
            raise PiperError("the trainer is closed: launch the program again")

    @property
    def _devices(self) -> WorkerGroup:
        self._refuse_closed()
        assert self._worker_group is not None
        return self._worker_group

    @property
    def _whole(self) -> WorkerGroup:
        """The devices; refused if a failed step left their state between two steps."""
        if self._devices.damaged:
            raise PiperError(
                f"step {self.steps} failed or was interrupted while it changed the state: some "
                "tensors are those after it, others those before. Resume from a checkpoint with "
                "trainer.load"
            )
        return self._devices

    def _program_for(self, batch: Sequence[Any], *, rows: bool) -> Program:
        """The program for batches of this shape, if several shapes are allowed."""
        several = self._shapes.most and not rows
        return self._shapes.program_for(batch) if several else self.program

    def _go_to_shape_of(self, batch: Sequence[Any], *, rows: bool) -> None:
        """Switch to the program for batches of this shape."""
        wanted = self._program_for(batch, rows=rows)
        if wanted is not self.program:
            # the same model by construction, traced at other sizes
            self._go_on_with(wanted, frozenset({Change.MODEL, Change.LOSS}))

    def _go_on_with(self, program: Program, allow: frozenset[Change]) -> None:
        self.settle_save()  # with the devices that began it
        switch(self._whole, self.program, program, allow)
        self.program = program
        vars(self).pop("rows", None)  # cached

    def _tensors(
        self, batch: Sequence[Any], program: Program | None = None, *, rows: bool
    ) -> list[Tensor]:
        """The tensors of a batch, or of this process's rows of it."""
        if rows:
            return tensors_of_rows(self.program, self.rows, batch)
        return tensors_of(program or self.program, batch)

    def _sums(self, code: Executables, tensors: list[Tensor], *, rows: bool) -> list[Tensor]:
        """The terms of the totals that ``code`` takes, summed over the whole batch."""
        own, gather = self.rows if rows else None, partial(everyone, self._devices)
        return sums_of(self.program, code, tensors, own, gather)

    def _inputs(self, batch: Sequence[Any], *, rows: bool = False) -> list[Tensor]:
        """The input tensors of a training step."""
        self._refuse_averaged()
        tensors, code = self._tensors(batch, rows=rows), self.program.codes[0]
        if (totals := code.totals) is None:
            return tensors
        return [*tensors, *totals.of_sums(self._sums(code, tensors, rows=rows), totals.parts)]

    def _look_at_padding(self, batch: Sequence[Any], pad: Pad | None) -> None:
        """Warn if the loss counts padding."""
        text = None if pad is None else counted_padding(self._shapes.first, batch, pad)
        if text is not None:
            self.notices.give(Notice.PADDING, text)

    def refuse_rows(self, rows: int, pad: Pad | None) -> None:
        """Refuse batches with fewer rows than the example now, if a step would refuse them."""
        batch = self._shapes.first.example.resized(rows).given
        if pad is not None:
            padded(self._shapes.first, batch, pad, rows=False)
        elif not self._shapes.most:
            tensors_of(self._shapes.first, batch)

    def _step(
        self,
        given: Sequence[Any],
        pad: Pad | None,
        *,
        report: bool,
        rows: bool,
        observe: ProfileKind | None,
    ) -> StepResult:
        start = time.perf_counter()
        self.failed = True
        batch = batch_in(self.program, given)
        if batch is None:
            raise PiperError(
                f"trainer.step takes one batch, and {class_text(given[0])} gives many: "
                "trainer.fit(batches) trains on all of them"
            )
        whole = padded(self._shapes.first, batch, pad, rows=rows)
        self._go_to_shape_of(whole, rows=rows)
        tensors = self._inputs(whole, rows=rows)
        self._look_at_padding(batch, pad)
        found = running.train(
            self._whole, self.program, tensors, report=report, own_rows=rows, observe=observe
        )
        seconds = time.perf_counter() - start
        self.failed = False
        example = self.program.example
        count = example.size if pad is None else rows_in(example, example.built_like(*batch))
        if count != example.size:  # single numbers would include the padding
            found = replace(found, outputs={})
        first = first_tensor(batch) if pad is not None else None
        tokens = tokens_of(example, count) if first is None else first.numel()
        return StepResult(found, self.program, seconds, tokens)
