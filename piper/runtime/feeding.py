"""Which rows of the global batch a device gets: microbatch by microbatch, then member by member.

Microbatch m of M is rows ``[m, m + 1) * B / M``; member r of a group of g has row block
``m * g + r`` of ``M * g``. So a strategy computes on the same rows as one device that runs
``M * g`` microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from piper.capture.code import Code
from piper.lower.plan import Plan


def cut(plan: Plan, code: Code, device: int, batch: Sequence[Tensor]) -> list[Tensor]:
    """What ``device`` needs of the tensors of the whole batch, in the order of ``plan.given``."""
    found = []
    for _, value, microbatch, group in plan.given:
        whole = batch[value]
        if whole.dim():
            rows = code.values[len(group)][value].shape[0]
            block = microbatch * len(group) + group.index(device)
            whole = whole[block * rows : (block + 1) * rows]
        found.append(whole)
    return found
