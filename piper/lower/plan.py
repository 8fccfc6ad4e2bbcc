"""One plan for each class of devices: small frozen instructions over numbered slots.

A plan is all a worker needs besides the programs and its state: what to run in which order on
which stream with whom, what to wait for, which slots are read, written, added to and freed. It
prints one instruction a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from piper.codec import COLUMNS, Format, MalformedError, decode, encode, parsed
from piper.errors import PiperError
from piper.ir.dag import Group, Op
from piper.ir.values import ExtraRole


class Verb(Enum):
    COMPUTE = "compute"
    SEND = "send"
    RECV = "recv"
    COLLECTIVE = "collective"
    UPDATE = "update"
    ADD = "add"
    FREE = "free"


_FORMAT = Format("plan", 1)
COMMUNICATING = (Verb.SEND, Verb.RECV, Verb.COLLECTIVE)


def plain_stream(name: str) -> str:
    """A stream as directives call it: sending and receiving are two of a plan's."""
    return name.removesuffix("/send").removesuffix("/recv")


class Given(NamedTuple):
    """A slot that holds a tensor of the batch when the step begins."""

    slot: int
    value: int
    """Which of the model's values it is."""
    microbatch: int
    group: Group
    """The devices that share it, each a part of the rows."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One thing that a device does. ``waits`` are places of instructions that must be done before:
    of other streams, since order within a stream is implied; and of its own where what that one
    holds must be let go first."""

    verb: Verb
    node: int
    name: str
    stream: str
    op: Op | None = None
    """What is done, with whom; None for a free."""
    role: ExtraRole | None = None
    """What a communication makes, or, for PARTIAL, takes."""
    of: int = 0
    """The model's value, or the bucket, that a communication is about."""
    group: Group = ()
    """The devices among whom the rows of what is computed are divided."""
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    adds: tuple[int, ...] = ()
    """Those of ``writes`` that hold something already, to which the result is added."""
    waits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What the devices of one class do in one step."""

    devices: Group
    instructions: tuple[Instruction, ...] = field(metadata=COLUMNS)
    given: tuple[Given, ...]
    slot_bytes: tuple[int, ...]

    def __str__(self) -> str:
        head = f"plan of devices {','.join(map(str, self.devices))}"
        return "\n".join([head, *(f"{i:>4} {_line(x)}" for i, x in enumerate(self.instructions))])

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data, in which what instructions have in common is written once."""
        return _FORMAT.headed(encode(Plan, self))

    @staticmethod
    def from_json(data: str | Mapping[str, Any]) -> Plan:
        """The plan that ``to_json`` wrote."""
        try:
            content = _FORMAT.content(parsed(data) if isinstance(data, str) else data)
            found: Plan = decode(Plan, content)
        except MalformedError as error:
            raise PiperError(f"the plan cannot be read: {error}") from None
        return found


def awaited(plan: Plan) -> list[tuple[int, ...]]:
    """For each instruction the places of all that must be complete before it starts: what it waits
    for, and the communications that bring what it reads or adds to, on its own stream too."""
    writers: dict[int, int] = {}
    found: list[tuple[int, ...]] = []
    for place, x in enumerate(plan.instructions):
        if x.verb is Verb.FREE:
            found.append(())
            continue
        brought = {writers[s] for s in (*x.reads, *x.adds) if s in writers}
        found.append(tuple(sorted({*x.waits, *brought})))
        if x.verb in COMMUNICATING:
            writers |= dict.fromkeys(x.writes, place)
    return found


def crossed(plan: Plan) -> list[tuple[int, ...]]:
    """The same without those on its own stream, whose order is enough."""
    return [
        tuple(w for w in waits if plan.instructions[w].stream != x.stream)
        for x, waits in zip(plan.instructions, awaited(plan), strict=True)
    ]


def completed(plan: Plan) -> list[tuple[int, ...]]:
    """For each instruction, the communications that are taken to their end just before it; those
    that nobody waits for are, at the end of the step."""
    under_way: set[int] = set()
    found: list[tuple[int, ...]] = []
    for place, (x, waits) in enumerate(zip(plan.instructions, awaited(plan), strict=True)):
        found.append(tuple(w for w in waits if w in under_way))
        under_way.difference_update(waits)
        if x.verb in COMMUNICATING:
            under_way.add(place)
    return found


def freed(plan: Plan) -> list[list[int]]:
    """For each instruction the slots that are freed right after it."""
    found: list[list[int]] = [[] for _ in plan.instructions]
    last = 0
    for place, x in enumerate(plan.instructions):
        if x.verb is Verb.FREE:
            found[last] += x.reads
        else:
            last = place
    return found


def updated(plan: Plan, *, whole: bool) -> dict[int, tuple[Instruction, ...]]:
    """By place, the updates for which an optimizer's step is called there: each for itself, or,
    of an optimizer that steps as a ``whole``, all of them with the last."""
    found = [(i, x) for i, x in enumerate(plan.instructions) if x.verb is Verb.UPDATE]
    if whole and found:
        return {i: () for i, _ in found[:-1]} | {found[-1][0]: tuple(x for _, x in found)}
    return {i: (x,) for i, x in found}


def _line(x: Instruction) -> str:
    if x.verb is Verb.FREE:
        return f"free s{x.reads[0]}"
    reads = " ".join(f"s{s}" for s in x.reads)
    writes = " ".join(f"+s{s}" if s in x.adds else f"s{s}" for s in x.writes)
    waits = f" waits {' '.join(map(str, x.waits))}" if x.waits else ""
    what = x.name.removeprefix("send ").removeprefix("update ").removeprefix("add ")  # the verb
    return f"[{x.stream}] {x.verb.value} {what}: {reads} -> {writes}{waits}"
