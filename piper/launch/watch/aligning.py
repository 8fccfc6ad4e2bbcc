"""Corrects the measured times of communications with the measurements of all participants.

A device records when it reached a communication and when it saw the end. The time between includes
waiting for peers. With all devices' records the true start is known: a communication starts when
its last participant arrives. The sender of a message does not see when it arrived; the receiver
does.
"""

from __future__ import annotations

from collections.abc import Mapping

from piper.ir.ops import Collective, Transfer
from piper.ir.plan.instances import instances
from piper.ir.plan.instructions import Verb
from piper.program.program import Program
from piper.runtime.streams.recording import Measured

MeasuredStep = Mapping[int, tuple[Measured, ...]]
"""By device, the instructions of its plan with their start and end times, in seconds on a clock
that all devices share."""


def aligned(program: Program, step: MeasuredStep) -> MeasuredStep:
    """``step`` with every communication starting when its last participant arrives, and every
    message ending when it is received. Each stream keeps its order: no communication starts before
    the previous one ends."""
    rows = {device: list(row) for device, row in step.items()}
    at: dict[tuple[int, int, Verb], int] = {}
    nodes: dict[int, Transfer | Collective] = {}
    for device, row in step.items():
        instructions = program.plan_of(device).instructions
        for i, one in enumerate(row):
            x = instructions[one.pc]
            if isinstance(x.op, Transfer | Collective):
                at[x.node, device, x.verb] = i
                nodes[x.node] = x.op
    for node, op in nodes.items():
        for participants in instances(op):
            present = [(d, at[node, d, verb], verb) for d, verb in participants if d in rows]
            start = max(rows[d][i].start for d, i, _ in present)
            arrived = [rows[d][i].end for d, i, verb in present if verb is Verb.RECV]
            for d, i, verb in present:
                end = max(arrived) if verb is Verb.SEND and arrived else rows[d][i].end
                begun = min(start, end)
                rows[d][i] = rows[d][i]._replace(start=begun, end=end)
    return {device: _in_order(program, device, row) for device, row in rows.items()}


def _in_order(program: Program, device: int, row: list[Measured]) -> tuple[Measured, ...]:
    instructions = program.plan_of(device).instructions
    until: dict[str, float] = {}
    ordered = []
    for measured in row:
        x = instructions[measured.pc]
        if isinstance(x.op, Transfer | Collective):
            start = max(measured.start, until.get(x.stream, measured.start))
            measured = measured._replace(start=start, end=max(start, measured.end))
            until[x.stream] = measured.end
        ordered.append(measured)
    return tuple(ordered)
