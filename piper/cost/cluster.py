"""What a program runs on: devices, the links between them, and how they disturb one another.

A cluster is a row of machines. Devices are numbered through them, as programs number theirs. Each
device has a link to the others of its machine and one to the outside; a link between two machines
may be given by itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, pairwise
from pathlib import Path

import torch

from piper.base.errors import PiperError
from piper.base.units import counted
from piper.cost.link_time import Way, communication_seconds
from piper.cost.rough_costs import Costs
from piper.cost.tasks import Task, TaskKind
from piper.ir.mesh import MOST_DEVICES
from piper.ir.ops import Group


@dataclass(frozen=True, slots=True)
class Link:
    """A way from a device to others."""

    bandwidth: float
    """Bytes a second, each way."""
    latency: float
    """Seconds that the first byte takes."""

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not 0 <= self.latency < math.inf:
            raise PiperError(f"{self}: bandwidth must be positive, and latency not negative")


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device."""

    name: str
    flops: Mapping[torch.dtype, float]
    """Operations a second at best, by what is computed in; a dtype that is not listed is computed
    as fast as fp32, or as the first that is."""
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes of its memory, read or written in a second."""
    efficiency: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    """The share of ``flops`` that a pass of so many operations reaches, by number of operations;
    in between, by the logarithm."""
    overhead: float = 0.0
    """Seconds that every instruction takes, whatever it does."""
    issue: float = 0.0
    """Seconds until the host has issued one instruction and can issue the next."""
    synchronous: bool = False
    """Whether the host itself computes, as on a CPU: then whatever keeps one instruction keeps all
    that are issued after it. Otherwise streams alone do."""
    host_bandwidth: float = 24e9
    """Bytes a second from its memory to the host's, unless they are the same."""
    sms: int | None = None
    """Multiprocessors of a GPU, of which a stream may have a share."""

    def __post_init__(self) -> None:
        rates = [*self.flops.values(), self.bandwidth, self.host_bandwidth, self.memory]
        if not rates or not all(rate > 0 for rate in rates) or not self.flops:
            raise PiperError(f"device {self.name!r}: flops, memory and bandwidth must be positive")
        points = self.efficiency
        good = points and all(n > 0 and 0 < share <= 1 for n, share in points)
        if not good or list(points) != sorted(points):
            raise PiperError(
                f"device {self.name!r}: efficiency must be pairs of operations and a share of at "
                f"most 1, in growing order, not {points}"
            )
        if min(self.overhead, self.issue) < 0:
            raise PiperError(f"device {self.name!r}: overhead and issue must not be negative")

    def peak(self, dtype: torch.dtype) -> float:
        """Operations a second, at best."""
        found = self.flops.get(dtype) or self.flops.get(torch.float32)
        return found or next(iter(self.flops.values()))

    def reached(self, flops: float) -> float:
        """The share of the peak that a pass of so many operations reaches."""
        points = self.efficiency
        if flops <= points[0][0]:
            return points[0][1]
        for (low, start), (high, end) in pairwise(points):
            if flops < high:
                place = math.log(flops / low) / math.log(high / low)
                return start + place * (end - start)
        return points[-1][1]

    def seconds(self, flops: int, nbytes: int, dtype: torch.dtype) -> float:
        """How long something of so many operations on so many bytes takes."""
        computing = flops / (self.peak(dtype) * self.reached(flops)) if flops else 0.0
        return self.overhead + max(computing, nbytes / self.bandwidth)

    def copy_seconds(self, nbytes: int) -> float:
        """How long a copy of so many bytes to the host takes."""
        memory = nbytes * 2 / self.bandwidth if self.synchronous else nbytes / self.host_bandwidth
        return self.overhead + memory


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices side by side."""

    devices: tuple[Device, ...]
    inside: Link
    """Of each device, to the others of the machine."""
    outside: Link
    """Of each device, to other machines."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise PiperError("a machine must have a device")


@dataclass(frozen=True, slots=True)
class Sharing:
    """How much longer things take beside others, as a share of their own time."""

    links: float = 0.46
    """A communication, for each other one on the same link of a device. 0.46 is what the
    all-to-all of experts was measured to lose beside a reduction; 1 would be half of the link
    each."""
    compute: float = 0.0
    """A computation, while its device communicates."""
    communication: float = 0.0
    """A communication, while a device of its participants computes."""

    def __post_init__(self) -> None:
        if min(self.links, self.compute, self.communication) < 0:
            raise PiperError(f"{self}: nothing gets faster beside others; give at least 0")


