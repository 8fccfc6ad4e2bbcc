"""Devices, links, machines, and the contention between concurrent operations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from piper.base.errors import PiperError
from piper.ir.dag.facts import OpCost


@dataclass(frozen=True, slots=True)
class Link:
    """A link from one device to others."""

    bandwidth: float
    """Bytes per second, in each direction."""
    latency: float
    """Seconds until the first byte arrives."""
    crowding: float = 0.0
    """How bandwidth between machines falls with their number: among n machines it is that of two,
    divided by (n / 2) ** ``crowding``. 0 is a network without contention."""

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not 0 <= self.latency < math.inf:
            raise PiperError(f"{self}: bandwidth must be positive, and latency not negative")
        if not 0 <= self.crowding <= 1:
            raise PiperError(f"{self}: crowding must be between 0 and 1")

    def among(self, machines: int) -> float:
        """Bytes per second of a device in a collective among so many machines."""
        return self.bandwidth / max(1.0, machines / 2) ** self.crowding


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device."""

    name: str
    flops: Mapping[torch.dtype, float]
    """Peak operations per second, by dtype. A dtype that is not listed is as fast as fp32, or, if
    that is not listed either, as the first one."""
    memory: int
    """Bytes."""
    bandwidth: float
    """Memory bandwidth: bytes read or written per second."""
    efficiency: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    """Pairs of a kernel's FLOPs and the share of ``flops`` that it reaches; interpolated on the
    logarithm of the FLOPs."""
    overhead: float = 0.0
    """Fixed seconds of every kernel."""
    issue: float = 0.0
    """Seconds that the host takes to launch one kernel or one communication."""
    synchronous: bool = False
    """Whether the host itself computes, as on a CPU: then a delayed instruction delays all later
    ones. Otherwise it delays only its own stream."""
    host_bandwidth: float = 24e9
    """Bytes per second from device memory to host memory, unless they are the same."""
    sms: int | None = None
    """The number of multiprocessors (SMs) of a GPU; a stream may have a share of them."""

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
        """Peak operations per second."""
        listed = self.flops.get(dtype) or self.flops.get(torch.float32)
        return listed or next(iter(self.flops.values()))

    def reached(self, flops: float) -> float:
        """The share of the peak that a kernel of ``flops`` operations reaches."""
        points = self.efficiency
        if flops <= points[0][0]:
            return points[0][1]
        for (low, start), (high, end) in pairwise(points):
            if flops < high:
                place = math.log(flops / low) / math.log(high / low)
                return start + place * (end - start)
        return points[-1][1]

    def seconds(self, kernels: Iterable[OpCost], dtype: torch.dtype) -> float:
        """Seconds of ``kernels``, one after another: each takes its overhead, and the longer of its
        FLOPs at the speed that it reaches and its memory traffic."""
        return sum(kernel.count * self._kernel_seconds(kernel, dtype) for kernel in kernels)

    def _kernel_seconds(self, kernel: OpCost, dtype: torch.dtype) -> float:
        flops = kernel.flops
        computing = flops / (self.peak(dtype) * self.reached(flops)) if flops else 0.0
        return self.overhead + max(computing, kernel.nbytes / self.bandwidth)

    def copy_seconds(self, nbytes: int) -> float:
        """Seconds of a copy of ``nbytes`` to the host."""
        memory = nbytes * 2 / self.bandwidth if self.synchronous else nbytes / self.host_bandwidth
        return self.overhead + memory


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices of one machine and their links."""

    devices: tuple[Device, ...]
    inside: Link
    """The link of each device to the other devices of the machine."""
    outside: Link
    """The link of each device to other machines."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise PiperError("a machine must have a device")


@dataclass(frozen=True, slots=True)
class Sharing:
    """Contention factors: additional time of concurrent operations, as a share of their own
    time."""

    links: float = 0.46
    """For a communication, per other communication on the same link of a device. 0.46 is the
    measured slowdown of the experts' all-to-all beside a reduction; 1 would be half of the link
    each."""
    compute: float = 0.0
    """For a computation, while its device communicates."""
    communication: float = 0.0
    """For a communication, while a participating device computes."""

    def __post_init__(self) -> None:
        if min(self.links, self.compute, self.communication) < 0:
            raise PiperError(f"{self}: sharing makes nothing faster; give at least 0")
