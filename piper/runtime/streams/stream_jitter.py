"""Finds races by delaying streams at random: a missing wait then gives wrong results.

Before each instruction, its stream may sleep on the device for up to two milliseconds. A plan with
correct waits and lifetimes gives the same bits with every seed.
"""

from __future__ import annotations

import random

import torch

_SHARE = 0.3
"""The fraction of instructions that are delayed."""
_CYCLES = 4_000_000
"""The longest delay in cycles: two milliseconds at 2 GHz."""


class StreamJitter:
    """Random delays of one device, the same for the same seed."""

    def __init__(self, seed: int, device: int) -> None:
        self._draw = random.Random(f"{seed} {device}")

    def delay(self) -> None:
        """Make the current stream sleep, with probability ``_SHARE``."""
        if self._draw.random() < _SHARE:
            torch.cuda._sleep(self._draw.randrange(_CYCLES))
