"""Times kernels of one device: matrix products of many shapes, attention, copies and launches.

Kernels of a GPU are timed in a CUDA graph, without the host that launches them. A kernel's fixed
time is subtracted from those of products, since the cost model adds it to each.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from piper.cost import presets
from piper.cost.hardware import Device
from piper.cost.measure.efficiency import CPU_SIZES, GPU_SIZES, Efficiency, Shape

Tell = Callable[[str, float], None]
"""Called with what is measured, and the share of it that is done."""

_ROUNDS, _AT_LEAST, _MOST = 3, 3e-3, 200
"""A time is the shortest of 3 rounds of 3 ms, at most 200 calls each: other processes only add."""


class Timer:
    """The seconds of one call of a function on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, call: Callable[[], object]) -> float:
        """Without the host's time to launch, on a GPU."""
        call()
        call()
        if self.device.type == "cpu":
            return self._repeated(call, 1)
        torch.cuda.synchronize()
        once = self.spent(call)
        count = max(1, min(_MOST, round(_AT_LEAST / once)))
        if count == 1:
            return self._repeated(call, 1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()
        return self._repeated(graph.replay, count)

    def launch(self, call: Callable[[], object], count: int = 500) -> float:
        """The host's time to launch ``call`` on a GPU."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        spent = time.perf_counter() - start
        torch.cuda.synchronize()
        return spent / count

    def _repeated(self, call: Callable[[], object], of: int) -> float:
        count = max(1, min(_MOST, round(_AT_LEAST / self.spent(call))))

        def all_of_them() -> None:
            for _ in range(count):
                call()

        return min(self.spent(all_of_them) for _ in range(_ROUNDS)) / count / of

    def spent(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def measure_device(kind: torch.device, dtypes: Sequence[torch.dtype], tell: Tell) -> Device:
    """The figures of a device of this machine."""
    base, flops = _known(kind)
    timer = Timer(kind)
    one = torch.zeros(1, device=kind)
    fixed = timer.seconds(lambda: one.add_(1))
    device = replace(
        base,
        bandwidth=_bandwidth(timer),
        overhead=fixed,
        issue=base.issue if base.synchronous else timer.launch(lambda: one.add_(1)),
        host_bandwidth=base.host_bandwidth if base.synchronous else _host_bandwidth(timer),
    )
    tables = {}
    sizes = CPU_SIZES if base.synchronous else GPU_SIZES
    for dtype in dtypes:
        flops[dtype], tables[dtype] = measure_products(
            timer, dtype, sizes, fixed, flops.get(dtype, 0.0), tell
        )
    reached = _attention(timer, dtypes[0]) / flops[dtypes[0]]
    return replace(device, flops=flops, efficiency=tables, attention=min(1.0, reached))


def measure_products(
    timer: Timer,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    fixed: float,
    known_peak: float,
    tell: Tell,
) -> tuple[float, Efficiency]:
    """The peak of a device and the efficiency of its products. The peak is the known one, or the
    fastest measured product if that is faster."""
    rates: dict[Shape, float] = {}
    whole = len(sizes) ** 3

    def rate(shape: Shape) -> float:
        m, n, k = shape
        tell(f"{str(dtype).removeprefix('torch.')} products", len(rates) / whole)
        left = torch.randn(m, k, device=timer.device).to(dtype)
        right = torch.randn(k, n, device=timer.device).to(dtype)
        out = left.new_empty(m, n)
        seconds = timer.seconds(lambda: torch.mm(left, right, out=out))
        rates[shape] = 2 * m * n * k / max(seconds - fixed, seconds / 4)
        return rates[shape]

    for m in sizes:
        for n in sizes:
            for k in sizes:
                rate((m, n, k))
    peak = max(known_peak, *rates.values())
    tile = 16 if timer.device.type == "cpu" else 64
    return peak, Efficiency.measured(sizes, lambda shape: rates[shape] / peak, tile)


def _known(kind: torch.device) -> tuple[Device, dict[torch.dtype, float]]:
    """The preset of the device, or figures of its driver, and its peak speeds, if known."""
    if kind.type == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return replace(presets.DEVICES["CPU"], name="this CPU", memory=memory), {}
    found = torch.cuda.get_device_properties(kind)
    known = presets.known_gpu(found.name)
    device = replace(
        known or presets.DEVICES["H100"],
        name=f"this {found.name}",
        memory=found.total_memory,
        sms=found.multi_processor_count,
    )
    return device, dict(known.flops) if known else {}


def _bandwidth(timer: Timer) -> float:
    """Bytes per second, read and written."""
    nbytes = 2**27 if timer.device.type == "cpu" else 2**30
    source = torch.zeros(nbytes, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    return 2 * nbytes / timer.seconds(lambda: target.copy_(source))


def _host_bandwidth(timer: Timer) -> float:
    nbytes = 2**28
    source = torch.zeros(nbytes, dtype=torch.uint8, device=timer.device)
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    start = time.perf_counter()
    target.copy_(source)
    torch.cuda.synchronize()
    return nbytes / (time.perf_counter() - start)


def _attention(timer: Timer, dtype: torch.dtype) -> float:
    """FLOPs per second of causal attention, forward and backward, without the masked half."""
    shape = (1, 4, 512, 64) if timer.device.type == "cpu" else (4, 16, 4096, 128)
    query, key, value = (
        torch.randn(shape, device=timer.device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    gradient = torch.randn(shape, device=timer.device, dtype=dtype)

    def both() -> None:
        found = scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(found, (query, key, value), gradient)

    flops = (4 + 10) * math.prod(shape) * shape[2] / 2
    both()
    return flops / min(timer.spent(both) for _ in range(5))
