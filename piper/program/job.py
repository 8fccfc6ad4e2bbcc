"""A job: the model, data and optimizer of a training run, without a parallel strategy. The command
line reads it from a script.

A script defines ``job``, a ``Job`` or a function that returns one:

    def job() -> piper.Job:
        x, y = ...
        return piper.Job(model, inputs=(x,), targets=(y,), loss=loss, optimizer=adamw)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from piper.base.errors import PiperError
from piper.base.modes import Precision
from piper.capture.batch import Pad
from piper.cost.cluster import Cluster
from piper.cost.tasks import CostModel
from piper.program.compile.compile_arguments import CompileArguments
from piper.program.compile.compiler import Capture, checked_capture
from piper.program.program import Program
from piper.strategies.strategy import Strategy

Batches = Iterable[Sequence[Any] | Mapping[str, Any]]


@dataclass(frozen=True)
class Job(CompileArguments):
    """The arguments of ``piper.compile``, and the training data."""

    batches: Batches | Callable[[], Batches] | None = None
    """The batches, as for ``Trainer.fit``: each ``(*inputs, *targets)`` or a dict of inputs, or a
    function that returns them. Without batches, every step trains on the example."""
    held_out: Batches | Callable[[], Batches] | None = None
    """Batches to evaluate after every epoch, and at the end."""
    strategy: Strategy | None = None
    """The default strategy, if none is given when the job runs."""
    _: KW_ONLY
    pad: Pad | None = None
    """Values that fill up smaller batches (``Trainer.step``)."""
    shapes: int = 0
    """The number of batch shapes that are allowed besides the example's (``launch``)."""
    memory_limit: int | str | None = None
    costs: CostModel | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of matrix products."""
        if self.precision == Precision.BF16.value:
            return torch.bfloat16
        floats = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        return next(floats, torch.float32)

    def compile(
        self,
        strategy: Strategy | None = None,
        *,
        memory_limit: int | str | None = None,
        cluster: Cluster | None = None,
    ) -> Program:
        """The job compiled under ``strategy``, or its own. Arguments given here override the job's.
        The costs of ``cluster``, if given, order what the strategy leaves open."""
        chosen = strategy or self.strategy
        if chosen is None:
            raise PiperError(
                "the job has no strategy: give --mesh pp=2,dp=2 or --strategy FILE, or give the "
                "job one (Job(strategy=...))"
            )
        return self.capture().compile(
            chosen,
            memory_limit=memory_limit if memory_limit is not None else self.memory_limit,
            costs=cluster.costs(self.dtype) if cluster is not None else self.costs,
            cache=True,
        )

    def capture(self) -> Capture:
        """The job's captured model, to compile under several strategies."""
        return checked_capture(self)
