"""What one device is given: its plans, the programs they run, and what it keeps between steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from piper.capture.code.executables import Executables
from piper.ir.plan.plan import Plan
from piper.ir.rules import Bucket
from piper.ir.tensors import TensorSpec
from piper.state.optimizer.training import Training


@dataclass(frozen=True, slots=True)
class Assignment:
    """All that a worker must know of a program, which it never sees."""

    device: int
    plan: Plan
    code: Executables
    evaluation_plan: Plan
    evaluation_code: Executables
    buckets: tuple[Bucket, ...]
    """All of the program's."""
    parameters: Mapping[str, TensorSpec]
    """The whole parameters, as the programs take them."""
    order: tuple[str, ...]
    """The names of parameters and buffers in the model's own order."""
    training: Training
