"""The critical path: the instructions that the end of a step waited for, one after another.

From the instruction that ends last, always back to the one whose end let it start: one that it
waited for, the one before it on its stream, or, for a communication, the same of another
participant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from piper.ir.plan.instructions import COMMUNICATING
from piper.ir.plan.plan import Plan

PathStep = tuple[int, int]
"""A device, and the index of an instruction among its spans."""


class TimedSpans(Protocol):
    """When the instructions of a device ran."""

    @property
    def pcs(self) -> Sequence[int]: ...
    @property
    def start(self) -> Sequence[float]: ...
    @property
    def end(self) -> Sequence[float]: ...


def critical(plans: Sequence[Plan], spans: Sequence[TimedSpans]) -> set[PathStep]:
    """The steps on the path; ``plans`` and ``spans`` are those of each device."""
    before = [_before(plan, one) for plan, one in zip(plans, spans, strict=True)]
    participants: dict[int, list[PathStep]] = {}
    for device, (plan, one) in enumerate(zip(plans, spans, strict=True)):
        for i, pc in enumerate(one.pcs):
            x = plan.instructions[pc]
            if x.verb in COMMUNICATING:
                participants.setdefault(x.node, []).append((device, i))
    every = [(one.end[i], d, i) for d, one in enumerate(spans) for i in range(len(one.pcs))]
    if not every:
        return set()
    _, device, i = max(every)
    found: set[PathStep] = set()
    step: PathStep | None = (device, i)
    while step is not None and step not in found:
        found.add(step)
        device, i = step
        x = plans[device].instructions[spans[device].pcs[i]]
        ends = participants[x.node] if x.verb in COMMUNICATING else [step]
        together = [s for s in ends if _overlap(spans, s, step)]
        found.update(s for s in together if s[0] == device)
        earlier = [(d, b) for d, j in together for b in before[d][j]]
        earlier = [s for s in earlier if s not in found]
        step = max(earlier, key=lambda s: spans[s[0]].end[s[1]], default=None)
    return found


def _overlap(spans: Sequence[TimedSpans], a: PathStep, b: PathStep) -> bool:
    """Whether two ends of a communication may be of one instance."""
    one, other = spans[a[0]], spans[b[0]]
    return one.start[a[1]] <= other.end[b[1]] and other.start[b[1]] <= one.end[a[1]]


def _before(plan: Plan, spans: TimedSpans) -> list[list[int]]:
    """For each instruction those that it could not start before: the last on its stream, those it
    waits for, and the last that was issued before it and ended before it started."""
    at = {pc: i for i, pc in enumerate(spans.pcs)}
    last: dict[str, int] = {}
    found: list[list[int]] = []
    for i, pc in enumerate(spans.pcs):
        x = plan.instructions[pc]
        row = [at[w] for w in x.waits if w in at]
        if x.stream in last:
            row.append(last[x.stream])
        if i and spans.end[i - 1] <= spans.start[i]:
            row.append(i - 1)
        found.append(row)
        last[x.stream] = i
    return found
