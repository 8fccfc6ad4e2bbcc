"""What can be said of a device that does not go on: its instruction, and who takes part in it."""

from __future__ import annotations

from piper.ir.ops import Collective, Transfer
from piper.ir.overlaps import received_by, sent_by
from piper.ir.plan.instructions import Instruction, Verb
from piper.ir.plan.plan import Plan


def peers_of(x: Instruction, device: int) -> tuple[int, ...]:
    """The other devices that take part in an instruction of ``device``."""
    match x.op:
        case Transfer() as op if x.verb is Verb.SEND:
            found = [part.peer for part in sent_by(op, device)]
        case Transfer() as op:
            found = [part.peer for part in received_by(op, device)]
        case Collective(groups=groups):
            found = list(next(group for group in groups if device in group))
        case _:
            found = []
    return tuple(sorted({*found} - {device}))


def described(plan: Plan, pc: int, device: int) -> str:
    """An instruction of a device, with whom it takes part."""
    x = plan.instructions[pc]
    peers = peers_of(x, device)
    text = f"instruction {pc} ({x.name})"
    return f"{text} with {devices(peers)}" if peers else text


def devices(numbers: tuple[int, ...]) -> str:
    """Devices as errors call them; of many, the first few."""
    if len(numbers) == 1:
        return f"device {numbers[0]}"
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"devices {', '.join(map(str, numbers[:8]))}{more}"
