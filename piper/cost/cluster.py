"""The hardware of a program: devices, the links between them, and their contention.

A cluster is a list of machines. Devices are numbered consecutively over the machines, as in
programs. Each device has a link to the other devices of its machine and one to other machines. The
link between two given machines can be set separately.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise
from pathlib import Path

import torch

from piper.base.errors import PiperError
from piper.base.units import counted
from piper.cost import cluster_toml, presets
from piper.cost.hardware import Device, Link, Machine, Sharing
from piper.cost.link_time import Way, communication_seconds
from piper.cost.rough_costs import Costs
from piper.cost.tasks import Task, TaskKind
from piper.ir.mesh import MOST_DEVICES
from piper.ir.ops import Group


@dataclass(frozen=True)
class Cluster:
    """Machines and their links: a cost model that knows every task."""

    machines: tuple[Machine, ...]
    between: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    """The link of a device of one machine to devices of another, by machine numbers, smaller first.
    The default is the slower of the two ``outside`` links."""
    sharing: Sharing = field(default_factory=Sharing)
    name: str = "cluster"

    def __post_init__(self) -> None:
        if not self.machines:
            raise PiperError("a cluster must have a machine")
        for a, b in self.between:
            if not 0 <= a < b < len(self.machines):
                raise PiperError(
                    f"cluster {self.name!r} has {len(self.machines)} machines and cannot have a "
                    f"link between {a} and {b}: give two different ones, smaller number first"
                )

    @staticmethod
    def of(
        kind: str | Device,
        devices: int = 8,
        machines: int = 1,
        *,
        inside: str | Link | None = None,
        outside: str | Link | None = None,
        sharing: Sharing | None = None,
        name: str | None = None,
    ) -> Cluster:
        """``machines`` equal machines of ``devices`` equal devices: a preset or your own device.

        ``inside`` is the link between devices of one machine; its default depends on the device.
        ``outside`` is the link of each device to other machines, by default InfiniBand-NDR.
        """
        if min(devices, machines) < 1:
            raise PiperError(f"a cluster of {machines} machines of {devices} devices has none")
        if devices * machines > MOST_DEVICES:
            raise PiperError(
                f"a cluster of {machines} machines of {devices} devices is too large: give at most "
                f"{MOST_DEVICES} devices"
            )
        device = presets.device(kind)
        near = presets.inside(device) if inside is None else presets.link(inside)
        far = presets.link(presets.OUTSIDE if outside is None else outside)
        return Cluster(
            machines=(Machine((device,) * devices, near, far),) * machines,
            sharing=sharing or presets.sharing([device]),
            name=name or f"{machines} x {devices} {device.name}",
        )

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """The cluster that a TOML file describes."""
        parts = cluster_toml.read(path)
        try:
            return Cluster(*parts)
        except PiperError as error:
            raise PiperError(f"{path}: {error}") from None

    def to_toml(self) -> str:
        """The cluster as a TOML file that ``load`` reads."""
        parts = cluster_toml.Described(self.machines, self.between, self.sharing, self.name)
        return cluster_toml.write(parts)

    @cached_property
    def _places(self) -> tuple[tuple[int, int], ...]:
        """The machine of each device, and the device's index there."""
        return tuple((m, i) for m, box in enumerate(self.machines) for i in range(len(box.devices)))

    def __len__(self) -> int:
        return len(self._places)

    def machine(self, device: int) -> int:
        """The machine of a device."""
        return self._places[device][0]

    def device(self, number: int) -> Device:
        machine, place = self._places[number]
        return self.machines[machine].devices[place]

    def refuse_smaller(self, devices: Sequence[int]) -> None:
        """Refuse a program on ``devices`` that the cluster does not have."""
        missing = [d for d in devices if not 0 <= d < len(self)]
        if missing:
            raise PiperError(
                f"the program runs on devices up to number {max(devices)}, and cluster "
                f"{self.name!r} has {len(self)}: give it more machines, or the strategy fewer "
                "devices"
            )

    def link(self, a: int, b: int) -> Link:
        """The link of one device of machine ``a`` to machine ``b``."""
        if a == b:
            return self.machines[a].inside
        given = self.between.get((min(a, b), max(a, b)))
        if given is not None:
            return given
        ends = self.machines[a].outside, self.machines[b].outside
        bandwidth, latency = min(e.bandwidth for e in ends), max(e.latency for e in ends)
        return Link(bandwidth, latency, max(e.crowding for e in ends))

    def duration(self, task: Task, devices: Group) -> float:
        """Seconds of ``task``, from its operations and memory traffic, or from the bytes it sends
        over links."""
        self.refuse_smaller(devices)
        if task.kind in (TaskKind.PASS, TaskKind.UPDATE, TaskKind.ADD):
            kinds = {id(device): device for device in map(self.device, devices)}.values()
            return max(d.seconds(task.kernels, task.dtype) for d in kinds)
        if task.kind is TaskKind.COPY:
            return max(self.device(d).copy_seconds(task.nbytes) for d in devices)
        return communication_seconds(task.kind, self.way(devices), task.nbytes)

    def way(self, group: Group) -> Way:
        """The links between the devices of ``group``."""
        if group not in self._ways:
            self._ways[group] = self._way(group)
        return self._ways[group]

    @cached_property
    def _ways(self) -> dict[Group, Way]:
        return {}

    def _way(self, group: Group) -> Way:
        """The devices of a machine share the traffic to other machines: together they use all
        their outside links."""
        counts = Counter(self.machine(device) for device in group)
        machines = list(counts)
        inside = [self.machines[m].inside for m in machines if counts[m] > 1]
        near = min((link.bandwidth for link in inside), default=math.inf)
        latency = max((link.latency for link in inside), default=0.0)
        far = round_far = math.inf
        hops = sum((counts[m] - 1) * self.machines[m].inside.latency for m in machines)
        far_hops = []
        for a, b in self._neighbours(machines):
            link = self.link(a, b)
            bandwidth = link.among(len(machines))
            far = min(far, bandwidth)
            round_far = min(round_far, bandwidth * min(counts[a], counts[b]))
            latency = max(latency, link.latency)
            far_hops.append(link.latency)
        if far_hops:
            hops += statistics.mean(far_hops) * len(machines)
        least = min(counts.values())
        peers = len(group) - 1
        return Way(
            members=len(group),
            bandwidth=min(near, round_far),
            latency=latency,
            hop=hops / max(1, peers if not far_hops else len(group)),
            near=(least - 1) / peers if peers else 1.0,
            near_bandwidth=near,
            far_bandwidth=far,
        )

    def _neighbours(self, machines: Sequence[int]) -> list[tuple[int, int]]:
        """Pairs of machines that communicate: neighbours in a ring, or all pairs if ``between``
        has links."""
        if len(machines) < 2:
            return []
        if self.between:
            return list(combinations(machines, 2))
        return [*pairwise(machines), (machines[-1], machines[0])]

    def scaled(self, *, compute: float = 1.0, bandwidth: float = 1.0) -> Cluster:
        """This cluster with devices that compute ``compute`` times as fast, and links of so much
        more ``bandwidth``."""

        def link(one: Link) -> Link:
            return replace(one, bandwidth=one.bandwidth * bandwidth)

        known = {id(d): d for machine in self.machines for d in machine.devices}
        devices = {
            i: replace(d, flops={k: n * compute for k, n in d.flops.items()})
            for i, d in known.items()
        }
        machines = tuple(
            Machine(tuple(devices[id(d)] for d in m.devices), link(m.inside), link(m.outside))
            for m in self.machines
        )
        between = {ends: link(one) for ends, one in self.between.items()}
        return replace(self, machines=machines, between=between)

    def speeds(self, dtype: torch.dtype = torch.float32) -> dict[int, float]:
        """How fast each device computes large products of ``dtype``; the fastest has 1."""
        peaks = [self.device(number).fastest(dtype) for number in range(len(self))]
        return {number: peak / max(peaks) for number, peak in enumerate(peaks)}

    def costs(self, dtype: torch.dtype = torch.float32) -> Costs:
        """The cluster as three rough figures, to order what a strategy leaves open."""
        devices = {id(d): d for m in self.machines for d in m.devices}.values()
        slowest = min(devices, key=lambda device: device.peak(dtype))
        links = [m.inside for m in self.machines if len(m.devices) > 1]
        links += [m.outside for m in self.machines if len(self.machines) > 1]
        links += self.between.values()
        return Costs(
            flops_per_second=slowest.fastest(dtype),
            bytes_per_second=min((x.bandwidth for x in links), default=slowest.bandwidth),
            overhead=max(slowest.overhead, max((x.latency for x in links), default=0.0)),
        )

    def __str__(self) -> str:
        kinds = Counter(device.name for m in self.machines for device in m.devices)
        parts = ", ".join(f"{count} x {name}" for name, count in kinds.items())
        return f"{self.name}: {counted(len(self.machines), 'machine')}, {parts}"
