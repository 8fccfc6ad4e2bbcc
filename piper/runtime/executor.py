"""Runs a plan on one device: a generator that yields the communication it must wait for.

When a plan is loaded, every instruction becomes a function of no arguments with everything it needs
resolved: nothing is looked up by name while a step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from piper.capture.codegen import Runners
from piper.errors import PiperError
from piper.ir.dag import Collective, Compute, Transfer, Update
from piper.ir.values import ExtraRole
from piper.lower.plan import Instruction, Plan, Verb
from piper.program import Code
from piper.runtime.board import Board, Totals
from piper.runtime.comm import Comm
from piper.runtime.computing import compute
from piper.runtime.moving import exchange, receive, send
from piper.runtime.pending import Act, Pending
from piper.runtime.state import DeviceState
from piper.runtime.streams import Streams
from piper.runtime.updating import gather, norm, reduce, total, update


class Place(Protocol):
    """One number that others may read: the place in a plan."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


class InstructionError(PiperError):
    """An instruction failed; the cause is the error that it raised."""


@dataclass(slots=True)
class Op:
    """One loaded instruction."""

    act: Act
    waits: tuple[int, ...]
    """Places of what must be done before."""
    stream: str
    awaited: bool
    """Whether something waits for it."""
    name: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A plan whose instructions are functions over one board."""

    board: Board
    ops: list[Op]


class Executor:
    """One device: its state, its end of the communication, its streams."""

    def __init__(self, state: DeviceState, comm: Comm, streams: Streams, runners: Runners) -> None:
        self.state = state
        self.comm = comm
        self.runners = runners
        self.streams = streams
        self.at: Place = [0]
        """The place in the plan, for those who ask from outside; may be shared memory."""

    def load(self, plan: Plan, code: Code) -> Loaded:
        """``plan`` ready to be run."""
        board = Board(self.state, self.comm, self.runners, plan, code)
        writers: dict[int, int] = {}
        awaited = {w for x in plan.instructions for w in x.waits}
        users = _users(plan)
        ops: list[Op] = []
        for place, x in enumerate(plan.instructions):
            if x.verb is Verb.FREE:
                free = self._free(board, x.reads[0], users)
                ops.append(Op(free, (), "compute", False, "free"))
                continue
            # what a communication brings is there when it is complete, on its own stream too
            implied = {writers[s] for s in (*x.reads, *x.adds) if s in writers}
            waits = tuple(sorted({*x.waits, *implied}))
            name = x.name if x.verb.value in x.name else f"{x.verb.value} {x.name}"
            ops.append(Op(_load(board, x), waits, x.stream, place in awaited, name))
            if x.verb in (Verb.RECV, Verb.COLLECTIVE):
                writers |= dict.fromkeys(x.writes, place)
        return Loaded(board, ops)

    def _free(self, board: Board, slot: int, users: dict[int, set[str]]) -> Act:
        slots, keep = board.slots, self.streams.keep
        streams = sorted(users.get(slot, ())) if board.where.type == "cuda" else []

        def act() -> None:
            for tensor in _tensors(slots[slot]) if streams else ():
                for stream in streams:
                    keep(tensor, stream)
            slots[slot] = None

        return act

    def run(self, loaded: Loaded, given: Sequence[Tensor]) -> Generator[Pending, None, Totals]:
        """One step on this device's part of the batch, in the order of the plan's ``given``."""
        loaded.board.begin(given)
        pending: dict[int, Pending] = {}
        marks: dict[int, Callable[[], None]] = {}
        streams = self.streams
        streams.begin()
        at = self.at
        for place, op in enumerate(loaded.ops):
            at[0] = place
            for other in op.waits:
                if other in pending:
                    while not pending[other].done():
                        yield pending[other]
                    self._complete(loaded, other, pending, marks)
            try:
                with streams.on(op.stream):
                    for other in op.waits:
                        if other in marks:
                            marks[other]()
                    begun = op.act()
                    if begun is not None:
                        pending[place] = begun
                    elif op.awaited:
                        marks[place] = streams.mark()
            except Exception as error:
                raise self._failed(place, op, error) from error
        for place in list(pending):
            while not pending[place].done():
                yield pending[place]
            self._complete(loaded, place, pending, marks)
        streams.finish()
        loaded.board.end()
        return loaded.board.totals

    def _complete(
        self,
        loaded: Loaded,
        place: int,
        pending: dict[int, Pending],
        marks: dict[int, Callable[[], None]],
    ) -> None:
        op = loaded.ops[place]
        try:
            with self.streams.on(op.stream):
                pending.pop(place).complete()
                marks[place] = self.streams.mark()
        except Exception as error:
            raise self._failed(place, op, error) from error

    def _failed(self, place: int, op: Op, error: Exception) -> InstructionError:
        return InstructionError(
            f"device {self.state.device}, instruction {place} ({op.name}): "
            f"{type(error).__name__}: {error}"
        )


def _load(board: Board, x: Instruction) -> Act:
    match x.op:
        case Compute():
            return compute(board, x, x.op)
        case Transfer():
            return send(board, x, x.op) if x.verb is Verb.SEND else receive(board, x, x.op)
        case Collective(groups=groups):
            group = next(group for group in groups if board.device in group)
            return _collective(board, x, group)
        case Update():
            return update(board, x, x.op)
        case None:
            raise AssertionError(f"{x.verb} has nothing to do")


def _collective(board: Board, x: Instruction, group: tuple[int, ...]) -> Act:
    match x.role:
        case ExtraRole.EXCHANGED | ExtraRole.PARTIAL:
            return exchange(board, x, group)
        case ExtraRole.REDUCED:
            return reduce(board, x)
        case ExtraRole.GATHERED:
            return gather(board, x)
        case ExtraRole.TOTAL:
            return total(board, x, group)
        case ExtraRole.NORM:
            return norm(board, x, group)
        case _:
            raise AssertionError(f"a collective cannot make {x.role}")


def _users(plan: Plan) -> dict[int, set[str]]:
    """The streams that use each slot."""
    found: dict[int, set[str]] = {}
    for x in plan.instructions:
        if x.verb is not Verb.FREE:
            for slot in (*x.reads, *x.writes):
                found.setdefault(slot, set()).add(x.stream)
    return found


def _tensors(content: Any) -> list[Tensor]:
    if isinstance(content, Tensor):
        return [content]
    items = content.values() if isinstance(content, dict) else content
    return [x for x in items or () if isinstance(x, Tensor)]
