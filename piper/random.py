"""Random numbers that do not depend on the schedule: every draw has its own seed."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from piper.capture.chunks import Draw


def fold(seed: int, *, step: int, chunk: int, microbatch: int, replica: int = 0) -> int:
    """The seed of the draws that one chunk makes for one microbatch in one step."""
    key = struct.pack("<5q", seed, step, chunk, microbatch, replica)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def noise(draw: Draw, device: torch.device) -> torch.Tensor:
    """What a dropout of the whole multiplies by."""
    ones = torch.ones(draw.shape, dtype=draw.dtype, device=device)
    return torch.dropout(ones, draw.probability, True)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Draw from ``seed`` inside; outside, the device's generator goes on as if nothing was."""
    generator = _default_generator(device)
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
