"""The execution context of a plan on one device: its slots, and facts about them that are known
before a step."""

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
from piper.ir.dag.values import Content
from piper.ir.ops import Compute
from piper.ir.passes import BUNDLES, Kind, Ref, bundled
from piper.ir.plan.instructions import Instruction, Seed
from piper.ir.plan.plan import Plan
from piper.runtime.comm.protocol import Comm
from piper.state.device.device_state import DeviceState


@dataclass(slots=True)
class Scalars:
    """The results of a step."""

    sums: dict[tuple[Content, int], Tensor] = field(default_factory=dict)
    """By content, and the value or chunk that it is of. A loss is two numbers: the sum of the
    losses, and the sum of the counts that divide them."""
    returned: list[Tensor] = field(default_factory=list)
    """This device's rows of the outputs, in the order of the plan's ``returned``."""
    finite: bool | None = None
    """Whether all gradients are finite; None until this is checked."""
    ready: torch.cuda.Event | None = None
    """The event to wait for before reading the results."""

    def each(self, content: Content) -> dict[int, Tensor]:
        """The sums of one content, by the value or chunk that they are of."""
        return {of: x for (kind, of), x in self.sums.items() if kind is content}


@dataclass(frozen=True, slots=True)
class Made:
    """The results that a computation puts into one slot."""

    slot: int
    places: tuple[int, ...]
    """Indices among the program's results."""
    bundle: bool
    """Whether the slot holds a list of tensors instead of one tensor."""


class ExecutionContext:
    """The data that the instructions of one plan work on: state, communication and slots."""

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
        """By slot, a function that reads the result of an all-to-all under way. For communications
        of the same stream that run before the host has completed it."""
        self.counted: dict[int, tuple[weakref.ref[Tensor], tuple[list[int], list[int]]]] = {}
        """By slot of received counts: the tensor that was in it, and how many rows go to each
        device and come from it. The dispatch and combine of rows and of gradients share these
        numbers. On a GPU the host waits for them, so it reads them once."""
        self.scalars = Scalars()
        self.wanted = self._strides()
        self.constants = {n: x.to(self.where) for n, x in code.constants.items()}
        self.runners = runners
        self._seeds = [(seed.slot, self._seed(seed)) for seed in plan.seeds]

    @cached_property
    def generator(self) -> torch.Generator:
        """The generator of random operations, seeded again for each instruction."""
        return torch.Generator(self.where)

    def begin(self, given: Sequence[Tensor]) -> None:
        """Put this device's part of the batch, and the backward's seed gradients, into their
        slots."""
        self.scalars = Scalars()
        for (slot, value, _, shards), rows in zip(self.plan.given, given, strict=True):
            spec = self.code.values[shards.parts][value]
            self.slots[slot] = strided_like(rows.to(spec.dtype), spec.stride, self.where)
        for slot, seed in self._seeds:
            self.slots[slot] = seed

    def end(self) -> None:
        """Pass the plan's returned values to the caller. All other slots must be empty by now."""
        for slot, *_ in self.plan.returned:
            self.scalars.returned.append(self.slots[slot])
            self.slots[slot] = None
        assert all(content is None for content in self.slots)

    def abandon(self) -> None:
        """Free all slots after a failed step."""
        self.slots[:] = [None] * len(self.slots)
        self.coming.clear()

    def buffer(self, name: str) -> Tensor:
        """A buffer of the model, or a constant of its executables."""
        return self.constants[name] if name in self.constants else self.state.buffers[name]

    def arrange(self, slot: int, x: Tensor) -> Tensor:
        """The contiguous ``x`` with the strides that the slot's readers expect."""
        stride = self.wanted.get(slot)
        return x if stride is None else strided_like(x, stride, self.where)

    def _seed(self, seed: Seed) -> Tensor:
        spec = self.code.values[seed.group][seed.value]
        return torch.ones(spec.shape, dtype=spec.dtype, device=self.where).div_(seed.parts)

    def _strides(self) -> dict[int, tuple[int, ...]]:
        """For each slot from which a program reads a tensor, the strides that it expects."""
        strides: dict[int, tuple[int, ...]] = {}
        for x in self.plan.instructions:
            if isinstance(x.op, Compute):
                program = self.code.programs[x.rows.parts][x.op.chunk]
                for ref, slot in self.read(x, x.op).items():
                    if ref.kind not in BUNDLES:
                        strides.setdefault(slot, program.specs[ref].stride)
        return strides

    def read(self, x: Instruction, op: Compute) -> dict[Ref, int]:
        """The slot of each program argument that a computation reads from slots."""
        function = self.code.programs[x.rows.parts][op.chunk].functions[op.which]
        return dict(zip(bundled(function.arguments), x.reads, strict=False))

    def written(self, x: Instruction, op: Compute) -> list[Made]:
        """The results that a computation puts into each slot it writes."""
        results = self.code.programs[x.rows.parts][op.chunk].functions[op.which].results
        parameters = self.code.pieces[op.chunk].parameters
        kinds = self.plan.slots
        others = iter([slot for slot in x.writes if not kinds[slot].names])
        made: list[Made] = []
        for ref in bundled(results):
            places = [i for i, r in enumerate(results) if r.kind is ref.kind]
            if ref.kind is Kind.PARAMETER_GRAD:
                of = {parameters[results[i].index]: i for i in places}
                grads = [(slot, kinds[slot].names) for slot in x.writes if kinds[slot].names]
                made += [Made(s, tuple(of[name] for name in names), True) for s, names in grads]
            elif ref.kind in BUNDLES:
                made.append(Made(next(others), tuple(places), True))
            else:
                made.append(Made(next(others), (results.index(ref),), False))
        assert next(others, None) is None
        return made

    def buffer_maker(self, slot: int) -> Callable[[], Tensor]:
        """A function that allocates a bucket's gradient accumulation buffer."""
        kind, where = self.plan.slots[slot], self.where
        assert kind.bucket is not None
        layout = self.state.held[kind.bucket].layout
        dtype = layout.bucket.gradient
        others = [name for name in layout.bucket.parameters if name not in kind.names]

        def make() -> Tensor:
            flat = layout.buffer(dtype, where)
            for name in others:
                layout.view(flat, name).zero_()  # this device computes no gradient for it
            return flat

        return make

    def store(self, x: Instruction) -> Callable[[Any], None]:
        """A function that stores a communication's result in its slot. A result without readers is
        dropped: its slot is already freed."""
        (slot,) = x.writes
        if slot in x.frees:
            return lambda content: None
        return partial(self.slots.__setitem__, slot)
