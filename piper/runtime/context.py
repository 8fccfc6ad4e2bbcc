"""The execution context of a plan: one device's slots, and what is known of each in advance."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from piper.capture.batch import strided_like
from piper.capture.code.codegen import Runners
from piper.capture.code.executables import Executables
from piper.ir.ops import Compute
from piper.ir.passes import BUNDLES, Kind, Ref, bundled
from piper.ir.plan.instructions import Instruction, Seed
from piper.ir.plan.plan import Plan
from piper.runtime.comm.protocol import Comm
from piper.state.device.device_state import DeviceState


@dataclass(slots=True)
class Scalars:
    """The scalars of a step."""

    loss: Tensor | None = None
    """The sum of the losses and of what they are divided by."""
    norm: Tensor | None = None
    """The squared norm of all gradients."""
    load: dict[int, Tensor] = field(default_factory=dict)
    """By chunk of experts on sorted rows, how many rows each expert has."""
    outputs: dict[int, Tensor] = field(default_factory=dict)
    """By value, the means of the numbers that are reported beside the loss."""
    returned: list[Tensor] = field(default_factory=list)
    """The rows of outputs that this device has, in the order of the plan's ``returned``."""
    finite: bool | None = None
    """Whether all gradients are, once that was asked."""
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


class ExecutionContext:
    """What the instructions of one plan work on: state, communication, and slots."""

    def __init__(
        self, state: DeviceState, comm: Comm, runners: Runners, plan: Plan, code: Executables
    ) -> None:
        self.state = state
        self.device = state.device
        self.where = state.where
        self.comm = comm
        self.plan = plan
        self.code = code
        self.slots: list[Any] = [None] * len(plan.slots)
        self.coming: dict[int, Callable[[], Tensor]] = {}
        """By slot, what reads all-to-alls under way, for those of their stream whose turn comes
        before the host has taken them in."""
        self.counted: dict[int, tuple[weakref.ref[Tensor], tuple[list[int], list[int]]]] = {}
        """By slot of counts, which rows and gradients that go and come back read: the tensor that
        was in it, and how many rows go to each device and come from it. The host of a GPU waits for
        these numbers, so it asks once."""
        self.scalars = Scalars()
        self.wanted = self._strides()
        self.constants = {n: x.to(self.where) for n, x in code.constants.items()}
        self.runners = runners
        self._seeds = [(seed.slot, self._seed(seed)) for seed in plan.seeds]

    @cached_property
    def generator(self) -> torch.Generator:
        """What random operations draw from, seeded for each instruction."""
        return torch.Generator(self.where)

    def begin(self, given: Sequence[Tensor]) -> None:
        """Put this device's part of the batch, and the seeds, where the plan expects them."""
        self.scalars = Scalars()
        for (slot, value, _, group), rows in zip(self.plan.given, given, strict=True):
            spec = self.code.values[len(group)][value]
            self.slots[slot] = strided_like(rows.to(spec.dtype), spec.stride, self.where)
        for slot, seed in self._seeds:
            self.slots[slot] = seed

    def end(self) -> None:
        """What the plan returns is the caller's; all else that it made it must have let go."""
        for slot, *_ in self.plan.returned:
            self.scalars.returned.append(self.slots[slot])
            self.slots[slot] = None
        assert all(content is None for content in self.slots)

    def abandon(self) -> None:
        """Let go of everything after a step that failed."""
        self.slots[:] = [None] * len(self.slots)
        self.coming.clear()

    def buffer(self, name: str) -> Tensor:
        """A buffer of the model, or a constant of its code."""
        return self.constants[name] if name in self.constants else self.state.buffers[name]

    def arrange(self, slot: int, x: Tensor) -> Tensor:
        """``x``, which is contiguous, with the strides that the slot's readers expect."""
        stride = self.wanted.get(slot)
        return x if stride is None else strided_like(x, stride, self.where)

    def _seed(self, seed: Seed) -> Tensor:
        spec = self.code.values[seed.group][seed.value]
        return torch.ones(spec.shape, dtype=spec.dtype, device=self.where).div_(seed.parts)

    def _strides(self) -> dict[int, tuple[int, ...]]:
        """For each slot that programs read a tensor from, the strides that they expect."""
        found: dict[int, tuple[int, ...]] = {}
        for x in self.plan.instructions:
            if isinstance(x.op, Compute):
                program = self.code.programs[len(x.group)][x.op.chunk]
                for ref, slot in self.read(x, x.op).items():
                    if ref.kind not in BUNDLES:
                        found.setdefault(slot, program.specs[ref].stride)
        return found

    def read(self, x: Instruction, op: Compute) -> dict[Ref, int]:
        """What the slots that a computation reads are to its program."""
        function = self.code.programs[len(x.group)][op.chunk].functions[op.which]
        return dict(zip(bundled(function.arguments), x.reads, strict=False))

    def written(self, x: Instruction, op: Compute) -> list[Made]:
        """What a computation puts into each slot that it writes."""
        results = self.code.programs[len(x.group)][op.chunk].functions[op.which].results
        parameters = self.code.pieces[op.chunk].parameters
        kinds = self.plan.slots
        others = iter([slot for slot in x.writes if not kinds[slot].names])
        found: list[Made] = []
        for ref in bundled(results):
            places = [i for i, r in enumerate(results) if r.kind is ref.kind]
            if ref.kind is Kind.PARAMETER_GRAD:
                of = {parameters[results[i].index]: i for i in places}
                grads = [(slot, kinds[slot].names) for slot in x.writes if kinds[slot].names]
                found += [Made(s, tuple(of[name] for name in names), True) for s, names in grads]
            elif ref.kind in BUNDLES:
                found.append(Made(next(others), tuple(places), True))
            else:
                found.append(Made(next(others), (results.index(ref),), False))
        assert next(others, None) is None
        return found

    def buffer_maker(self, slot: int) -> Callable[[], Tensor]:
        """Makes the buffer that the gradients of a bucket are added up in."""
        kind, where = self.plan.slots[slot], self.where
        assert kind.bucket is not None
        layout = self.state.held[kind.bucket].layout
        dtype = layout.bucket.gradient
        others = [name for name in layout.bucket.parameters if name not in kind.names]

        def make() -> Tensor:
            flat = layout.buffer(dtype, where)
            for name in others:
                layout.view(flat, name).zero_()  # this device computes none of its parts
            return flat

        return make

    def store(self, x: Instruction) -> Callable[[Any], None]:
        """Keeps what a communication brought, unless nobody reads it: then it is freed already."""
        (slot,) = x.writes
        return _forget if slot in x.frees else partial(self.slots.__setitem__, slot)


def _forget(content: Any) -> None:
    return
