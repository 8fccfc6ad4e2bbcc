"""Common devices and networks, by name. Peak figures are the vendors' for dense arithmetic.

``best`` is the share of its peak that the largest products of a GPU reach for a short time, as
measured by others (the table "Maximum Achievable Matmul FLOPS" of stas00/ml-engineering; 0.8 where
it has no figure). ``attention`` is the share that FlashAttention-2 reaches without the masked part.
``piper measure`` makes such figures for your own devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch

from piper.base.errors import PiperError
from piper.cost.hardware import Device, Link, Sharing
from piper.cost.measure.efficiency import Efficiency, gpu_rule

_SUSTAINED = 0.9
"""Hot GPUs at their power limit are that much slower than in a short measurement."""
_ONE_CORE = {torch.float32: Efficiency((1,), (((0.5,),),))}
_GIB = 2**30


def _gpu(
    name: str,
    half: float,
    single: float,
    memory: int,
    bandwidth: float,
    sms: int,
    *,
    best: float = 0.8,
    attention: float = 0.5,
) -> Device:
    flops = {torch.bfloat16: half, torch.float16: half, torch.float32: single}
    reached = {torch.float32: gpu_rule(best * _SUSTAINED, sms)}
    return Device(name, flops, memory * _GIB, bandwidth, reached, attention, 2e-6, 5e-6, sms=sms)


def _named(*devices: Device) -> Mapping[str, Device]:
    return {device.name: device for device in devices}


DEVICES = _named(
    _gpu("V100", 125e12, 15.7e12, 32, 0.9e12, 80),
    _gpu("T4", 65e12, 8.1e12, 16, 0.32e12, 40),
    _gpu("L4", 121e12, 30e12, 24, 0.3e12, 58),
    _gpu("A10", 125e12, 31e12, 24, 0.6e12, 72),
    _gpu("RTX4090", 165e12, 82e12, 24, 1.0e12, 128),
    _gpu("A100-40", 312e12, 19.5e12, 40, 1.55e12, 108, best=0.86, attention=0.6),
    _gpu("A100-80", 312e12, 19.5e12, 80, 2.0e12, 108, best=0.86, attention=0.6),
    _gpu("H100", 989e12, 67e12, 80, 3.35e12, 132, best=0.8, attention=0.4),
    _gpu("H200", 989e12, 67e12, 141, 4.8e12, 132, best=0.8, attention=0.4),
    _gpu("B200", 2250e12, 80e12, 180, 8.0e12, 148, best=0.78, attention=0.4),
    _gpu("MI250X", 383e12, 47.9e12, 128, 3.2e12, 220, best=0.77, attention=0.4),
    _gpu("MI300X", 1307e12, 163e12, 192, 5.3e12, 304, best=0.6, attention=0.3),
    # One core.
    Device("CPU", {torch.float32: 6e10}, 8 * _GIB, 1e10, _ONE_CORE, 0.5, 5e-6, 2e-5, True),
)

LINKS: Mapping[str, Link] = {
    "NVLink2": Link(150e9, 2e-6),
    "NVLink3": Link(300e9, 2e-6),
    "NVLink4": Link(450e9, 2e-6),
    "NVLink5": Link(900e9, 2e-6),
    "InfinityFabric": Link(448e9, 3e-6),
    "PCIe3": Link(12e9, 4e-6),
    "PCIe4": Link(24e9, 4e-6),
    "PCIe5": Link(50e9, 4e-6),
    "InfiniBand-HDR": Link(25e9, 5e-6),
    "InfiniBand-NDR": Link(50e9, 5e-6),
    "InfiniBand-XDR": Link(100e9, 5e-6),
    "EFA-3200": Link(35e9, 3e-5, crowding=0.6),
    "Ethernet-400G": Link(50e9, 1e-5),
    "Ethernet-100G": Link(12.5e9, 1.5e-5),
    "Ethernet-25G": Link(3.1e9, 2e-5),
    "Ethernet-10G": Link(1.25e9, 3e-5),
    "Ethernet-1G": Link(0.125e9, 1e-4),
    "loopback": Link(1.5e9, 1.5e-4),
}
OUTSIDE = "InfiniBand-NDR"
"""The default link between machines."""

_INSIDE = {
    "V100": "NVLink2",
    "A100-40": "NVLink3",
    "A100-80": "NVLink3",
    "H100": "NVLink4",
    "H200": "NVLink4",
    "B200": "NVLink5",
    "MI250X": "InfinityFabric",
    "MI300X": "InfinityFabric",
    "CPU": "loopback",
}
_GPU_SHARING = Sharing(links=0.46, compute=0.08, communication=0.05)


def known_gpu(name: str) -> Device | None:
    """The preset of a GPU by the name that its driver gives, such as "NVIDIA A100-SXM4-80GB"."""
    words = set(re.split(r"[^A-Za-z0-9]+", name.replace("RTX ", "RTX")))
    for kind, preset in DEVICES.items():
        model, _, size = kind.partition("-")
        if model in words and (not size or f"{size}GB" in words):
            return preset
    return None


def device(kind: str | Device) -> Device:
    """The device itself, or the preset of that name."""
    return named(DEVICES, kind, "device") if isinstance(kind, str) else kind


def link(given: str | Link) -> Link:
    """The link itself, or the preset of that name."""
    return named(LINKS, given, "link") if isinstance(given, str) else given


def inside(kind: Device) -> Link:
    """The default link between devices of one machine."""
    return LINKS[_INSIDE.get(kind.name, "PCIe4")]


def sharing(kinds: Iterable[Device]) -> Sharing:
    """The default contention factors for devices of these kinds."""
    return Sharing() if all(kind.synchronous for kind in kinds) else _GPU_SHARING


_Known = TypeVar("_Known")


def named(known: Mapping[str, _Known], name: str, what: str) -> _Known:
    """The entry ``name`` of ``known``; a missing one is an error that lists all names."""
    if name not in known:
        raise PiperError(f"there is no {what} {name!r}; known: {', '.join(sorted(known))}")
    return known[name]
