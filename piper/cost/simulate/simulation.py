"""``simulate``: run a program's plans on a simulated cluster.

The result is a ``Simulation``: the time of a step and of every instruction in it, for each timing
class, whose devices have equal times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from piper.base.errors import PiperError
from piper.base.units import bytes_text, seconds_text
from piper.cost.cluster import Cluster
from piper.cost.fallback import Fallback
from piper.cost.hardware import Device
from piper.cost.recorded import Recorded
from piper.cost.rough_costs import Costs, recorded_of
from piper.cost.simulate.replay import Communication, Track, replay
from piper.cost.simulate.timing_classes import (
    PlanKinds,
    TimingClass,
    TimingClasses,
    timing_classes,
)
from piper.cost.tasks import CostModel, Durations, Tasks, computed_in
from piper.ir.dag.dag import group_text
from piper.ir.dag.sizes import Sizes
from piper.ir.equal_numbers import EqualNumbers
from piper.ir.ops import Collective, Transfer
from piper.ir.plan.instructions import Verb
from piper.ir.plan.lowered import LoweredStep
from piper.ir.rules import Rest, StreamRule
from piper.view.busy import Busy, busy_of
from piper.view.runs import Run, Spans
from piper.view.shown import Shown
from piper.view.spans import run_of


@dataclass(frozen=True)
class Simulation(Shown):
    """A simulated step."""

    step: LoweredStep = field(repr=False)
    cluster: Cluster = field(repr=False)
    classes: tuple[TimingClass, ...] = field(repr=False)
    spans: tuple[Spans, ...] = field(repr=False)
    """The start and end of each instruction, by class."""

    @property
    def flops(self) -> int:
        """Operations of a step on all devices, without recomputation, however it is sharded."""
        return self.step.dag.model.flops

    @cached_property
    def seconds(self) -> float:
        return max((max(row.end) for row in self.spans if row.end), default=0.0)

    @property
    def tokens_per_second(self) -> float:
        """Elements of the first input per second: tokens, for a language model."""
        return self.step.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the model's operations as a share of the devices' peak."""
        dtype = computed_in(self.step.dag.model)
        peaks = (self.cluster.device(d).peak(dtype) for d in self.step.devices)
        return self.flops / (self.seconds * sum(peaks))

    @cached_property
    def busy(self) -> tuple[Busy, ...]:
        """The time of each class: compute, communication, idle."""
        plans = self.step.plans
        rows = zip(self.classes, self.spans, strict=True)
        return tuple(busy_of(plans[one.plan], spans, self.seconds) for one, spans in rows)

    @property
    def peak(self) -> int:
        """The highest peak memory of a device, in bytes."""
        return max(memory.peak for memory in self.step.memory)

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory."""
        rows = zip(self.step.plans, self.step.memory, strict=True)
        return all(m.peak <= self.cluster.device(d).memory for p, m in rows for d in p.devices)

    def memory(self, device: int) -> tuple[tuple[float, int], ...]:
        """The memory of a device over time: (seconds, bytes from then on)."""
        for one, spans in zip(self.classes, self.spans, strict=True):
            if device in one.devices:
                return spans.memory(self.step.memory[one.plan].over_time)
        raise PiperError(f"the program has no device {device}")

    @property
    def facts(self) -> Mapping[str, str]:
        return {
            "step": seconds_text(self.seconds),
            "tokens/s": f"{self.tokens_per_second:,.0f}",
            "MFU": f"{self.mfu:.1%}",
            "bubble": f"{self.bubble:.1%}",
            "exposed communication": seconds_text(self.exposed),
            "peak memory": bytes_text(self.peak) + ("" if self.fits else " (too much)"),
            "devices": str(len(self.step.devices)),
        }

    def to_json(self) -> dict[str, object]:
        """The figures as plain data."""
        return {
            "cluster": self.cluster.name,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "bubble": self.bubble,
            "exposed_communication_seconds": self.exposed,
            "peak_bytes": self.peak,
            "fits": self.fits,
            "devices": len(self.step.devices),
            "classes": [
                {
                    "devices": list(one.devices),
                    **busy.to_json(),
                    "peak_bytes": self.step.memory[one.plan].peak,
                    "memory_bytes": self.cluster.device(one.devices[0]).memory,
                }
                for one, busy in zip(self.classes, self.busy, strict=True)
            ],
        }

    def run(self, title: str | None = None) -> Run:
        return run_of(
            self.step,
            [(f"device {group_text(one.devices)}", one.plan) for one in self.classes],
            self.spans,
            title=title or f"simulated on {self.cluster.name}",
            facts=self.facts,
            limits=[self.cluster.device(one.devices[0]).memory for one in self.classes],
        )

    def _spent(self) -> list[tuple[str, int, Busy]]:
        rows = zip(self.classes, self.busy, strict=True)
        return [(f"device {group_text(x.devices)}", len(x.devices), busy) for x, busy in rows]


def simulate(step: LoweredStep, cluster: Cluster, costs: CostModel | None = None) -> Simulation:
    """Run the plans of ``step`` on ``cluster``. Times that ``costs`` knows take precedence."""
    if not isinstance(cluster, Cluster):
        raise PiperError(f"cluster={cluster!r} must be a piper.Cluster")
    if not isinstance(costs, CostModel | None):
        raise PiperError(
            f"costs={costs!r} must be piper.Recorded or another cost model, which has a method "
            "duration(task, devices), or None"
        )
    cluster.refuse_smaller(step.devices)
    dag = step.dag
    sizes = Sizes(dag, step.models)
    tasks = Tasks(dag, sizes, fused=step.fused, optimizer=step.optimizer.state)
    durations = Durations(tasks, cluster if costs is None else Fallback(costs, cluster))
    # measured speeds and custom cost models may give equal devices of the cluster different times
    recorded = recorded_of(costs)
    uneven = recorded is not None and bool(recorded.speeds)
    custom = not isinstance(costs, Costs | Recorded | Cluster | None)
    kinds = [PlanKinds(plan, dag) for plan in step.plans]
    classes = timing_classes(step.plans, kinds, cluster, apart=uneven or custom)
    tracks, comms = _tracks(step, kinds, classes, cluster, tasks, durations)
    replay(tracks, comms, cluster.sharing)
    spans = tuple(
        Spans(tuple(range(len(track.start))), tuple(track.start), tuple(track.end))
        for track in tracks
    )
    return Simulation(step, cluster, classes.classes, spans)


def _tracks(
    step: LoweredStep,
    kinds: Sequence[PlanKinds],
    classes: TimingClasses,
    cluster: Cluster,
    tasks: Tasks,
    durations: Durations,
) -> tuple[list[Track], list[Communication]]:
    """The tracks of all classes, and their communications."""
    comms: list[Communication] = []
    numbers: dict[tuple[int, int], int] = {}
    parties: EqualNumbers[frozenset[tuple[int, Verb]]] = EqualNumbers()
    tracks = []
    for number, one in enumerate(classes.classes):
        mine, device = kinds[one.plan], cluster.device(one.devices[0])
        streams: dict[tuple[str, Verb | None], int] = {}
        shares: list[tuple[int, float, float, Communication | None, int]] = []
        for verb, node in mine.examples:
            seconds, comm, party = 0.0, None, -1
            if verb is Verb.COPY:  # runs beside the host, without other participants
                comm = Communication(durations.on(node, one.devices[:1]), 1, 0)
            elif isinstance(node.op, Transfer | Collective):
                participants, instance = classes.instance(number, verb, node.op)
                party = parties.of(participants)
                comm = Communication(
                    durations.on(node, instance.devices),
                    len(participants),
                    2 if instance.way.outside else 1,
                    _share(step.streams, node.stream, device),
                )
            else:
                seconds = durations.on(node, one.devices[:1])
            apart = verb if verb in (Verb.SEND, Verb.RECV) else None  # streams of their own
            stream = streams.setdefault((node.stream, apart), len(streams))
            issue = device.issue * tasks.of(node).launches
            shares.append((stream, issue, seconds, comm, party))
        track = Track([], mine.columns.waits.tuples(), [], [], [], device.synchronous)
        for at, kind in zip(mine.columns.nodes.tolist(), mine.of, strict=True):
            stream, issue, seconds, comm, party = shares[kind]
            index = -1
            if comm is not None:
                index = len(comms) if party < 0 else numbers.setdefault((at, party), len(comms))
                if index == len(comms):
                    comms.append(comm)
            track.streams.append(stream)
            track.seconds.append(seconds)
            track.comms.append(index)
            track.issue.append(issue)
        tracks.append(track)
    return tracks, comms


def _share(rules: Mapping[str, StreamRule], stream: str, device: Device) -> float | None:
    """The share of the SMs of ``device`` that is reserved for ``stream``, if any: as requested, not
    rounded up to the sizes that a GPU supports."""
    sms = rules.get(stream, StreamRule()).sms
    if sms is None or device.sms is None:
        return None
    if isinstance(sms, Rest):
        taken = sum(rule.sms for rule in rules.values() if isinstance(rule.sms, int))
        sms = device.sms - taken
        if sms < 1:
            raise PiperError(
                f"stream {stream!r} asks for the rest of the SMs, but other streams ask for "
                f"{taken}, and {device.name} has {device.sms}: give stream(..., sms=) smaller "
                "numbers"
            )
    return min(1.0, sms / device.sms)
