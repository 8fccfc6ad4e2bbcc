"""Measured communications as they were for all participants together.

A device notes when it came to a communication and when it knew that it was over. What lies between
is partly waiting for others. Taken together, the devices know better: a communication runs from the
moment at which its last participant came. Who sends a message is not told when it has arrived; who
receives it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from piper.ir.ops import Collective, Transfer
from piper.ir.plan.instances import instances
from piper.ir.plan.instructions import Verb
from piper.program.program import Program
from piper.runtime.streams.recording import Measured

MeasuredStep = Mapping[int, tuple[Measured, ...]]
"""By device, the instructions of its plan with the time at which each began and ended, in seconds
on a clock that all devices share."""


def aligned(program: Program, step: MeasuredStep) -> MeasuredStep:
    """``step`` with every communication from when its last participant came, and messages until
    they were received. On each stream the order stays: none begins before the one before it
    ended."""
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
            found = [(d, at[node, d, verb], verb) for d, verb in participants if d in rows]
            start = max(rows[d][i].start for d, i, _ in found)
            arrived = [rows[d][i].end for d, i, verb in found if verb is Verb.RECV]
            for d, i, verb in found:
                end = max(arrived) if verb is Verb.SEND and arrived else rows[d][i].end
                begun = min(start, end)
                rows[d][i] = rows[d][i]._replace(start=begun, end=end)
    return {device: _in_order(program, device, row) for device, row in rows.items()}


def _in_order(program: Program, device: int, row: list[Measured]) -> tuple[Measured, ...]:
    instructions = program.plan_of(device).instructions
    until: dict[str, float] = {}
    found = []
    for one in row:
        x = instructions[one.pc]
        if isinstance(x.op, Transfer | Collective):
            start = max(one.start, until.get(x.stream, one.start))
            one = one._replace(start=start, end=max(start, one.end))
            until[x.stream] = one.end
        found.append(one)
    return tuple(found)
