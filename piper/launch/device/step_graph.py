"""A step captured once as a CUDA graph and replayed: one launch instead of thousands.

The first steps run normally, so that everything created once exists before the capture. A capture
fixes the values of the optimizer's settings (shapes are fixed anyway): when one changes, the step
is captured again. Learning rates that a scheduler changes are read from device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from piper.base.errors import PiperError
from piper.ir.ops import Compute
from piper.launch.device.report import Report
from piper.state.device_program import DeviceProgram

DeviceBatches = Sequence[Sequence[Tensor]]
"""Each device's part of a batch."""
_USUAL = 2
"""Steps that run normally before the capture."""


class StepGraph:
    """The captured step of all devices of one process."""

    def __init__(self, where: torch.device, step: Callable[[list[list[Tensor]]], Report]) -> None:
        """``step`` runs all instructions once and makes no lasting change on the host."""
        self._where = where
        self._step = step
        self._usual = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._given: list[list[Tensor]] = []
        self._report: Report | None = None
        self._settings: Any = None

    def run(self, given: DeviceBatches, settings: Any) -> Report:
        """Run one step; ``settings`` are the values that a capture fixes."""
        if self._graph is not None and settings != self._settings:
            self._graph = self._report = None
        if self._graph is None and self._usual < _USUAL:
            self._usual += 1
            return self._step([list(rows) for rows in given])
        if self._graph is None:
            self._capture(given)
            self._settings = settings
        assert self._graph is not None
        assert self._report is not None
        targets = [x for rows in self._given for x in rows]
        if targets:
            torch._foreach_copy_(targets, [x for rows in given for x in rows])
        self._graph.replay()
        return self._report.copied()

    def _capture(self, given: DeviceBatches) -> None:
        self._given = [[x.to(self._where, copy=True) for x in rows] for rows in given]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._report = self._step([list(rows) for rows in self._given])
        except Exception as error:
            raise PiperError(
                f"the step cannot be captured as a CUDA graph: {error}; leave out cuda_graphs=True"
            ) from error
        self._graph = graph


def refuse_uncapturable(program: DeviceProgram) -> None:
    """Refuse programs whose steps cannot replay one graph."""
    if program.kind.type != "cuda":
        raise PiperError(
            f"cuda_graphs=True needs a program compiled with device='cuda', not {program.kind}"
        )
    plan, code = program.steps[0]
    for x in plan.instructions:
        if isinstance(x.op, Compute):
            functions = code.programs[x.rows.parts][x.op.chunk].functions
            if functions[x.op.which].random:
                raise PiperError(
                    f"cuda_graphs=True: {x.name} draws random numbers, from another seed in each "
                    "step; a graph would repeat them. Leave it out, or set dropout to 0"
                )
