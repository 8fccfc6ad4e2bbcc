"""The critical path: the chain of instructions that determines the end of a step.

The path starts at the instruction that ends last. Each step goes back to the instruction whose end
allowed this one to start: one that it waited for, the previous one on its stream, or, for a
communication, such an instruction of another participant.
"""

from __future__ import annotations

from collections.abc import Sequence

from piper.ir.grouped import grouped
from piper.ir.plan.instructions import COMMUNICATING
from piper.ir.plan.plan import Plan
from piper.view.runs import Spans

PathStep = tuple[int, int]
"""A device, and the index of an instruction among its spans."""


def critical(plans: Sequence[Plan], spans: Sequence[Spans]) -> set[PathStep]:
    """The steps on the path; ``plans`` and ``spans`` have one entry per device."""
    before = [_before(plan, one) for plan, one in zip(plans, spans, strict=True)]
    participants = grouped(
        (x.node, (device, i))
        for device, (plan, one) in enumerate(zip(plans, spans, strict=True))
        for i, x in enumerate(plan.instructions[pc] for pc in one.pcs)
        if x.verb in COMMUNICATING
    )
    every = [(one.end[i], d, i) for d, one in enumerate(spans) for i in range(len(one.pcs))]
    if not every:
        return set()
    _, device, i = max(every)
    path: set[PathStep] = set()
    step: PathStep | None = (device, i)
    while step is not None and step not in path:
        path.add(step)
        device, i = step
        x = plans[device].instructions[spans[device].pcs[i]]
        ends = participants[x.node] if x.verb in COMMUNICATING else [step]
        together = [s for s in ends if _overlap(spans, s, step)]
        path.update(s for s in together if s[0] == device)
        earlier = [(d, b) for d, j in together for b in before[d][j]]
        earlier = [s for s in earlier if s not in path]
        step = max(earlier, key=lambda s: spans[s[0]].end[s[1]], default=None)
    return path


def _overlap(spans: Sequence[Spans], a: PathStep, b: PathStep) -> bool:
    """Whether two participants of a communication may be in one instance: they overlap in time."""
    one, other = spans[a[0]], spans[b[0]]
    return one.start[a[1]] <= other.end[b[1]] and other.start[b[1]] <= one.end[a[1]]


def _before(plan: Plan, spans: Spans) -> list[list[int]]:
    """The predecessors of each instruction: the previous one on its stream, its waits, and the one
    issued right before it, if that ended before this started."""
    at = {pc: i for i, pc in enumerate(spans.pcs)}
    last: dict[str, int] = {}
    before: list[list[int]] = []
    for i, pc in enumerate(spans.pcs):
        x = plan.instructions[pc]
        row = [at[w] for w in x.waits if w in at]
        if x.stream in last:
            row.append(last[x.stream])
        if i and spans.end[i - 1] <= spans.start[i]:
            row.append(i - 1)
        before.append(row)
        last[x.stream] = i
    return before
