"""Random numbers that do not depend on the schedule: every chunk has its own seed for each step and
microbatch."""

from __future__ import annotations

import hashlib
import struct
from contextlib import AbstractContextManager

import torch

from piper.capture.intercept.generators import drawing_from, dropout
from piper.ir.shards import Draw


def fold(seed: int, *, step: int, chunk: int, microbatch: int, replica: int = 0) -> int:
    """The seed of one chunk's random numbers for one microbatch in one step."""
    key = struct.pack("<5q", seed, step, chunk, microbatch, replica)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def skip(draw: Draw, device: torch.device) -> None:
    """Advance the generator by the draws of a dropout on the unsharded tensor."""
    dropout(torch.ones(draw.shape, dtype=draw.dtype, device=device), draw.probability)


def seeded(generator: torch.Generator, seed: int) -> AbstractContextManager[None]:
    """Inside, programs draw from ``generator``, seeded with ``seed``. The process's default
    generator is not used."""
    generator.manual_seed(seed)
    return drawing_from(generator)
