"""The actions of a schedule."""

from __future__ import annotations

from typing import NamedTuple

from piper.ir.passes import Pass
from piper.view.grid import LETTERS


class Action(NamedTuple):
    """One pass of one stage for one microbatch."""

    stage: int
    which: Pass
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{LETTERS[self.which]}{self.microbatch}"
