"""Devices, links between them and machines, and how what runs at once slows each other down."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from piper.base.errors import PiperError


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