@dataclass(frozen=True)
class Cluster:
    """Machines, and what is between them: a cost model that knows every task."""

    machines: tuple[Machine, ...]
    between: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    """Links of a device of one machine to those of another, smaller number first, where it is not
    the slower one of their ``outside``."""
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
        """``machines`` equal machines of ``devices`` equal devices, of a common kind or your own.

        ``inside`` is the link between devices of one machine, as is usual for the kind if it is
        not given; ``outside`` is the link of each device to other machines, InfiniBand-NDR if not.
        """
        from piper.cost import presets

        if min(devices, machines) < 1:
            raise PiperError(f"a cluster of {machines} machines of {devices} devices has none")
        if devices * machines > MOST_DEVICES:
            raise PiperError(
                f"a cluster of {machines} machines of {devices} devices is too large: give at most "
                f"{MOST_DEVICES} devices"
            )
        one = presets.device(kind)
        near = presets.inside(one) if inside is None else presets.link(inside)
        far = presets.link(presets.OUTSIDE if outside is None else outside)
        return Cluster(
            machines=(Machine((one,) * devices, near, far),) * machines,
            sharing=sharing or presets.sharing([one]),
            name=name or f"{machines} x {devices} {one.name}",
        )

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """The cluster that a TOML file describes."""
        from piper.cost import cluster_toml as toml

        return toml.read(path)

    def to_toml(self) -> str:
        """The cluster as a TOML file that ``load`` reads."""
        from piper.cost import cluster_toml as toml

        return toml.write(self)

    @cached_property
    def _places(self) -> tuple[tuple[int, int], ...]:
        """For each device its machine, and its place there."""
        return tuple((m, i) for m, one in enumerate(self.machines) for i in range(len(one.devices)))

    def __len__(self) -> int:
        return len(self._places)

    def machine(self, device: int) -> int:
        """The machine of a device."""
        return self._places[device][0]

    def device(self, number: int) -> Device:
        machine, place = self._places[number]
        return self.machines[machine].devices[place]

    def refuse_smaller(self, devices: Sequence[int]) -> None:
        """Refuse to run a program on ``devices`` that are not there."""
        missing = [d for d in devices if not 0 <= d < len(self)]
        if missing:
            raise PiperError(
                f"the program runs on devices up to number {max(devices)}, and cluster "
                f"{self.name!r} has {len(self)}: give it more machines, or the strategy fewer "
                "devices"
            )

    def link(self, a: int, b: int) -> Link:
        """From machine ``a`` to machine ``b``, of one device."""
        if a == b:
            return self.machines[a].inside
        given = self.between.get((min(a, b), max(a, b)))
        if given is not None:
            return given
        ends = self.machines[a].outside, self.machines[b].outside
        return Link(min(e.bandwidth for e in ends), max(e.latency for e in ends))

    def duration(self, task: Task, devices: Group) -> float:
        """Seconds of ``task``: from operations and bytes of memory, or from the bytes that go over
        links."""
        self.refuse_smaller(devices)
        if task.kind in (TaskKind.PASS, TaskKind.UPDATE, TaskKind.ADD):
            kinds = {id(device): device for device in map(self.device, devices)}.values()
            return max(d.seconds(task.flops, task.traffic, task.dtype) for d in kinds)
        if task.kind is TaskKind.COPY:
            return max(self.device(d).copy_seconds(task.nbytes) for d in devices)
        return communication_seconds(task.kind, self.way(devices), task.nbytes)

    def way(self, group: Group) -> Way:
        """What the devices of ``group`` have between them."""
        if group not in self._ways:
            self._ways[group] = self._way(group)
        return self._ways[group]

    @cached_property
    def _ways(self) -> dict[Group, Way]:
        return {}

    def _way(self, group: Group) -> Way:
        """Several devices of a machine that all talk to others share the work of going out:
        together they have as many links."""
        counts = Counter(self.machine(device) for device in group)
        machines = list(counts)
        inside = [self.machines[m].inside for m in machines if counts[m] > 1]
        near = min((link.bandwidth for link in inside), default=math.inf)
        latency = max((link.latency for link in inside), default=0.0)
        far = round_far = math.inf
        for a, b in self._neighbours(machines):
            link = self.link(a, b)
            far = min(far, link.bandwidth)
            round_far = min(round_far, link.bandwidth * min(counts[a], counts[b]))
            latency = max(latency, link.latency)
        least = min(counts.values())
        peers = len(group) - 1
        return Way(
            members=len(group),
            bandwidth=min(near, round_far),
            latency=latency,
            near=(least - 1) / peers if peers else 1.0,
            near_bandwidth=near,
            far_bandwidth=far,
        )

    def _neighbours(self, machines: Sequence[int]) -> list[tuple[int, int]]:
        """Pairs of machines that must talk; all of them where some have links of their own."""
        if len(machines) < 2:
            return []
        if self.between:
            return list(combinations(machines, 2))
        return [*pairwise(machines), (machines[-1], machines[0])]

    def costs(self, dtype: torch.dtype = torch.float32) -> Costs:
        """The same in three figures: enough to order what a strategy leaves open."""
        devices = {id(d): d for m in self.machines for d in m.devices}.values()
        slowest = min(devices, key=lambda device: device.peak(dtype))
        links = [m.inside for m in self.machines if len(m.devices) > 1]
        links += [m.outside for m in self.machines if len(self.machines) > 1]
        links += self.between.values()
        return Costs(
            flops_per_second=slowest.peak(dtype) * slowest.efficiency[-1][1],
            bytes_per_second=min((x.bandwidth for x in links), default=slowest.bandwidth),
            overhead=max(slowest.overhead, max((x.latency for x in links), default=0.0)),
        )

    def __str__(self) -> str:
        kinds = Counter(device.name for m in self.machines for device in m.devices)
        parts = ", ".join(f"{count} x {name}" for name, count in kinds.items())
        return f"{self.name}: {counted(len(self.machines), 'machine')}, {parts}"
