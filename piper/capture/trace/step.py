"""The step that is traced: the model on one microbatch, then its loss."""

from __future__ import annotations

import inspect
import types
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from piper.capture.batch import Batch, OutputTree
from piper.capture.blame import RecordLines
from piper.capture.intercept.mixed_precision import MixedPrecision
from piper.capture.intercept.outside_effects import assigned, attributes_of, generators_now
from piper.capture.intercept.own_operators import OwnOperators
from piper.capture.intercept.random_control_flow import DecideDraws
from piper.capture.loss.loss_checks import check_loss
from piper.capture.loss.outputs import Outputs
from piper.capture.loss.own_loss import Loss
from piper.capture.regions import LOSS, Region, annotate
from piper.capture.repeats.leaf_calls import Repeats
from piper.capture.repeats.signatures import own_attributes
from piper.capture.trace.refusals import RefuseStray


class TracedModules(nn.Module):
    """All modules with parameters: the model, and the loss if it is a module."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        if isinstance(loss, nn.Module):
            self.loss_fn = loss


@dataclass(slots=True)
class StepNotes:
    """Notes of the traced step, kept apart because torch restores a module's attributes."""

    running: str
    """The code that is running, as errors name it: the model, the loss, or ``outputs=``."""
    loss_region: Region | None = None
    shared: dict[str, str] = field(default_factory=dict)
    """For each buffer that shares storage with another tensor, that tensor's path."""
    frozen: list[str] = field(default_factory=list)
    """Plain numbers that the step changed; the captured step keeps their current values."""
    drawn: list[str] = field(default_factory=list)
    """Random generators outside the graph that the step drew from."""
    assigned: list[str] = field(default_factory=list)
    """Buffers that were assigned a new tensor; their values are the last results of the step."""
    tree: OutputTree = field(default_factory=OutputTree)


class TracedStep(nn.Module):
    """The exported module: the model, then the loss as a region of its own."""

    def __init__(
        self, parts: TracedModules, loss: Loss, batch: Batch, outputs: Outputs | None, mixed: bool
    ) -> None:
        super().__init__()
        self.model = parts.model
        self.loss_fn = getattr(parts, "loss_fn", loss)
        self.seen = StepNotes(type(parts.model).__name__)
        self._batch = batch
        self._outputs = outputs
        self._mixed = mixed
        self._attributes = {
            path: own for path, x in self._tensors().items() if (own := own_attributes(x))
        }
        self.repeats: Repeats | None = None

    def _tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers by path."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        return {**parameters, **dict(self.named_buffers(remove_duplicate=False))}

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self._attributes:  # torch traces with tensors of its own in place of these
            now = self._tensors()
            for path in self._attributes.keys() & now.keys():
                vars(now[path]).update(self._attributes[path])
        source = iter(tensors)
        leaves = [next(source) if isinstance(x, Tensor) else x for x in self._batch.leaves]
        args, kwargs, targets = self._batch.spec.unflatten(leaves)
        precision = MixedPrecision() if self._mixed else nullcontext()
        with DecideDraws(), RefuseStray(self), OwnOperators(), precision:
            return self._run(args, kwargs, targets)

    def _run(self, args: Any, kwargs: Any, targets: Any) -> tuple[Tensor, ...]:
        before = attributes_of(self)
        generators = generators_now()
        with nullcontext() if self.repeats is None else self.repeats.running():
            output = self.model(*args, **kwargs)
            self.seen.running = "the loss"
            with annotate(LOSS) as self.seen.loss_region:
                with RecordLines():
                    loss = check_loss(self.loss_fn(output, *targets))
                kept = []
                if self._outputs is not None:
                    self.seen.running = "outputs="
                    kept = self.seen.tree.take(self._outputs(output, *targets))
        self.seen.running = type(self.model).__name__
        after = generators_now()
        self.seen.drawn = [name for name, state in generators.items() if state != after[name]]
        written = assigned(self, before, self.seen.frozen)
        self.seen.assigned = list(written)
        results = (*loss, *kept, *(value.detach() for value in written.values()))
        if self.repeats is None:
            return results
        self.repeats.refuse_standing(results)
        return (*results, *self.repeats.results)


def rebound(loss: Loss, model: nn.Module, skeleton: nn.Module) -> Loss:
    """If the loss is a method of the model, the same method of the copy."""
    if inspect.ismethod(loss) and loss.__self__ is model:
        return types.MethodType(loss.__func__, skeleton)
    return loss
