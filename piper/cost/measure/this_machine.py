"""Measures the machine that this process runs on."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from piper.base.errors import PiperError
from piper.cost import presets
from piper.cost.cluster import Cluster
from piper.cost.measure.time_kernels import Tell, measure_device
from piper.cost.measure.time_links import measure_link


def measure_machine(kind: str | None, devices: int | None, tell: Tell) -> Cluster:
    """The devices of this machine and the link between two of them. With fewer than two GPUs, the
    link is the preset of their kind."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = kind or ("cuda" if gpus else "cpu")
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not gpus):
        raise PiperError(f"this machine has no device {kind!r} to measure: give cpu or cuda")
    count = devices or (gpus if kind == "cuda" else 2)
    if kind == "cuda" and count > gpus:
        raise PiperError(f"devices={count}: this machine has {gpus} GPUs")
    threads = torch.get_num_threads()
    try:
        if kind == "cpu":
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
        dtypes = (torch.bfloat16, torch.float32) if kind == "cuda" else (torch.float32,)
        found = measure_device(torch.device(kind), dtypes, tell)
    finally:
        torch.set_num_threads(threads)
    if kind == "cpu":
        found = replace(found, memory=found.memory // count)
    tell("link between devices", 1.0)
    near = presets.inside(found) if count < 2 else measure_link(kind)
    return Cluster.of(found, count, inside=near, name="measured")
