"""``Session``, a program on its devices: what all parts of a trainer share.

A trainer's calls are functions on a session: training (``training_calls``), evaluation
(``evaluate``), the state (``state_calls``).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from piper.base.errors import PiperError
from piper.base.modes import without_modes
from piper.capture.batch import Pad
from piper.capture.code.executables import Executables
from piper.capture.code.totals import summed
from piper.launch import running
from piper.launch.device.worker_group import WorkerGroup, everyone
from piper.launch.state.background_saves import BackgroundSave
from piper.launch.state.switch import Change, switch
from piper.launch.trainer.batch_shapes import BatchShapes
from piper.launch.trainer.batch_tensors import tensors_of
from piper.launch.trainer.notices import Notice, Notices
from piper.launch.trainer.padding import counted_padding
from piper.launch.trainer.unread_weights import UnreadWeights
from piper.launch.watch.interrupts import held_back
from piper.program.program import Program


class Session:
    """A program on its devices, from launch to close."""

    def __init__(self, group: WorkerGroup, shapes: BatchShapes) -> None:
        """``group`` runs the first program of ``shapes``."""
        self.program = shapes.first
        """The program that runs now."""
        self.shapes = shapes
        self.steps = 0
        """Training steps so far."""
        self.rest: dict[str, Tensor] = {}
        """Model tensors that no device holds, if loaded; the others have their initial values."""
        self.notices = Notices(silent=group.rank != 0)
        self.is_averaged = False
        """Whether the weights are their averages, for ``averaged``."""
        self.failed = False
        """Whether the last step or evaluation ended with an error."""
        self.unread = UnreadWeights(self.notices, shapes.first.source)
        self.ignores_padding = False
        """Whether an evaluation has shown that the loss ignores padded positions."""
        self.saving = BackgroundSave()
        self._group: WorkerGroup | None = group
        # runs even without close(); registered after the group's finalizer, so called before it
        weakref.finalize(self, self.saving.settle_late)
        weakref.finalize(self, self.unread.end)

    # the devices

    @property
    def is_closed(self) -> bool:
        return self._group is None

    @property
    def devices(self) -> WorkerGroup:
        """The devices; refused after the end."""
        if self._group is None:
            raise PiperError("the trainer is closed: launch the program again")
        return self._group

    @property
    def whole(self) -> WorkerGroup:
        """The devices; refused if a failed step left their state between two steps."""
        if self.devices.damaged:
            raise PiperError(
                f"step {self.steps} failed or was interrupted while it changed the state: some "
                "tensors are those after it, others those before. Resume from a checkpoint with "
                "trainer.load"
            )
        return self.devices

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Inside, interrupts are held back, and the caller's torch modes are off."""
        with without_modes(self.program.training.default_dtype), held_back():
            yield

    def close(self, error: BaseException | None) -> None:
        """End all devices; ``error`` is the reason, if there was one."""
        if self._group is None:
            return
        try:
            if error is None:
                self.saving.settle()
                self.unread.end()
            else:
                self.unread.forget()
                self.saving.settle_late(error)
        finally:
            self._group.close(error)
            self._group = None

    # batches

    @cached_property
    def rows(self) -> Tensor:
        """The indices of the rows of a global batch that the devices of this process read."""
        own = running.rows_of(self.devices)
        with without_modes():
            if own is None:
                return torch.arange(self.program.example.size)
            return torch.tensor(own).long()

    def tensors(
        self, batch: Sequence[Any], program: Program | None = None, *, rows: bool
    ) -> list[Tensor]:
        """The tensors of a batch, or of this process's rows of it."""
        return tensors_of(program or self.program, batch, self.rows if rows else None)

    def sums(self, code: Executables, tensors: list[Tensor], *, rows: bool) -> list[Tensor]:
        """The terms of the totals that ``code`` takes, summed over the whole batch."""
        totals, whole = code.totals, self.program.example.size
        if totals is None:
            return []
        if not rows:
            return totals.sums(tensors, whole)
        places = {row: place for place, row in enumerate(self.rows.tolist())}
        has = [x.dim() > 0 and x.shape[0] == len(places) for x in tensors]
        size = whole // totals.parts
        mine: dict[int, list[Tensor]] = {}
        for part in range(totals.parts):
            own = range(part * size, (part + 1) * size)
            if all(row in places for row in own):
                at = torch.tensor([places[row] for row in own])
                taken = [x[at.to(x.device)] if h else x for x, h in zip(tensors, has, strict=True)]
                mine[part] = [x.cpu() for x in totals.part(taken)]
        parts = {
            part: terms for said in everyone(self.devices, mine) for part, terms in said.items()
        }
        return summed(terms for _, terms in sorted(parts.items()))

    def look_at_padding(self, batch: Sequence[Any], pad: Pad | None) -> None:
        """Warn if the loss counts padding."""
        text = None if pad is None else counted_padding(self.shapes.first, batch, pad)
        if text is not None:
            self.notices.give(Notice.PADDING, text)

    # the program

    def program_for(self, batch: Sequence[Any], *, rows: bool) -> Program:
        """The program for batches of this shape, if several shapes are allowed."""
        several = self.shapes.most and not rows
        return self.shapes.program_for(batch) if several else self.program

    def go_to_shape_of(self, batch: Sequence[Any], *, rows: bool) -> None:
        """Continue with the program for batches of this shape."""
        wanted = self.program_for(batch, rows=rows)
        if wanted is not self.program:
            # the same model by construction, traced at other sizes
            self.go_on_with(wanted, frozenset({Change.MODEL, Change.LOSS}))

    def go_on_with(self, program: Program, allow: frozenset[Change]) -> None:
        """Move the state to ``program``, which may differ from the present one as allowed."""
        self.saving.settle()  # with the devices that began it
        switch(self.whole, self.program, program, allow)
        self.program = program
        vars(self).pop("rows", None)  # cached

    def refuse_averaged(self) -> None:
        """Refuse to change or save weights that are averages."""
        if self.is_averaged:
            raise PiperError(
                "within trainer.averaged() the weights are their averages, which cannot be trained "
                "or saved: evaluate and export there, and end the block before the next step"
            )
