"""Describes the instruction of a stuck device and the other devices that take part in it."""

from __future__ import annotations

from piper.base.units import listed
from piper.ir.ops import Collective, Transfer
from piper.ir.overlaps import received_by, sent_by
from piper.ir.plan.instructions import Instruction, Verb
from piper.ir.plan.plan import Plan


def peers_of(x: Instruction, device: int) -> tuple[int, ...]:
    """The other devices that take part in an instruction of ``device``."""
    match x.op:
        case Transfer() as op if x.verb is Verb.SEND:
            participants = [part.peer for part in sent_by(op, device)]
        case Transfer() as op:
            participants = [part.peer for part in received_by(op, device)]
        case Collective(groups=groups):
            participants = list(next(group for group in groups if device in group))
        case _:
            participants = []
    return tuple(sorted({*participants} - {device}))


def described(plan: Plan, pc: int, device: int) -> str:
    """An instruction of a device and its peers, as text for errors."""
    x = plan.instructions[pc]
    peers = peers_of(x, device)
    text = f"instruction {pc} ({x.name})"
    return f"{text} with {devices(peers)}" if peers else text


def devices(numbers: tuple[int, ...]) -> str:
    """Device numbers as text for errors; of many, the first eight."""
    if len(numbers) == 1:
        return f"device {numbers[0]}"
    return f"devices {listed(numbers[:8], len(numbers))}"
