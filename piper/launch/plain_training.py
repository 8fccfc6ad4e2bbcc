"""Plain PyTorch on one device: copies of a model and its loss, a step of eager autograd on the
whole batch, the optimizer. The reference of ``verify``; nothing of Piper computes here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from piper.capture.batch import Batch
from piper.capture.loss.own_loss import loss_or_own
from piper.capture.regions import paths_like
from piper.program.compile.compile_arguments import CompileArguments
from piper.state.optimizer.factory import make
from piper.state.weights.source import Source


def copied(given: CompileArguments, dtype: torch.dtype | None) -> CompileArguments:
    """``given`` with copies of its model and loss, in ``dtype`` (None: their own), without
    dropout modules and mixed precision."""
    model, loss = copy.deepcopy((given.model, given.loss))
    for module in [*model.modules(), *(loss.modules() if isinstance(loss, nn.Module) else ())]:
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    inputs, targets = in_dtype((given.inputs, tuple(given.targets)), dtype)
    if dtype is not None:
        model.to(dtype)
        loss = loss.to(dtype) if isinstance(loss, nn.Module) else loss
    here = {"model": model, "loss": loss, "inputs": inputs, "targets": targets}
    return replace(given, **here, precision="fp32")


def in_dtype(tree: Any, dtype: torch.dtype | None) -> Any:
    """A batch with its floating-point tensors in ``dtype``; None keeps it."""

    def changed(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return tree if dtype is None else pytree.tree_map(changed, tree)


class PlainTraining:
    """Trains ``given`` in place, on ``device``."""

    def __init__(self, given: CompileArguments, device: torch.device) -> None:
        self._given = given
        self._loss = loss_or_own(given.loss, given.targets)
        self._device = device
        source = Source(given.model, given.loss_module)
        self._roots = source.roots()
        for _, module in self._roots:
            module.to(device)
        trained = [(name, p) for name, p in source.parameters() if p.requires_grad]
        self._trained = trained
        self._optimizer = None if given.optimizer is None else make(given.optimizer, trained)
        self._scheduler = None
        if self._optimizer is not None and given.scheduler is not None:
            self._scheduler = given.scheduler(self._optimizer)

    def step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Train on one batch; returns the loss and the gradient norm."""
        leaves = [x.to(self._device) if isinstance(x, Tensor) else x for x in batch.leaves]
        args, kwargs, targets = batch.spec.unflatten(leaves)
        returned: Any = self._loss(self._given.model(*args, **kwargs), *targets)
        loss: Tensor = returned[0] / returned[1] if isinstance(returned, tuple) else returned
        loss.backward()
        gradients = [p for _, p in self._trained if p.grad is not None]
        clip = self._given.clip_norm
        norm = nn.utils.clip_grad_norm_(gradients, float("inf") if clip is None else clip)
        if self._optimizer is not None:
            self._optimizer.step()
        for parameter in gradients:
            parameter.grad = None
        if self._scheduler is not None:
            self._scheduler.step()
        return loss.detach(), norm

    @property
    def state(self) -> dict[str, Tensor]:
        """Copies of all tensors of the state, by the names that a trainer uses."""
        return {
            prefix + name: x.detach().clone()
            for prefix, module in self._roots
            for name, x in module.state_dict().items()
            if isinstance(x, Tensor)
        }


def observed(
    given: CompileArguments, tags: dict[str, str]
) -> tuple[CompileArguments, dict[str, Tensor]]:
    """``given`` with an output for each module that ``tags`` names: the mean square of its
    result. Also these numbers, of the latest call of the model, in order of execution."""
    seen: dict[str, Tensor] = {}

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
            if tensors and tensors[0].is_floating_point():
                seen[path] = tensors[0].detach().square().mean()

        return hook

    modules = dict(given.model.named_modules(remove_duplicate=False))
    for pattern in tags:
        for path in paths_like(pattern, modules):
            modules[path].register_forward_hook(note(path))
    return replace(given, outputs=lambda *_: dict(seen)), seen
