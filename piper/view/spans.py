"""``run_of`` makes a ``Run`` from the plan, the DAG and the times of each instruction. It serves
simulated and measured steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from piper.ir.dag.dag import PASS, Node, name_of
from piper.ir.dag.sizes import Sizes
from piper.ir.ops import Collective, Compute, Transfer
from piper.ir.passes import Pass
from piper.ir.plan.instructions import Instruction, Verb
from piper.ir.plan.lowered import LoweredStep
from piper.view.critical import critical
from piper.view.runs import Event, Run, ShownDevice, Spans, StreamRow


def run_of(
    step: LoweredStep,
    devices: Sequence[tuple[str, int]],
    spans: Sequence[Spans],
    *,
    title: str,
    facts: Mapping[str, str],
    limits: Sequence[int | None],
) -> Run:
    """A step on ``devices``, each with a name and the index of its plan."""
    describe = _Describe(step)
    plans = [step.plans[plan] for _, plan in devices]
    on_path = critical(plans, spans)
    shown: list[ShownDevice] = []
    rows: list[StreamRow] = []
    events: list[Event] = []
    for number, ((name, plan), one) in enumerate(zip(devices, spans, strict=True)):
        held = one.memory(step.memory[plan].over_time)
        shown.append(ShownDevice(name, held, limits[number]))
        first = len(rows)
        instructions = step.plans[plan].instructions
        streams: dict[str, int] = {}
        for pc in one.pcs:
            streams.setdefault(instructions[pc].stream, len(streams))
        order = sorted(streams, key=lambda stream: (stream != "compute", streams[stream]))
        at = {stream: first + i for i, stream in enumerate(order)}
        rows += [StreamRow(number, stream) for stream in order]
        mine = [
            describe.event(
                instructions[pc],
                pc,
                at[instructions[pc].stream],
                one.start[i],
                one.end[i],
                (number, i) in on_path,
            )
            for i, pc in enumerate(one.pcs)
        ]
        events += sorted(mine, key=lambda event: (event.row, event.start, event.pc))
    seconds = max((max(one.end) for one in spans if one.end), default=0.0)
    return Run(title, seconds, tuple(shown), tuple(rows), tuple(events), facts)


class _Describe:
    """Makes events from the nodes and instructions of a step."""

    def __init__(self, step: LoweredStep) -> None:
        self._dag = step.dag
        self._sizes = Sizes(step.dag, step.models)
        self._stages = step.stages
        self._split = self._dag.microbatches[0] if self._dag.microbatches else ""

    def event(
        self, x: Instruction, pc: int, row: int, start: float, end: float, critical: bool
    ) -> Event:
        node = self._dag.nodes[x.node]
        op, tag = node.op, node.tags.get(self._split)
        moves = isinstance(op, Transfer | Collective) and node.writes
        return Event(
            row=row,
            start=start,
            end=end,
            name=name_of(self._dag, x.node),
            node=x.node,
            pc=pc,
            kind=_kind(node, x.verb),
            microbatch=tag if isinstance(tag, int) else None,
            stage=" ".join(f"{t} {node.tags[t]}" for t in self._stages if t in node.tags),
            directive=self._dag.history[node.made_by],
            tags=", ".join(f"{k} {_tag(v)}" for k, v in node.tags.items() if k != PASS),
            nbytes=self._sizes.moved(node) if moves else 0,
            flops=self._sizes.facts(op, node.parts).flops if isinstance(op, Compute) else 0,
            critical=critical,
        )


def _kind(node: Node, verb: Verb) -> str:
    match node.op:
        case Compute(which=which):
            return which.value
        case Collective(kind=kind):
            return kind.value
        case _:
            return verb.value


def _tag(value: int | Pass) -> str:
    return value.value if isinstance(value, Pass) else str(value)
