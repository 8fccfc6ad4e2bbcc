"""Devices, links, machines, and the contention between concurrent operations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from piper.base.errors import PiperError
from piper.cost.measure.efficiency import Efficiency
from piper.ir.dag.facts import OpCost

_Given = TypeVar("_Given")


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
    efficiency: Mapping[torch.dtype, Efficiency] = field(default_factory=dict)
    """The share of ``flops`` that matrix products reach, by dtype. A dtype that is not listed has
    that of fp32, or, if that is not listed either, of the first one."""
    attention: float = 1.0
    """The share of ``flops`` that attention, and every other operation with FLOPs that is no matrix
    product, reaches."""
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
        if not 0 < self.attention <= 1:
            raise PiperError(f"device {self.name!r}: attention must be above 0 and at most 1")
        if min(self.overhead, self.issue) < 0:
            raise PiperError(f"device {self.name!r}: overhead and issue must not be negative")

    def peak(self, dtype: torch.dtype) -> float:
        """Peak operations per second."""
        return _listed(self.flops, dtype)

    def fastest(self, dtype: torch.dtype) -> float:
        """Operations per second of the largest matrix products."""
        return self.peak(dtype) * (_listed(self.efficiency, dtype).best if self.efficiency else 1.0)

    def reached(self, kernel: OpCost, dtype: torch.dtype) -> float:
        """The share of the peak that a kernel with FLOPs reaches."""
        if not kernel.product:
            return self.attention
        m, n, k = kernel.product
        return _listed(self.efficiency, dtype).of((m, n, k)) if self.efficiency else 1.0

    def seconds(self, kernels: Iterable[OpCost], dtype: torch.dtype) -> float:
        """Seconds of ``kernels``, one after another: each takes its overhead, and the longer of its
        FLOPs at the speed that it reaches and its memory traffic."""
        return sum(kernel.count * self._kernel_seconds(kernel, dtype) for kernel in kernels)

    def _kernel_seconds(self, kernel: OpCost, dtype: torch.dtype) -> float:
        flops = kernel.flops - kernel.skipped
        computing = flops / (self.peak(dtype) * self.reached(kernel, dtype)) if flops else 0.0
        return self.overhead + max(computing, kernel.nbytes / self.bandwidth)

    def copy_seconds(self, nbytes: int) -> float:
        """Seconds of a copy of ``nbytes`` to the host."""
        memory = nbytes * 2 / self.bandwidth if self.synchronous else nbytes / self.host_bandwidth
        return self.overhead + memory


def _listed(by_dtype: Mapping[torch.dtype, _Given], dtype: torch.dtype) -> _Given:
    """The entry of ``dtype``, or of fp32, or the first one."""
    found = by_dtype.get(dtype) or by_dtype.get(torch.float32)
    return found or next(iter(by_dtype.values()))


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
