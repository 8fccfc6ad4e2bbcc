"""Random numbers that do not depend on the schedule: every draw has its own seed."""

from __future__ import annotations

import hashlib
import struct
from contextlib import AbstractContextManager

import torch

from piper.capture.intercept.generators import drawing_from, dropout
from piper.ir.shards import Draw


def fold(seed: int, *, step: int, chunk: int, microbatch: int, replica: int = 0) -> int:
    """The seed of the draws that one chunk makes for one microbatch in one step."""
    key = struct.pack("<5q", seed, step, chunk, microbatch, replica)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def skip(draw: Draw, device: torch.device) -> None:
    """Draw what a dropout of the whole draws."""
    dropout(torch.ones(draw.shape, dtype=draw.dtype, device=device), draw.probability)


def seeded(generator: torch.Generator, seed: int) -> AbstractContextManager[None]:
    """Inside, programs draw from ``seed``, by ``generator``, which is nobody else's: the default
    generator of the process stays out of it."""
    generator.manual_seed(seed)
    return drawing_from(generator)
