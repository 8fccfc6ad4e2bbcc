"""One device's slots while a plan runs, and what is known of each before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piper.capture.batch import strided_like
from piper.capture.codegen import Runners
from piper.capture.program import BUNDLES, Kind, Ref
from piper.ir.dag import Compute
from piper.ir.facts import bundled
from piper.ir.values import ExtraRole, parameters_of, tied_chunks
from piper.lower.accumulation import adds_up_in_place
from piper.lower.plan import Instruction, Plan, Verb
from piper.program import Code
from piper.runtime.comm import Comm
from piper.runtime.state import DeviceState


@dataclass(slots=True)
class Totals:
    """The scalars of a step."""

    loss: Tensor | None = None
    """The sum of the losses and of what they are divided by."""
    norm: Tensor | None = None
    """The squared norm of all gradients."""
    ready: torch.cuda.Event | None = None
    """What to wait for before they are read."""


@dataclass(frozen=True, slots=True)
class Made:
    """What a computation puts into one slot."""

    slot: int
    places: tuple[int, ...]
    """Which of the program's results."""
    bundle: bool
    """Whether the slot holds a list of them, and not one tensor."""
    names: tuple[str, ...] = ()
    """Of gradients, the parameters that they are of."""


class Board:
    """What the instructions of one plan work on."""

    def __init__(
        self, state: DeviceState, comm: Comm, runners: Runners, plan: Plan, code: Code
    ) -> None:
        self.state = state
        self.device = state.device
        self.where = state.where
        self.comm = comm
        self.plan = plan
        self.code = code
        self.parts = state.program.microbatches
        self.slots: list[Any] = [None] * len(plan.slot_bytes)
        self.totals = Totals()
        self.wanted = self._strides()
        self.readable = {
            s for x in plan.instructions if x.verb is not Verb.FREE for s in (*x.reads, *x.adds)
        }
        self.growing = {s for x in plan.instructions for s in x.adds}
        """Slots whose content is added to."""
        self.buckets = self._slot_buckets()
        self.grads = self._slot_gradients()
        self.sums = self._summed_in_place()
        self._summed = {(bucket, name) for rows in self.sums.values() for _, bucket, name in rows}
        self.buffers_of_sums: dict[int, Tensor] = {}
        """By bucket, where its gradients are being added up."""
        self.constants = {n: x.to(self.where) for n, x in code.constants.items()}
        self.runners = runners

    def begin(self, given: Sequence[Tensor]) -> None:
        """Put this device's part of the batch where the plan expects it."""
        self.totals = Totals()
        for (slot, value, _, group), rows in zip(self.plan.given, given, strict=True):
            spec = self.code.values[len(group)][value]
            self.slots[slot] = strided_like(rows.to(spec.dtype), spec.stride, self.where)

    def end(self) -> None:
        """Everything that the plan made must have been let go by it."""
        assert all(content is None for content in self.slots)
        assert not self.buffers_of_sums

    def abandon(self) -> None:
        """Let go of everything after a step that failed."""
        self.slots[:] = [None] * len(self.slots)
        self.buffers_of_sums.clear()

    def buffer(self, name: str) -> Tensor:
        """A buffer of the model, or a constant of its code."""
        return self.constants[name] if name in self.constants else self.state.buffers[name]

    def arrange(self, slot: int, x: Tensor) -> Tensor:
        """``x``, which is contiguous, with the strides that the slot's readers expect."""
        stride = self.wanted.get(slot)
        return x if stride is None else strided_like(x, stride, self.where)

    def _strides(self) -> dict[int, tuple[int, ...]]:
        """For each slot that programs read a tensor from, the strides that they expect."""
        found: dict[int, tuple[int, ...]] = {}
        for x in self.plan.instructions:
            if isinstance(x.op, Compute):
                program = self.code.programs[len(x.group)][x.op.chunk]
                for ref, slot in self.read(x).items():
                    if ref.kind not in BUNDLES:
                        found.setdefault(slot, program.specs[ref].stride)
        return found

    def read(self, x: Instruction) -> dict[Ref, int]:
        """What the slots that a computation reads are to its program."""
        assert isinstance(x.op, Compute)
        program = self.code.programs[len(x.group)][x.op.chunk]
        refs = bundled(program.functions[x.op.which].arguments)
        given = [ref for ref in refs if not self.is_seed(x.op.chunk, ref)]
        return dict(zip(given, x.reads, strict=False))

    def is_seed(self, chunk: int, ref: Ref) -> bool:
        outputs = self.code.pieces[chunk].outputs
        return ref.kind is Kind.OUTPUT_GRAD and outputs[ref.index] == self.code.loss

    def _slot_buckets(self) -> dict[int, int]:
        """For each slot with something of a bucket, the bucket."""
        of_bucket = (ExtraRole.REDUCED, ExtraRole.SUMMED, ExtraRole.GATHERED)
        return {s: x.of for x in self.plan.instructions if x.role in of_bucket for s in x.writes}

    def _slot_gradients(self) -> dict[int, tuple[str, ...]]:
        """For each slot with a bundle of gradients, the parameters they are of."""
        found: dict[int, tuple[str, ...]] = {}
        for x in self.plan.instructions:
            if isinstance(x.op, Compute):
                found |= {m.slot: m.names for m in self.written(x, x.op) if m.names}
        return found

    def written(self, x: Instruction, op: Compute) -> list[Made]:
        """What a computation puts into each slot that it writes."""
        results = self.code.programs[len(x.group)][op.chunk].functions[op.which].results
        names = self.code.pieces[op.chunk].parameters
        slots = iter(x.writes)
        found: list[Made] = []
        for ref in bundled(results):
            if ref.kind is Kind.PARAMETER_GRAD:
                place = {names[r.index]: i for i, r in enumerate(results) if r.kind is ref.kind}
                for grads in filter(None, self._trained(op.chunk)):
                    found.append(Made(next(slots), tuple(place[n] for n in grads), True, grads))
            elif ref.kind in BUNDLES:
                places = tuple(i for i, r in enumerate(results) if r.kind is ref.kind)
                found.append(Made(next(slots), places, True))
            else:
                found.append(Made(next(slots), (results.index(ref),), False))
        assert next(slots, None) is None
        return found

    def _trained(self, chunk: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """A chunk's own trained parameters, and those that it shares with other chunks."""
        model = next(iter(self.state.program.models.values()))
        return parameters_of(model, model.chunks[chunk], tied_chunks(model))

    def _summed_in_place(self) -> dict[int, list[tuple[int, int, str]]]:
        """For each slot whose gradients are added up in their buckets' buffers: their places in the
        slot, their buckets and parameters."""
        found: dict[int, list[tuple[int, int, str]]] = {}
        for x in self.plan.instructions:
            if x.role is not ExtraRole.REDUCED:
                continue
            bucket = self.state.held[x.of].layout.bucket
            if adds_up_in_place(bucket, [self.grads[slot] for slot in x.reads]):
                for slot in x.reads:
                    for place, name in enumerate(self.grads[slot]):
                        if name in bucket.parameters:
                            found.setdefault(slot, []).append((place, x.of, name))
        return found

    def homes(self, slot: int) -> list[tuple[int, Tensor]]:
        """The places in ``slot`` of gradients that are added up in their buckets' buffers, and
        where there."""
        return [(place, self._sum_of(bucket, name)) for place, bucket, name in self.sums[slot]]

    def _sum_of(self, bucket: int, name: str) -> Tensor:
        layout = self.state.held[bucket].layout
        if bucket not in self.buffers_of_sums:
            kind = layout.bucket.gradient
            flat = torch.empty(layout.padded, dtype=kind, device=self.where)
            flat[layout.elements :].zero_()
            for other in layout.bucket.parameters:
                if (bucket, other) not in self._summed:
                    layout.view(flat, other).zero_()  # this device computes none of its parts
            self.buffers_of_sums[bucket] = flat
        return layout.view(self.buffers_of_sums[bucket], name)

    def store(self, slot: int, content: Any) -> None:
        """Keep what a communication brought, unless nobody reads it: then it is freed already."""
        if slot in self.readable:
            self.slots[slot] = content
