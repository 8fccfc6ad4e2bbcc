"""Times messages between two devices of this machine, over the backend that training uses."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from piper.cost.hardware import Link

_SMALL, _LARGE, _ROUNDS = 8, 2**25, 20
_SIZES = _SMALL, _LARGE


def measure_link(kind: str) -> Link:
    """The link between two devices of kind "cpu" or "cuda"."""
    with tempfile.TemporaryDirectory(prefix="piper-") as folder:
        mp.spawn(_partner, (kind, folder), nprocs=2)
        latency, large = map(float, Path(folder, "seconds").read_text().split())
    return Link(_LARGE / max(large - latency, large / 10), latency)


def _partner(rank: int, kind: str, folder: str) -> None:
    """Send messages to and fro; rank 0 writes the seconds of a small and a large one."""
    torch.set_num_threads(1)
    device = torch.device(f"cuda:{rank}" if kind == "cuda" else "cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
    )
    seconds = [_one_way(rank, torch.zeros(n, dtype=torch.uint8, device=device)) for n in _SIZES]
    if rank == 0:
        Path(folder, "seconds").write_text(" ".join(map(str, seconds)))
    dist.barrier()
    dist.destroy_process_group()


def _one_way(rank: int, tensor: torch.Tensor) -> float:
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for source in (0, 1):
            if rank == source:
                dist.send(tensor, 1 - source)
            else:
                dist.recv(tensor, source)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 2)
    return min(times)
