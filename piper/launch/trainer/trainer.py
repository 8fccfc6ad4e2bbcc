"""The trainer: what a user holds while training, whatever runs behind it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from piper.base.errors import PiperError
from piper.base.modes import without_modes
from piper.base.paths import path_of
from piper.base.tracking import Alive
from piper.launch.device.worker_group import ProfileKind, Report, WorkerGroup
from piper.launch.state.background_saves import BackgroundSave, PendingSave
from piper.launch.state.export_model import export
from piper.launch.state.saving import in_turn, load, save, tensor_of, whole_state
from piper.launch.state.switch import Change, changes_named, switch
from piper.launch.trainer.batch_shapes import BatchShapes
from piper.launch.trainer.batch_tensors import (
    Pad,
    first_tensor,
    padded,
    tensors_of,
    tensors_of_rows,
    unpacked,
    with_totals,
    with_totals_of_all,
)
from piper.launch.trainer.callback import Callback, checked_callbacks
from piper.launch.trainer.data_position import BatchSource, Position
from piper.launch.trainer.fit import Checkpoints, SavedRun
from piper.launch.trainer.fit_summary import FitSummary
from piper.launch.trainer.loop import Loop, Rounds
from piper.launch.trainer.notices import Notice, Notices
from piper.launch.trainer.step_result import StepResult
from piper.launch.watch.interrupts import held_back
from piper.launch.watch.step_profile import Profile
from piper.program.program import Program
from piper.state.checkpoint.plain_values import from_json


class Trainer:
    """Trains a compiled program. Use it in a ``with`` block: that ends its devices."""

    def __init__(self, group: WorkerGroup, shapes: BatchShapes) -> None:
        """``group`` runs the first program of ``shapes``."""
        self.program = shapes.first
        self._shapes = shapes
        self.steps = 0
        self._worker_group: WorkerGroup | None = group
        self._saving = PendingSave()
        # also if nobody closes this trainer; made after the group's own, so called before it
        weakref.finalize(self, self._saving.settle_late)
        self._rest: dict[str, Tensor] = {}
        """Tensors of the model that no device holds, if they are not the first ones any more."""
        self._runs: dict[Path, SavedRun] = {}
        """By folder, what ``fit`` and ``iterate`` have done there."""
        self._loops: weakref.WeakSet[Loop] = weakref.WeakSet()
        self.notices = Notices(silent=group.rank != 0)
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
            for loop in list(self._loops):  # left, but still held by a name of the caller's
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
        """The number of this process among those that torchrun started; elsewhere 0."""
        return self._devices.rank

    @cached_property
    def rows(self) -> Tensor:
        """The numbers of those rows of a global batch that the devices of this process read: all of
        them, unless it is one of many that ``torchrun`` started."""
        own = self._devices.rows
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
        """Train on one global batch: the inputs, then the targets, also as one tuple; with
        ``rows=True`` on what has been given of it to this process: its rows ``trainer.rows``, in
        this order.

        A smaller batch is refused, or, if ``pad`` gives one value for each tensor (by name for a
        dict), filled up with rows of these values; they must not count, so the loss must return
        (sum, count). With ``report=False`` loss and norm are not summed over the devices, unless
        the step itself needs them, and cannot be read; under torchrun, all processes must say the
        same.
        """
        if self.program.training.optimizer is None:
            self.notices.give(
                Notice.OPTIMIZER,
                "the program was compiled without optimizer=: steps compute gradients, and update "
                "no parameter; give piper.compile an optimizer, or trainer.evaluate the batches",
            )
        with self._undisturbed():
            self.settle_save(wait=False)
            run = partial(self._whole.step, report=report, own_rows=rows)
            result = self._run(run, batch, pad, rows=rows)
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
        """The loss of one batch in evaluation mode, and its outputs; nothing is changed."""
        with self._undisturbed():
            run = partial(self._whole.evaluate, own_rows=rows)
            return self._run(run, batch, pad, rows=rows, evaluated=True)

    def profile(self, *batch: Any, steps: int = 1, kernels: bool = False) -> Profile:
        """Train ``steps`` times on one global batch, and measure every instruction of every device:
        by clocks on CPUs, by events on GPUs. Without a batch, on the one that the program was
        compiled with. With ``kernels`` the last step runs under torch's profiler too, which
        makes it slower.
        """
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise PiperError(f"steps={steps!r} must be a whole number from 1 on")
        with self._undisturbed():
            tensors = self._tensors(batch or self.example)
        found = []
        for step in range(steps):
            last = kernels and step == steps - 1
            with self._undisturbed():
                report = self._whole.profile(
                    tensors, ProfileKind.KERNELS if last else ProfileKind.TIME
                )
                self.steps += 1
            found.append(report.measured)
        return Profile(self.program, tuple(found), report.kernels)

    @property
    def example(self) -> tuple[Any, ...]:
        """The batch that the program was compiled with, inputs and then targets, if it has
        content."""
        example = self.program.example
        if any(x.is_meta or isinstance(x, FakeTensor) for x in example.tensors):
            raise PiperError(
                "the program was compiled with an example that has shapes only: give a batch"
            )
        return example.given

    def measure_memory(self, *batch: Any) -> Mapping[int, Alive]:
        """Train on one global batch, and count the bytes of tensors that each device holds.

        To be compared with ``program.memory``, which predicts them. The first step of an optimizer
        makes its state: measure a later one.
        """
        with self._undisturbed():
            report = self._whole.profile(self._tensors(batch), ProfileKind.MEMORY)
            self.steps += 1
        return dict(sorted(report.alive.items()))

    def fit(
        self,
        batches: BatchSource,
        *,
        steps: int | None = None,
        checkpoint: str | Path | None = None,
        every: int | None = None,
        resume: bool = False,
        keep: int | None = None,
        background: bool = False,
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
        rows: bool = False,
        pad: Pad | None = None,
    ) -> FitSummary:
        """Train on batches, with a progress display, and say what was done.

        ``batches`` is an iterable of batches, each ``(*inputs, *targets)`` or a dict of inputs; a
        loader with a ``state_dict``; a function without arguments that yields them; or a function
        from the number of a step to its batch. With ``rows``, each is this process's rows of a
        global batch; with ``pad``, smaller ones are filled up. Without ``steps``, one pass over the
        batches is made; with ``steps``, that many steps are taken, in several passes if one is too
        short. ``callbacks`` are told of each step (``piper.callbacks``); they, and the progress
        display, are in the process of rank 0 alone.

        With ``checkpoint``, a folder, the state is saved there every ``every`` steps and at the
        end, also if an error, Ctrl-C or SIGTERM ends it; ``keep`` says how many of them to keep,
        and with ``background`` all but the last are written while training continues.
        With ``resume`` the first call in that folder resumes from the last one, if there is one,
        with the same losses as if it had not ended. Later calls of this trainer continue, whatever
        ``resume`` says. Calls that were done before are passed over, and the steps that a call
        took before it was resumed count: the same script can be started again at any time.
        """
        loop = self.iterate(
            batches,
            steps=steps,
            checkpoint=checkpoint,
            every=every,
            resume=resume,
            keep=keep,
            background=background,
            callbacks=callbacks,
            progress=progress,
            rows=rows,
            pad=pad,
        )
        for _ in loop:
            pass
        return loop.summary()

    def iterate(
        self,
        batches: BatchSource,
        *,
        steps: int | None = None,
        checkpoint: str | Path | None = None,
        every: int | None = None,
        resume: bool = False,
        keep: int | None = None,
        background: bool = False,
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
        rows: bool = False,
        pad: Pad | None = None,
    ) -> Loop:
        """``fit`` as an iterator: each step is taken when its result is asked for. Whatever ends
        the loop over it (``break`` and errors, too), the state after the last step is saved, with
        ``checkpoint``."""
        if checkpoint is None and (every is not None or resume or keep is not None or background):
            raise PiperError("every=, resume=, keep= and background= need checkpoint=, a folder")
        whole = isinstance(steps, int) and not isinstance(steps, bool)
        if steps is not None and not (whole and steps >= 0):
            raise PiperError(f"steps={steps!r} must be a whole number from 0 on, or None")
        listeners = checked_callbacks(callbacks)
        group = self._devices
        position = Position(batches, self.steps, repeat=steps is not None, random=not rows)
        saved = None
        if checkpoint is not None:
            saved = Checkpoints(self, group, checkpoint, every, keep, background)
            for loop in list(self._loops):
                if loop.folder == saved.folder:  # it must not save after this one has begun
                    loop.close()
            saved.begin(self._runs, position, resume=resume)
        if self.rank != 0:
            listeners, progress = [], False
        rounds = Rounds(
            self, group, position, steps, saved, listeners,
            progress=progress, rows=rows, pad=pad,
        )  # fmt: skip
        loop = Loop(rounds)
        self._loops.add(loop)
        return loop

    def save_at(self, path: Path, data: Any, keep: int | None, *, background: bool) -> None:
        """``save``, with the position in the data."""
        with self._undisturbed():
            self.settle_save()
            given = self._whole, self.program, path, self._rest
            if background:
                self._saving.begin(BackgroundSave(*given, data=data, keep=keep))
            else:
                save(*given, data=data, keep=keep)

    def settle_save(self, *, wait: bool = True) -> None:
        """See to a save in the background, if there is one; an error if it failed."""
        self._saving.settle(wait=wait)

    def load_at(self, path: Path) -> Any:
        """``load``; gives the position in the data that was saved with the state."""
        with self._undisturbed():
            self.settle_save()
            index, self._rest = load(self._devices, self.program, path)
            self.steps = index.steps
        return from_json(index.data)

    def state_dict(self) -> dict[str, Any]:
        """The model's parameters and buffers, whole, under their own names, and what its modules
        add to a state dict (extra state, hooks)."""
        with self._undisturbed():
            state = whole_state(self.program, self._whole.export(), self._rest)
        source = self.program.source
        return state if source is None else self.program.names.with_added(source, state)

    def stream_state(self) -> Iterator[tuple[str, Tensor]]:
        """What ``state_dict`` gives, a few tensors at a time: nobody ever holds the whole model,
        neither a device nor the caller, unless it keeps what it is given."""
        names = self.program.names
        for keys in in_turn(names.keys, names.elements):
            only = frozenset(names.keys[key] for key in keys)
            with self._undisturbed():
                find = tensor_of(self.program, self._whole.export(only), self._rest)
            for key in keys:
                with self._undisturbed():
                    tensor = find(names.keys[key])
                yield key, tensor

    def load_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Continue from other parameters and buffers; the optimizer's state stays as it is. Unless
        ``strict``, ``state`` may be a part of them, and the others stay as they are too."""
        self._refuse_closed()
        tensors = self.program.names.checked(state, strict=strict)
        names = {name: name for name in tensors}
        sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        with self._undisturbed():
            self._devices.refuse_other_tensors(tensors)
            for run in in_turn(names, sizes):  # no device is sent the whole model
                self._devices.restore({name: tensors[name] for name in run})
            held = self.program.held_names
            rest = {n: x.clone() for n, x in tensors.items() if n not in held}
            self._rest = rest if strict else {**self._rest, **rest}

    def save(self, path: str | Path, *, keep: int | None = None, background: bool = False) -> None:
        """Write a checkpoint, the state of training, to the folder ``path``: whole or not at all.
        Every device writes what it has. ``keep`` says how many to keep of the checkpoints in the
        same folder whose names, like this one's, end in a number. With ``background`` the next step
        copies it beside its computations, and it is written while training continues; the next
        save, and the end of the trainer, wait for it, and a call that finds that it failed raises
        an error."""
        self.save_at(path_of(path), None, keep, background=background)

    def load(self, path: str | Path) -> None:
        """Resume from a checkpoint that ``save`` wrote, under this or another strategy. Every
        device reads the slices that it needs; a checkpoint that is refused changes nothing."""
        self.load_at(path_of(path))

    def switch(self, program: Program, *, allow: Sequence[str] = ()) -> None:
        """Continue with another program of the same model and optimizer, under another strategy and
        on other devices: the state goes from memory to memory, and losses continue as if nothing
        had happened. ``allow`` names what else may change: "model", "loss", "precision",
        "clip_norm", "on_nan". A program that is refused changes nothing."""
        changes = changes_named(allow)
        with self._undisturbed():
            self._go_on_with(program, changes)
            self._shapes = BatchShapes(program, self._shapes.most)

    def export(
        self, path: str | Path, *, dtype: torch.dtype | None = None, file_gb: float = 5.0
    ) -> None:
        """Write the model to the folder ``path`` as ``from_pretrained`` of the transformers library
        loads it: its configuration, if it has one, and its weights in safetensors files of about
        ``file_gb`` GB, in its own or another ``dtype``. Every device writes what it has. Of a model
        with adapters of the peft library, write the adapters, as peft loads them."""
        size = int(file_gb * 10**9)
        with self._undisturbed():
            export(self._whole, self.program, path, self._rest, dtype=dtype, file_bytes=size)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Inside, an interrupt waits, and no mode of the caller's is on."""
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
        """The devices, whose state is that after a number of whole steps."""
        if self._devices.damaged:
            raise PiperError(
                f"step {self.steps} failed or was interrupted while it changed the state: some "
                "tensors are those after it, others those before. Resume from a checkpoint with "
                "trainer.load"
            )
        return self._devices

    def _go_to_shape_of(self, batch: Sequence[Any]) -> None:
        """Go on with the program for batches like this one, if there may be several."""
        if self._shapes.most:
            wanted = self._shapes.program_for(batch)
            if wanted is not self.program:
                # the same model by its making, traced at sizes of its own
                self._go_on_with(wanted, frozenset({Change.MODEL, Change.LOSS}))

    def _go_on_with(self, program: Program, allow: frozenset[Change]) -> None:
        self.settle_save()  # by the devices that began it
        switch(self._whole, self.program, program, allow)
        self.program = program
        vars(self).pop("rows", None)  # cached

    def _tensors(
        self, batch: Sequence[Any], *, rows: bool = False, evaluated: bool = False
    ) -> list[Tensor]:
        """What a step takes of a batch, or of the rows of it that this process has."""
        program = self.program
        code = program.evaluation_code if evaluated else program.code
        if not rows:
            return with_totals(program, code, tensors_of(program, batch))
        tensors = tensors_of_rows(program, self.rows, batch)
        return with_totals_of_all(program, code, tensors, self.rows, self._devices.everyone)

    def _run(
        self,
        run: Any,
        batch: Sequence[Any],
        pad: Pad | None,
        *,
        rows: bool,
        evaluated: bool = False,
    ) -> StepResult:
        start = time.perf_counter()
        self.failed = True
        batch = unpacked(self.program, batch, evaluated=evaluated)
        whole = padded(self._shapes.first, batch, pad, rows=rows)
        if not rows:
            self._go_to_shape_of(whole)
        tensors = self._tensors(whole, rows=rows, evaluated=evaluated)
        report: Report = run(tensors)
        seconds = time.perf_counter() - start
        self.failed = False
        given = first_tensor(batch) if pad is not None else tensors[0]
        if rows or given is None:
            given = self.program.example.tensors[0]  # of all processes
        filled = pad is not None and not rows and given.dim() > 0
        size = given.shape[0] if filled else None
        tokens = given.numel()
        return StepResult(report, self.program, seconds, tokens, size, evaluated=evaluated)
