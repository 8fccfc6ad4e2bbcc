"""The arguments of ``piper.capture``, which are those of ``piper.compile`` without the strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import torch
from torch import nn

from piper.base.arguments import CompilerName
from piper.base.errors import PiperError, warn
from piper.base.modes import without_modes
from piper.capture.batch import Batch
from piper.capture.loss.labels import warn_of_labels
from piper.capture.loss.outputs import Outputs
from piper.capture.loss.own_loss import (
    Loss,
    loss_or_own,
    refuse_counted,
    refuse_keywords_in_tuple,
)
from piper.capture.model import check_model
from piper.ir.dag.facts import LOSS_PREFIX
from piper.state.optimizer.factory import OptimizerFactory
from piper.state.optimizer.scheduler import SchedulerFactory, try_scheduler
from piper.state.optimizer.training import Training
from piper.state.weights.weight_files import Init, WeightFiles

_OPTIMIZER = "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)"
ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "lr", "weight_decay", "betas", "momentum"), _OPTIMIZER),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type"), "scheduler"),
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val", "grad_clip"), "clip_norm"),
    **dict.fromkeys(("bf16", "mixed_precision", "dtype", "amp"), "precision='bf16'"),
    **dict.fromkeys(("criterion", "loss_fn", "loss_function"), "loss"),
    **dict.fromkeys(("labels", "label"), "targets"),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), "remat"),
    **dict.fromkeys(("fp16", "scaler", "grad_scaler"), "precision='bf16', which needs no scaler"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "accumulate"),
        "mesh(..., microbatches=)",
    ),
    "batch": "inputs",
}
"""Names of these arguments in other libraries."""


@dataclass(frozen=True)
class CompileArguments:
    """The arguments of ``piper.capture``, which describes them."""

    model: nn.Module
    inputs: Sequence[Any] | Mapping[str, Any]
    targets: Sequence[Any] = ()
    loss: Loss | None = None
    optimizer: OptimizerFactory | None = None
    scheduler: SchedulerFactory | None = None
    tags: Mapping[str, str] | None = None
    init: Init | WeightFiles | None = None
    _: KW_ONLY
    outputs: Outputs | None = None
    compiler: str = CompilerName.EAGER.value
    device: torch.device | str | None = None
    precision: str = "fp32"
    remat: str | None = None
    clip_norm: float | None = None
    on_nan: str | None = None
    seed: int = 0

    @staticmethod
    def among(given: Mapping[str, Any]) -> CompileArguments:
        """Those among the arguments of a function, by name."""
        return CompileArguments(
            **{field.name: given[field.name] for field in fields(CompileArguments)}
        )

    @property
    def batch(self) -> Batch:
        """The example batch."""
        return Batch.of(self.inputs, self.targets)

    @property
    def loss_module(self) -> nn.Module | None:
        """The loss, if it is a module."""
        return self.loss if isinstance(self.loss, nn.Module) else None

    def training(self, default_dtype: torch.dtype) -> Training:
        """The settings of training."""
        return Training(
            self.optimizer,
            self.scheduler,
            self.clip_norm,
            self.precision,
            self.seed,
            self.on_nan,
            default_dtype,
        )

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters that require grad, by their names in the program."""
        return {
            prefix + name: tuple(parameter.shape)
            for prefix, module in (("", self.model), (LOSS_PREFIX, self.loss_module))
            if module is not None
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }

    def check(self) -> None:
        """Refuse arguments that are wrong for every strategy. Warn of a model in evaluation mode,
        as libraries often return models without notice, and of labels that mean something else."""
        loss_or_own(self.loss, self.targets)
        check_model(self.model)
        self.training(torch.get_default_dtype()).check()
        refuse_counted(self.inputs)
        refuse_keywords_in_tuple(self.model, self.inputs)
        with without_modes():
            warn_of_labels(self.model, self.inputs)
        init = self.init
        if init is not None and not callable(init) and not isinstance(init, WeightFiles):
            raise PiperError(
                f"init={init!r} must be a function (name, tensor, generator) or "
                "piper.weights(folder)"
            )
        with without_modes():
            try_scheduler(self.optimizer, self.scheduler, self.trained)
        if not self.model.training:
            warn(
                f"{type(self.model).__name__} is in evaluation mode and is trained like that, "
                "without dropout and with fixed batch-norm statistics: call model.train() before, "
                "or silence this warning if it is meant"
            )
