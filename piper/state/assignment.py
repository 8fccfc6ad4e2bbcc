"""The input of one worker: its plans, their executables, and the description of its state."""

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
    """Everything a worker needs to run a program. The worker never receives the program itself."""

    device: int
    plan: Plan
    code: Executables
    evaluation_plan: Plan
    evaluation_code: Executables
    buckets: tuple[Bucket, ...]
    """All buckets of the program, not only this device's."""
    parameters: Mapping[str, TensorSpec]
    """Shapes and dtypes of the unsharded parameters, as the executables take them."""
    order: tuple[str, ...]
    """Names of parameters and buffers, in the model's order."""
    training: Training
