"""``StepResult``, the result of a step or an evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from piper.base.errors import PiperError
from piper.capture.code.executables import ChunkSignature
from piper.cost.presets import known_gpu
from piper.cost.tasks import computed_in
from piper.launch.device.report import Report
from piper.launch.watch.region_statistics import (
    ActivationStatistics,
    GradientStatistics,
    activations_by_region,
    gradients_by_region,
)
from piper.launch.watch.step_profile import Profile
from piper.program.program import Program


def _module(piece: ChunkSignature) -> str:
    """The innermost module that has all parameters of a chunk; the chunk's name if there is
    none."""
    paths = [name.split(".")[:-1] for name in piece.parameters]
    same = itertools.takewhile(lambda steps: len(set(steps)) == 1, zip(*paths, strict=False))
    return ".".join(steps[0] for steps in same) or piece.name


class StepResult:
    """The report of one step, the same for every caller.

    On GPUs the loss and gradient-norm all-reduces overlap with the next step; reading either makes
    the current stream wait for them.
    """

    def __init__(
        self,
        report: Report,
        program: Program,
        seconds: float,
        tokens: int,
        *,
        evaluated: bool = False,
    ) -> None:
        self._report = report
        self._program = program
        self.evaluated = evaluated
        """Whether this is the result of an evaluation."""
        self.seconds = seconds
        self.tokens = tokens
        """Elements of the first input: tokens, for a language model."""
        self.learning_rates = report.rates
        """The rates that the step used, one for each param group; empty after an evaluation, and in
        a process under ``torchrun`` whose device trains no parameter."""
        self.memory = report.memory
        """Peak bytes of a device's process so far: GPU memory, or resident memory on a CPU."""

    @property
    def loss(self) -> Tensor:
        """The loss over the whole batch."""
        loss = self._scalars[0]
        if loss is None:
            raise PiperError("this step was told not to report its loss: leave out report=False")
        return loss

    @property
    def loss_on_host(self) -> float | None:
        """The loss as a number, if reading it does not wait for a GPU."""
        total = self._report.total
        return None if total is None or total.is_cuda else float(self.loss)

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients before clipping; None after an evaluation, or with
        ``report=False``."""
        return self._scalars[1]

    @property
    def skipped(self) -> bool:
        """Whether ``on_nan`` is set and the gradient norm is not finite: the step then changed no
        parameter and no optimizer state."""
        sums, squares = self._report.scalars()
        if self._program.training.on_nan is None or squares is None:
            return False
        counted = sums is not None and self._program.codes[0].count is not None
        norm = squares.sqrt() / sums[1] if counted and sums is not None else squares.sqrt()
        return not bool(torch.isfinite(norm))

    @cached_property
    def expert_load(self) -> Mapping[str, Tensor]:
        """For each expert module whose rows are sorted by expert, the number of rows of each expert
        in the whole batch."""
        self._report.scalars()
        pieces = self._program.codes[0].pieces
        return {_module(pieces[chunk]): load for chunk, load in self._report.load.items()}

    @property
    def expert_imbalance(self) -> Mapping[str, float]:
        """For each module in ``expert_load``, the rows of the busiest expert over the mean."""
        return {name: float(x.max() / x.double().mean()) for name, x in self.expert_load.items()}

    @cached_property
    def outputs(self) -> Mapping[str, Tensor]:
        """The outputs named in ``outputs=``: for a scalar its mean over the batch; for any other
        tensor its rows in batch order, after an evaluation only. A padded batch has no scalars:
        they would include the padding."""
        self._report.scalars()
        code = self._program.codes[self.evaluated]
        outputs = {}
        for name, value in code.outputs.items():
            if (value, 0) in self._report.returned:
                outputs[name] = self._report.returned[value, 0]
            elif value in self._report.outputs:
                dtype = next(iter(code.values.values()))[value].dtype
                mean = self._report.outputs[value]
                outputs[name] = mean.to(dtype) if dtype.is_floating_point else mean
        return outputs

    @cached_property
    def gradients(self) -> Mapping[str, GradientStatistics]:
        """Statistics of the gradients of each region, if a callback asked for them."""
        sums = self._report.gradients
        return gradients_by_region(self._program, sums) if sums else {}

    @cached_property
    def activations(self) -> Mapping[str, ActivationStatistics]:
        """Statistics of the activations that leave each region, if a callback asked for them."""
        sums = self._report.activations
        return activations_by_region(self._program, sums) if sums else {}

    @cached_property
    def profile(self) -> Profile | None:
        """The time of every instruction, if a callback asked for it."""
        measured, kernels = self._report.measured, self._report.kernels
        return Profile(self._program, (measured,), kernels) if measured else None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the operations of the model in this step, without recomputation,
        over those that the GPUs could do in ``seconds``. None on CPUs, on GPUs that
        ``piper.Cluster`` has no figures of, and after an evaluation."""
        gpus, model = self._report.gpus, self._program.training_step.facts.whole
        kinds = [known_gpu(gpu) for gpu in gpus]
        if self.evaluated or not gpus or None in kinds:
            return None
        peak = min(kind.peak(computed_in(model)) for kind in kinds if kind is not None)
        share = len(set(gpus)) / len(gpus)  # virtual devices share a GPU
        return model.flops / (self.seconds * peak * share * len(self._program.devices))

    def __float__(self) -> float:
        return float(self.loss)

    def __repr__(self) -> str:
        return (
            f"StepResult(loss={self._scalars[0]}, grad_norm={self.grad_norm}, "
            f"seconds={self.seconds}, tokens={self.tokens}, memory={self.memory})"
        )

    @cached_property
    def _scalars(self) -> tuple[Tensor | None, Tensor | None]:
        """The loss and the norm, computed from their sums."""
        program = self._program
        sums, squares = self._report.scalars()
        if sums is None:
            return None, None
        total = sums.to(program.loss_dtype)
        norm = None if squares is None else squares.sqrt()
        if program.codes[0].count is None:
            loss = total[0] / program.loss_parts
        else:
            loss = total[0] / sums[1].to(program.loss_dtype)
            norm = None if norm is None else norm / sums[1]
        return loss, None if norm is None else norm.float()
