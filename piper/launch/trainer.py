"""The trainer: what a user holds while training, whatever runs behind it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from piper.capture.batch import Batch
from piper.checkpoint.values import from_json
from piper.errors import PiperError
from piper.launch.background import BackgroundSave
from piper.launch.checkpoint import in_turn, load, save, tensor_of, whole_state
from piper.launch.exporting import export
from piper.launch.fitting import Checkpoints, Stop
from piper.launch.interrupts import held_back
from piper.launch.positions import Batches, Position
from piper.launch.profile import Profile
from piper.launch.progress_bar import shown_progress
from piper.launch.switching import switch
from piper.launch.worker_group import ProfileKind, Report, WorkerGroup
from piper.program import Program
from piper.tracking import Alive


class StepResult:
    """What one step reports, the same for every caller.

    On GPUs the sums of the loss and of the norm over all devices run beside the next step; reading
    one of them makes the current stream wait for them.
    """

    def __init__(self, report: Report, program: Program, seconds: float, tokens: int) -> None:
        self._report = report
        self._program = program
        self.seconds = seconds
        self.tokens = tokens
        """Elements of the first input: tokens, for a language model."""
        self.memory = report.memory
        """The most bytes that a device's process has held so far: GPU memory, or resident."""

    @property
    def loss(self) -> Tensor:
        """The loss over the whole batch."""
        loss = self._scalars[0]
        if loss is None:
            raise PiperError("this step was told not to report its loss: leave out report=False")
        return loss

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients before clipping; None after an evaluation, or a step that was
        not to report it."""
        return self._scalars[1]

    @property
    def skipped(self) -> bool:
        """Whether the step changed no parameter and no state of the optimizer, because of
        ``on_nan`` and a norm of the gradients that is not finite."""
        sums, squares = self._report.scalars()
        if self._program.training.on_nan is None or squares is None:
            return False
        counted = sums is not None and self._program.code.count is not None
        norm = squares.sqrt() / sums[1] if counted and sums is not None else squares.sqrt()
        return not bool(torch.isfinite(norm))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def __float__(self) -> float:
        return float(self.loss)

    def __repr__(self) -> str:
        return (
            f"StepResult(loss={self._scalars[0]}, grad_norm={self.grad_norm}, "
            f"seconds={self.seconds}, tokens={self.tokens}, memory={self.memory})"
        )

    @cached_property
    def _scalars(self) -> tuple[Tensor | None, Tensor | None]:
        """The loss and the norm from their sums."""
        program = self._program
        sums, squares = self._report.scalars()
        if sums is None:
            return None, None
        total = sums.to(program.loss_dtype)
        norm = None if squares is None else squares.sqrt()
        if program.code.count is None:
            loss = total[0] / program.loss_parts
        else:
            loss = total[0] / sums[1].to(program.loss_dtype)
            norm = None if norm is None else norm / sums[1]
        return loss, None if norm is None else norm.float()


class Trainer:
    """Trains a compiled program. Use it in a ``with`` block: that ends its devices."""

    def __init__(self, program: Program, group: WorkerGroup) -> None:
        self.program = program
        self.steps = 0
        self._worker_group: WorkerGroup | None = group
        self._saving: BackgroundSave | None = None
        self._rest: dict[str, Tensor] = {}
        """Tensors of the model that no device holds, if they are not the first ones any more."""

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
            if error is None:
                self.settle_save()
        finally:
            self._worker_group.close(error)
            self._worker_group = None

    @cached_property
    def rows(self) -> Tensor:
        """The numbers of those rows of a global batch that the devices of this process read: all of
        them, unless it is one of many that ``torchrun`` started."""
        own = self._devices.rows
        return torch.arange(self.program.example.size) if own is None else torch.tensor(own).long()

    def step(
        self,
        *batch: Any,
        pad: Sequence[float | int] | None = None,
        report: bool = True,
        rows: bool = False,
    ) -> StepResult:
        """Train on one global batch: the inputs, then the targets; with ``rows=True`` on what has
        been given of it to this process: its rows ``trainer.rows``, in this order.

        A smaller batch is refused, or, if ``pad`` gives one value for each tensor, filled up with
        rows of these values; they must not count, so the loss must return (sum, count). With
        ``report=False`` loss and norm are not summed over the devices, unless the step itself needs
        them, and cannot be read; under torchrun, all processes must say the same.
        """
        with held_back():
            self.settle_save(wait=False)
            run = partial(self._whole.step, report=report, own_rows=rows)
            result = self._run(run, batch, pad, rows=rows)
            self.steps += 1
        if self.program.training.on_nan == "stop" and result.skipped:
            raise PiperError(
                f"the gradients of step {self.steps} are not finite (on_nan='stop'): it changed no "
                "parameter and no state of the optimizer. Look at its batch, at the learning rate "
                "and, in bf16, at the loss; on_nan='skip' goes on with the next batch"
            )
        return result

    def evaluate(
        self, *batch: Any, pad: Sequence[float | int] | None = None, rows: bool = False
    ) -> StepResult:
        """The loss of one batch in evaluation mode; nothing is changed."""
        with held_back():
            run = partial(self._whole.evaluate, own_rows=rows)
            return self._run(run, batch, pad, rows=rows)

    def profile(self, *batch: Any, steps: int = 1, kernels: bool = False) -> Profile:
        """Train ``steps`` times on one global batch, and measure every instruction of every device:
        by clocks on CPUs, by events on GPUs. Without a batch, on the one that the program was
        compiled with. With ``kernels`` the last step runs under torch's profiler too, which
        makes it slower.
        """
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise PiperError(f"steps={steps!r} must be a whole number from 1 on")
        tensors = self._tensors(batch or self.example, None)
        found = []
        for step in range(steps):
            last = kernels and step == steps - 1
            with held_back():
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
        with held_back():
            report = self._whole.profile(self._tensors(batch, None), ProfileKind.MEMORY)
            self.steps += 1
        return dict(sorted(report.alive.items()))

    def fit(
        self,
        batches: Batches,
        *,
        steps: int | None = None,
        checkpoint: str | Path | None = None,
        every: int | None = None,
        resume: bool = False,
        keep: int | None = None,
        background: bool = False,
        progress: bool = True,
        rows: bool = False,
    ) -> Iterator[StepResult]:
        """Train on batches, each ``(*inputs, *targets)``, with a progress display; yields the
        result of each step. ``batches`` is an iterable, a loader with a ``state_dict``, or a
        function from the number of a step to its batch. With ``rows``, each is this process's rows
        of a global batch.

        With ``checkpoint``, a folder, the state is saved there every ``every`` steps and at the
        end, also when SIGTERM asks the process to end; ``keep`` says how many of them to keep, and
        with ``background`` all but the last are written while training goes on.
        With ``resume`` the run goes on from the last one, if there is one, with the same losses as
        if it had not ended; ``steps`` are then those of the whole run.
        """
        if checkpoint is None and (every is not None or resume or keep is not None or background):
            raise PiperError("every=, resume=, keep= and background= need checkpoint=, a folder")
        position = Position(batches, self.steps)
        last = None if steps is None else self.steps + steps
        saved = None
        if checkpoint is not None:
            saved = Checkpoints(self, checkpoint, every, keep, background)
            saved.begin(position, resume=resume, group=self._devices)
            last = steps
        return self._fitted(position, last, saved, progress=progress, rows=rows)

    def _fitted(
        self,
        position: Position,
        last: int | None,
        saved: Checkpoints | None,
        *,
        progress: bool,
        rows: bool,
    ) -> Iterator[StepResult]:
        stop = Stop()
        guarded = nullcontext() if saved is None else stop.on_sigterm()
        with shown_progress(last, self.steps, shown=progress) as show, guarded:
            while saved is None or not self._devices.any_of(stop.asked):
                if last is not None and self.steps >= last:
                    break
                if (batch := position.take()) is None:
                    break
                result = self.step(*batch, rows=rows)
                show(result)
                yield result
                if saved is not None:  # now that it was seen: a run that goes on leaves no gap
                    saved.after_step(position)
            if saved is not None:
                saved.finish(position)
                if self._devices.any_of(stop.asked):
                    stop.end()

    def save_at(self, path: Path, data: Any, keep: int | None, *, background: bool) -> None:
        """``save``, with the position in the data."""
        with held_back():
            self.settle_save()
            given = self._whole, self.program, path, self._rest
            if background:
                self._saving = BackgroundSave(*given, data=data, keep=keep)
            else:
                save(*given, data=data, keep=keep)

    def settle_save(self, *, wait: bool = True) -> None:
        """See to a save in the background, if there is one; an error if it failed."""
        saving, self._saving = self._saving, None
        if saving is not None and not saving.settled(wait=wait):
            self._saving = saving

    def load_at(self, path: Path) -> Any:
        """``load``; gives the position in the data that was saved with the state."""
        with held_back():
            self.settle_save()
            index, self._rest = load(self._devices, self.program, path)
            self.steps = index.steps
        return from_json(index.data)

    def state_dict(self) -> dict[str, Any]:
        """The model's parameters and buffers, whole, under their own names, and what its modules
        add to a state dict (extra state, hooks)."""
        with held_back():
            portions = self._whole.export()
        state = whole_state(self.program, portions, self._rest)
        source = self.program.source
        return state if source is None else self.program.names.with_added(source, state)

    def stream_state(self) -> Iterator[tuple[str, Tensor]]:
        """What ``state_dict`` gives, a few tensors at a time: nobody ever holds the whole model,
        neither a device nor the caller, unless it keeps what it is given."""
        names = self.program.names
        for keys in in_turn(names.keys, names.elements):
            only = frozenset(names.keys[key] for key in keys)
            with held_back():
                portions = self._whole.export(only)
            find = tensor_of(self.program, portions, self._rest)
            for key in keys:
                yield key, find(names.keys[key])

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from other parameters and buffers; the optimizer's state stays as it is."""
        self._refuse_closed()
        tensors = self.program.names.checked(state)
        names = {name: name for name in tensors}
        sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        with held_back():
            for run in in_turn(names, sizes):  # no device is sent the whole model
                self._devices.restore({name: tensors[name] for name in run})
            held = self.program.held_names
            self._rest = {n: x.clone() for n, x in tensors.items() if n not in held}

    def save(self, path: str | Path, *, keep: int | None = None, background: bool = False) -> None:
        """Write a checkpoint, the state of training, to the folder ``path``: whole or not at all.
        Every device writes what it has. ``keep`` says how many to keep of the checkpoints in the
        same folder whose names, like this one's, end in a number. With ``background`` it is copied,
        and written while training goes on; the next save, and the end of the trainer, wait for it,
        and a call that finds that it failed raises an error."""
        self.save_at(Path(path), None, keep, background=background)

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint that ``save`` wrote, under this or another strategy. Every device
        reads the slices that it needs; a checkpoint that is refused changes nothing."""
        self.load_at(Path(path))

    def switch(self, program: Program) -> None:
        """Go on with another program of the same model and optimizer, under another strategy and on
        other devices: the state goes from memory to memory, and losses continue as if nothing had
        happened. A program that is refused changes nothing."""
        with held_back():
            self.settle_save()
            switch(self._whole, self.program, program)
            self.program = program

    def export(
        self, path: str | Path, *, dtype: torch.dtype | None = None, file_gb: float = 5.0
    ) -> None:
        """Write the model to the folder ``path`` as ``from_pretrained`` of the transformers library
        loads it: its configuration, if it has one, and its weights in safetensors files of about
        ``file_gb`` GB, in its own or another ``dtype``. Every device writes what it has."""
        size = int(file_gb * 10**9)
        with held_back():
            export(self._whole, self.program, path, self._rest, dtype=dtype, file_bytes=size)

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
                "tensors are those after it, others those before. Go on from a checkpoint with "
                "trainer.load"
            )
        return self._devices

    def _run(
        self, run: Any, batch: Sequence[Any], pad: Sequence[float | int] | None, *, rows: bool
    ) -> StepResult:
        start = time.perf_counter()
        tensors = self._own_rows(batch, pad) if rows else self._tensors(batch, pad)
        report: Report = run(tensors)
        seconds = time.perf_counter() - start
        given = batch[0] if isinstance(batch[0], Tensor) and pad is not None else tensors[0]
        if rows:
            given = self.program.example.tensors[0]  # of all processes
        return StepResult(report, self.program, seconds, given.numel())

    def _own_rows(self, batch: Sequence[Any], pad: Sequence[float | int] | None) -> list[Tensor]:
        if pad is not None:
            raise PiperError(
                "pad= fills up a whole batch, and rows=True gives some rows of one: pad the batch "
                "before taking trainer.rows of it"
            )
        count = len(self.rows)
        try:
            return list(self._example_of_rows.like(*batch).tensors)
        except PiperError as error:
            raise PiperError(
                f"{error}. With rows=True a batch has {count} rows here, those that trainer.rows "
                "says, in this order"
            ) from None

    @cached_property
    def _example_of_rows(self) -> Batch:
        return self.program.example.resized(len(self.rows))

    def _tensors(self, batch: Sequence[Any], pad: Sequence[float | int] | None) -> list[Tensor]:
        example = self.program.example
        if pad is not None:
            batch = self._padded(batch, pad)
        try:
            return list(example.like(*batch).tensors)
        except PiperError as error:
            raise self._smaller(batch, error) from None

    def _smaller(self, batch: Sequence[Any], error: PiperError) -> PiperError:
        """``error``, with advice if the batch has only too few rows."""
        rows = {x.shape[0] for x in batch if isinstance(x, Tensor) and x.dim()}
        size = self.program.example.size
        if len(rows) != 1 or min(rows) >= size:
            return error
        return PiperError(
            f"{error}. A batch has {size} rows here, and this one {min(rows)}: leave the last, "
            "smaller batch out (drop_last=True), or fill it up with pad= and a loss that returns "
            "(sum, count)"
        )

    def _padded(self, batch: Sequence[Any], pad: Sequence[float | int]) -> list[Any]:
        if self.program.code.count is None:
            raise PiperError(
                "a padded batch needs a loss that returns (sum, count), so that the rows that fill "
                "it up do not count; this loss returns a mean"
            )
        values = isinstance(pad, Sequence) and all(isinstance(v, int | float) for v in pad)
        if not values or len(pad) != len(batch) or not all(isinstance(x, Tensor) for x in batch):
            raise PiperError(
                f"pad={pad!r} must give one number for each of the {len(batch)} tensors of "
                "the batch"
            )
        size = self.program.example.size
        found = []
        for x, value in zip(batch, pad, strict=True):
            if x.dim() and x.shape[0] < size:
                rows = torch.full((size - x.shape[0], *x.shape[1:]), value, dtype=x.dtype)
                x = torch.cat([x, rows.to(x.device)])
            found.append(x)
        return found
