"""The measured times of every instruction on every device, and the figures derived from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from piper.base.units import bytes_text, seconds_text
from piper.cost.device_speeds import device_speeds
from piper.cost.recorded import Recorded
from piper.cost.tasks import Task, Tasks, Work
from piper.ir.dag.dag import name_of
from piper.ir.dag.sizes import Sizes
from piper.ir.plan.instructions import Verb
from piper.launch.watch.aligning import MeasuredStep, aligned
from piper.program.program import Program
from piper.runtime.streams.kernels import Kernel
from piper.view.busy import Busy, Exposure, Span, all_to_all, busy_of
from piper.view.perfetto import Inner
from piper.view.runs import Run, Spans
from piper.view.shown import Shown
from piper.view.spans import run_of


@dataclass(frozen=True)
class Profile(Shown):
    """The measurements of one or more steps."""

    program: Program = field(repr=False)
    steps: tuple[MeasuredStep, ...] = field(repr=False)
    kernels: Mapping[int, tuple[Kernel, ...]] = field(default_factory=dict, repr=False)
    """By device, the kernels of the last step, if requested."""

    @cached_property
    def measured(self) -> MeasuredStep:
        """The step with the median time; with kernels the last one, to which they belong."""
        if self.kernels:
            return self.steps[-1]
        return sorted(self.steps, key=_seconds)[(len(self.steps) - 1) // 2]

    @property
    def seconds(self) -> float:
        """From the start of the first instruction to the end of the last."""
        return _seconds(self.measured)

    @cached_property
    def spans(self) -> Mapping[int, list[Span]]:
        """By device, the measured step as spans of DAG nodes."""
        return {
            device: [Span(nodes[one.pc], one.start, one.end) for one in self.measured[device]]
            for device in sorted(self.measured)
            for nodes in [[x.node for x in self.program.plan_of(device).instructions]]
        }

    @property
    def all_to_all(self) -> Exposure:
        """How much of the all-to-all dispatch and combine is exposed, over all devices."""
        parts = (all_to_all(self.program.dag, spans) for spans in self.spans.values())
        return sum(parts, start=Exposure(0.0, 0.0))

    @cached_property
    def busy(self) -> Mapping[int, Busy]:
        """How each device spends the step."""
        rows = zip(sorted(self.measured), self._relative, strict=True)
        return {d: busy_of(self.program.plan_of(d), row, self.seconds) for d, row in rows}

    @property
    def facts(self) -> Mapping[str, str]:
        return {
            "step": seconds_text(self.seconds),
            "bubble": f"{self.bubble:.1%}",
            "exposed communication": seconds_text(self.exposed),
            "peak memory": bytes_text(max(memory.peak for memory in self.program.memory)),
            "devices": str(len(self.busy)),
            "steps measured": str(len(self.steps)),
        }

    def to_json(self) -> dict[str, object]:
        """The figures as plain data."""
        return {
            "seconds": self.seconds,
            "steps_seconds": [_seconds(step) for step in self.steps],
            "devices": {device: busy.to_json() for device, busy in self.busy.items()},
        }

    def run(self, title: str | None = None) -> Run:
        devices = sorted(self.measured)
        plan_at = {d: i for i, plan in enumerate(self.program.plans) for d in plan.devices}
        return run_of(
            self.program.lowered_step,
            [(f"device {device}", plan_at[device]) for device in devices],
            self._relative,
            title=title or "measured",
            facts=self.facts,
            limits=[self.program.settings.memory_limit] * len(devices),
        )

    @cached_property
    def recorded(self) -> Recorded:
        """Times of passes and communications, for simulating other strategies. A late receiver does
        not know when a message arrived, so the fastest message of each size counts."""
        return self._recorded({})

    @cached_property
    def speeds(self) -> dict[int, float]:
        """How fast each device ran passes; the fastest has 1."""
        return device_speeds(
            (device, (task.work.which, task.kernels, task.work.rows), taken)
            for device, task, _, taken in self._tasks()
            if task.work is not None
        )

    @cached_property
    def by_device(self) -> Recorded:
        """``recorded`` for devices of unequal speed: each pass takes as long as the speed of its
        device says."""
        return self._recorded(self.speeds)

    def _recorded(self, speeds: Mapping[int, float]) -> Recorded:
        passes: list[tuple[Work, int, float]] = []
        moved: list[tuple[str, int, int, float]] = []
        sends: dict[Task, float] = {}
        for device, task, verb, taken in self._tasks():
            if task.work is not None:
                passes.append((task.work, task.flops, taken * speeds.get(device, 1.0)))
            elif verb is Verb.RECV:
                sends[task] = min(taken, sends.get(task, taken))
            elif verb is not Verb.SEND:
                moved.append((task.kind.value, task.members, task.nbytes, taken))
        moved += [(task.kind.value, task.members, task.nbytes, s) for task, s in sends.items()]
        return Recorded.of(passes, moved, speeds)

    def _spent(self) -> list[tuple[str, int, Busy]]:
        return [(f"device {device}", 1, busy) for device, busy in self.busy.items()]

    @cached_property
    def _begin(self) -> float:
        return min(one.start for row in self.measured.values() for one in row)

    @cached_property
    def _relative(self) -> list[Spans]:
        """By device, times relative to the start of the step; a communication starts when all its
        participants have arrived."""
        first = self._begin
        return [
            Spans(
                tuple(one.pc for one in row),
                tuple(one.start - first for one in row),
                tuple(one.end - first for one in row),
            )
            for _, row in sorted(aligned(self.program, self.measured).items())
        ]

    def _inner(self) -> Iterator[Inner]:
        devices = sorted(self.measured)
        for device, row in self.kernels.items():
            instructions = self.program.plan_of(device).instructions
            for one in row:
                node = name_of(self.program.dag, instructions[one.pc].node)
                times = one.start - self._begin, one.end - self._begin
                yield Inner(devices.index(device), one.row, one.name, node, *times)

    def _tasks(self) -> Iterator[tuple[int, Task, Verb, float]]:
        """Each instruction's device, task, verb and seconds."""
        dag = self.program.dag
        tasks = Tasks(dag, Sizes(dag, self.program.models))
        for step in self.steps:
            for device, row in aligned(self.program, step).items():
                instructions = self.program.plan_of(device).instructions
                for one in row:
                    x = instructions[one.pc]
                    yield device, tasks.of(dag.nodes[x.node]), x.verb, one.end - one.start


def _seconds(step: MeasuredStep) -> float:
    every = [measured for row in step.values() for measured in row]
    return max(x.end for x in every) - min(x.start for x in every)
