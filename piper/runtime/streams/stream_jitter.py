"""Finds races: streams are delayed at random, so that whatever is not waited for goes wrong.

Before each instruction its stream may sleep, on the device, for up to two milliseconds. A plan
whose waits and lifetimes are right gives the same bits with every seed.
"""

from __future__ import annotations

import random

import torch

_SHARE = 0.3
"""Of all instructions, those that are delayed."""
_CYCLES = 4_000_000
"""The most cycles of one delay: two milliseconds at 2 GHz."""


class Shaker:
    """Delays of one device, the same for the same seed."""

    def __init__(self, seed: int, device: int) -> None:
        self._draw = random.Random(f"{seed} {device}")

    def delay(self) -> None:
        """Let the current stream sleep, or not."""
        if self._draw.random() < _SHARE:
            torch.cuda._sleep(self._draw.randrange(_CYCLES))
