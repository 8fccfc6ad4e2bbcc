"""The rows of the global batch for each device: split by microbatch, then by group member.

Microbatch m of M is rows ``[m, m + 1) * B / M``. Member r of a group of g has row block
``m * g + r`` of ``M * g``. So a strategy computes on the same rows as one device that runs
``M * g`` microbatches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from torch import Tensor

from piper.capture.code.executables import Executables
from piper.ir.plan.instructions import RowShards
from piper.ir.plan.plan import Plan


def cut(
    plan: Plan,
    code: Executables,
    device: int,
    batch: Sequence[Tensor],
    rows: Sequence[int] | None = None,
) -> list[Tensor]:
    """The parts of the batch that ``device`` needs, in the order of ``plan.given``. With ``rows``,
    the tensors in ``batch`` hold only the rows with these numbers, in ascending order."""
    parts = []
    for value, block in _blocks(plan, code, device):
        given = batch[value]
        if block and given.shape[0] != 1:
            start = block.start if rows is None else bisect_left(rows, block.start)
            given = given[start : start + len(block)]
        parts.append(given)
    return parts


def rows_read(plan: Plan, code: Executables, device: int) -> set[int]:
    """The numbers of the batch rows that ``device`` needs."""
    return {row for _, block in _blocks(plan, code, device) for row in block}


def block_of(microbatch: int, shards: RowShards, device: int) -> int:
    """Index of the row block that ``device`` has of a microbatch."""
    return microbatch * shards.parts + shards.part(device)


def _blocks(plan: Plan, code: Executables, device: int) -> Iterator[tuple[int, range]]:
    """The batch tensors that a device gets, each with its rows; an empty range for a tensor without
    batch rows, which every device gets whole."""
    made = {value for piece in code.pieces for value in piece.outputs}
    most = {
        n: max((s.shape[0] for v, s in enumerate(specs) if s.shape and v not in made), default=0)
        for n, specs in code.values.items()
    }
    for _, value, microbatch, shards in plan.given:
        shape = code.values[shards.parts][value].shape
        rows = most[shards.parts] if shape and shape[0] == most[shards.parts] else 0
        block = block_of(microbatch, shards, device)
        yield value, range(block * rows, (block + 1) * rows)
