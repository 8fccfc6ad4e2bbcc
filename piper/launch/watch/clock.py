"""One clock for processes on several machines.

Rank 0 asks every other rank for its time, several times. The answer with the shortest round trip
is the most accurate: the other rank read its clock between rank 0's send and receive.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

_ROUNDS = 8


def seconds_ahead(group: dist.ProcessGroup) -> float:
    """How far this process's monotonic clock is ahead of rank 0's; all members call it together."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine = torch.zeros(1, dtype=torch.float64)
    ahead = torch.zeros(size, dtype=torch.float64)
    if rank == 0:
        for other in range(1, size):
            ahead[other] = _asked(group, other, mine)
    else:
        for _ in range(_ROUNDS):
            dist.recv(mine, group=group, group_src=0)
            mine[0] = time.monotonic()
            dist.send(mine, group=group, group_dst=0)
    dist.broadcast(ahead, group=group, group_src=0)
    return float(ahead[rank])


def _asked(group: dist.ProcessGroup, other: int, answer: torch.Tensor) -> float:
    samples = []
    for _ in range(_ROUNDS):
        start = time.monotonic()
        dist.send(answer, group=group, group_dst=other)
        dist.recv(answer, group=group, group_src=other)
        end = time.monotonic()
        samples.append((end - start, float(answer) - (start + end) / 2))
    return min(samples)[1]
