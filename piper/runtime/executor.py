"""Runs a plan on one device: a generator that yields the communication it must wait for.

Loading a plan binds every instruction to a function without arguments. All its inputs are resolved
then, so a step looks up nothing by name.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from piper.base.errors import CapacityError, InstructionError
from piper.capture.code.codegen import Runners
from piper.capture.code.executables import Executables
from piper.ir.dag.values import Content
from piper.ir.ops import Add, Collective, Compute, Copy, Select, Transfer, Update
from piper.ir.plan.instructions import COMMUNICATING, Instruction, Verb
from piper.ir.plan.plan import Plan
from piper.runtime.comm.protocol import Comm
from piper.runtime.context import ExecutionContext, Scalars
from piper.runtime.counters import AWAITED, NOWHERE, PC, ProgramCounter
from piper.runtime.instructions.add import add
from piper.runtime.instructions.compute import compute
from piper.runtime.instructions.messages import all_to_all, all_to_all_by_counts, receive, send
from piper.runtime.instructions.redistribution import redistribute, select
from piper.runtime.instructions.scalars import sum_scalar
from piper.runtime.instructions.update import copy, gather, reduce, update
from piper.runtime.pending import BoundInstruction, Pending
from piper.runtime.streams.streams import BoundStreams, Streams
from piper.state.device.device_state import DeviceState


class Observer(Protocol):
    """Notes something of every run of a plan."""

    def wrapped(
        self, execute: BoundInstruction, pc: int, context: ExecutionContext
    ) -> BoundInstruction:
        """``execute``, observed."""
        ...


class CommunicationError(InstructionError):
    """A communication failed, most likely because another device failed before."""


class LoadedInstruction(NamedTuple):
    """One bound instruction."""

    pc: int
    ends: tuple[int, ...]
    """Communications to complete before it runs."""
    execute: BoundInstruction
    frees: tuple[int, ...]
    """Slots to free after it."""


@dataclass(frozen=True, slots=True)
class LoadedPlan:
    """A plan with its instructions bound to one execution context."""

    context: ExecutionContext
    ops: tuple[LoadedInstruction, ...]
    unreported: tuple[LoadedInstruction, ...]
    """``ops`` without the all-reduces of scalars that only the caller reads."""
    bound: BoundStreams


class Executor:
    """One device: its state, its communication and its streams."""

    def __init__(self, state: DeviceState, comm: Comm, streams: Streams, runners: Runners) -> None:
        self.state = state
        self.comm = comm
        self.runners = runners
        self.streams = streams
        self.running: LoadedPlan | None = None
        """The plan that ran last, or runs now."""
        self.at: ProgramCounter = [NOWHERE, 0, NOWHERE]

    def load(self, plan: Plan, code: Executables, observer: Observer | None = None) -> LoadedPlan:
        """Binds the instructions of ``plan``. ``observer``, if given, notes every run."""
        context = ExecutionContext(self.state, self.comm, self.runners, plan, code)
        ops: list[LoadedInstruction] = []
        bound = self.streams.bind(plan, context.slots)
        for pc, x in enumerate(plan.instructions):
            last: list[int] = []
            if isinstance(x.op, Compute):  # it adds to gradients after its program
                last = [s for s in x.frees if s in x.reads and not plan.slots[s].names]
                execute = compute(context, x, x.op, last, bound.free)
            else:
                execute = _load(context, x)
            after = [slot for slot in x.frees if slot not in last]
            if observer is not None:
                execute = observer.wrapped(execute, pc, context)
            ops.append(LoadedInstruction(pc, x.ends, bound.wrapped(execute, pc), tuple(after)))
        if self.comm.any_order:
            ops.sort(key=lambda op: plan.instructions[op.pc].issued_at(op.pc))
        return LoadedPlan(context, tuple(ops), _unreported(ops, plan), bound)

    def run(
        self, loaded: LoadedPlan, given: list[Tensor], *, report: bool = True
    ) -> Generator[Pending, None, Scalars]:
        """One step on ``given``: this device's part of the batch, in the order of the plan's
        ``given``. Empties the list, so that the plan alone decides when these tensors are freed.
        Scalars that no instruction reads are all-reduced only if ``report``."""
        self.running = loaded
        context, at = loaded.context, self.at
        free, keeps = loaded.bound.free, loaded.bound.keeps
        snapshot = self.state.snapshot
        pending: dict[int, Pending] = {}
        pc = 0
        try:
            context.begin(given)
            given.clear()
            self.streams.begin()
            loaded.bound.begin()
            for pc, ends, execute, frees in loaded.ops if report else loaded.unreported:
                at[PC] = pc
                for other in ends:
                    while not pending[other].done():
                        at[AWAITED] = other
                        if snapshot is None:
                            yield pending[other]
                        else:
                            snapshot.wait_begins()
                            yield pending[other]
                            snapshot.wait_ends()
                    self._complete(loaded, pending, other)
                    at[AWAITED] = NOWHERE
                begun = execute()
                if begun is not None:
                    pending[pc] = begun
                    if not keeps:
                        begun.release()
                for slot in frees:
                    free(slot)
            for other in list(pending):
                while not pending[other].done():
                    at[AWAITED] = other
                    yield pending[other]
                self._complete(loaded, pending, other)
                at[AWAITED] = NOWHERE
        except (InstructionError, CapacityError):
            raise
        except Exception as error:
            x = context.plan.instructions[pc]
            kind = CommunicationError if x.verb in COMMUNICATING else InstructionError
            raise self._failed(context, pc, kind, error) from error
        context.scalars.ready = self.streams.finish(loaded.bound.reporting)
        context.end()
        return context.scalars

    def _complete(self, loaded: LoadedPlan, pending: dict[int, Pending], pc: int) -> None:
        try:
            loaded.bound.complete(pending.pop(pc), pc)
        except CapacityError:
            raise
        except Exception as error:
            raise self._failed(loaded.context, pc, CommunicationError, error) from error

    def _failed(
        self, context: ExecutionContext, pc: int, kind: type[InstructionError], error: Exception
    ) -> InstructionError:
        hint = _HINTS.get(str(error), "")
        failed = kind(
            f"device {self.state.device}, instruction {pc} "
            f"({context.plan.instructions[pc].name}): {type(error).__name__}: {error}{hint}"
        )
        failed.pc = pc
        return failed


_HINTS = {
    "index out of range in self": " (an index of the batch is not below the rows of an embedding: "
    "compare the tokens with the vocabulary, and the length with the positions)"
}
"""By messages of torch that name no cause."""


def _unreported(ops: Sequence[LoadedInstruction], plan: Plan) -> tuple[LoadedInstruction, ...]:
    """``ops`` without the all-reduces of scalars that no instruction reads."""
    left_out = {
        pc
        for pc, x in enumerate(plan.instructions)
        if x.reported and set(x.writes).issubset(x.frees)
    }
    kept = []
    for pc, ends, execute, frees in ops:
        ends = tuple(other for other in ends if other not in left_out)
        run = (lambda: None) if pc in left_out else execute
        kept.append(LoadedInstruction(pc, ends, run, frees))
    return tuple(kept)


def _load(context: ExecutionContext, x: Instruction) -> BoundInstruction:
    match x.op:
        case Transfer():
            return send(context, x, x.op) if x.verb is Verb.SEND else receive(context, x, x.op)
        case Collective():
            return _collective(context, x, x.op)
        case Update():
            return update(context, x, x.op)
        case Add():
            return add(context, x)
        case Select():
            return select(context, x, x.op)
        case Copy():
            return copy(context, x, x.op)
        case _:
            raise AssertionError(f"{x.verb} has nothing to do")


def _collective(context: ExecutionContext, x: Instruction, op: Collective) -> BoundInstruction:
    group = next(group for group in op.groups if context.device in group)
    begin = context.comm.collective(op.kind, x.node, x.stream, group)
    match x.content:
        case Content.VALUE if op.rows is not None:
            return all_to_all_by_counts(context, x, op, begin, len(group))
        case Content.VALUE if op.dispatches or op.combines:
            return all_to_all(context, x, op, begin, len(group))
        case Content.VALUE:
            return redistribute(context, x, op, begin, len(group))
        case Content.GRADIENTS:
            return reduce(context, x, op, begin)
        case Content.PARAMETERS:
            return gather(context, x, begin)
        case _:
            return sum_scalar(context, x, begin)
