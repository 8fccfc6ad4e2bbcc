"""The state of a device between steps: parameters in flat buckets, the model's buffers, the
optimizer and the scheduler. Made from a ``DeviceProgram``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from piper.base.errors import PiperError
from piper.ir.rules import Bucket
from piper.state.checkpoint.slices import MODEL, Slice
from piper.state.device.bucket_layout import BucketLayout, Fragment
from piper.state.device.element_sums import ElementSums
from piper.state.device.snapshot import Snapshot
from piper.state.device_program import DeviceProgram, buffers_of
from piper.state.optimizer.ema import swap_averages
from piper.state.optimizer.factory import kind_of, make, regrouped
from piper.state.optimizer.scheduler import advance, make_scheduler
from piper.state.weights.first_tensors import Fetch


@dataclass(slots=True)
class HeldBucket:
    """One bucket on one device."""

    layout: BucketLayout
    flat: Tensor
    """The parameters that the executables read: whole, or this device's shard with ZeRO-3."""
    updated: Tensor
    """What the optimizer updates: this device's range of ``flat``, or its master copy in higher
    precision."""
    trained: Mapping[str, nn.Parameter]
    """The optimizer's parameters, one for each fragment; empty if the bucket is frozen."""
    groups: list[list[nn.Parameter]] = field(default_factory=list)
    """``trained``, by the optimizer's parameter groups."""

    def parameter(self, part: Fragment) -> Iterator[Slice]:
        """Slices of a fragment or of a part of it, in ``updated``."""
        return self.layout.slices(MODEL, part, self.updated[part.start : part.stop])

    def fill(self, fetch: Fetch, names: Iterable[str]) -> None:
        """Copy values of the parameters ``names`` to what this device updates. With ZeRO, the rest
        is gathered before each use."""
        for name in names:
            first = fetch(name)
            for fragment in self.layout.fragments:
                if fragment.name == name:
                    for one in self.parameter(fragment):
                        first.fill(one, one.dtype)
        self.publish()

    def publish(self) -> None:
        """Copy the master copy, if there is one, to this device's part of ``flat``."""
        if self.layout.bucket.gradient != self.layout.bucket.dtype:
            low, high = (0, self.layout.share) if self.layout.scattered else self.layout.mine
            self.flat[low:high].copy_(self.updated)


class DeviceState:
    """All state of one device."""

    def __init__(self, given: DeviceProgram, where: torch.device, fetch: Fetch | None) -> None:
        """``fetch`` returns the initial values of a parameter or buffer by name. None: the caller
        fills the state later."""
        self.device = given.device
        self.where = where
        self.training = given.training
        self.capturable = False
        """Whether CUDA graphs may capture a step: the host then waits for nothing in it."""
        self.steps = 0
        self.changing = False
        """Whether a step has begun to change the state and has not ended."""
        self.gradient_sums: dict[str, ElementSums] | None = None
        """By parameter, the sums of its gradient in this step, if they are requested."""
        self.snapshot: Snapshot | None = None
        """The snapshot of a background save that is not fully copied yet."""
        self.held: dict[int, HeldBucket] = {}
        for index, bucket in given.buckets.items():
            layout = BucketLayout.of(bucket, given.parameters, given.device)
            if layout is not None:
                self.held[index] = self._hold(layout, bucket, fetch)
        self.views: dict[str, Tensor] = {}
        for held in self.held.values():
            if not held.layout.scattered:
                for name in held.layout.bucket.parameters:
                    self.views[name] = held.layout.view(held.flat, name)
        self.bucket_of = {n: i for i, h in self.held.items() for n in h.layout.bucket.parameters}
        self.buffers: dict[str, Tensor] = {}
        for name, spec in buffers_of(*given.steps).items():
            if fetch is None:
                self.buffers[name] = spec.empty(where)
            else:
                self.buffers[name] = fetch(name).whole().to(where, copy=True)
        self.optimizer = self._optimizer(given.order)
        for held in self.held.values():
            mine = {id(p) for p in held.trained.values()}
            held.groups = [[p for p in g["params"] if id(p) in mine] for g in self._groups()]
        self._rates: list[Tensor] = []
        """The learning rate of each parameter group, in device memory. Only for a captured update
        with a scheduler: the graph reads it, the scheduler changes it."""
        factory = given.training.scheduler
        self.scheduler = None
        if factory is not None and self.optimizer is not None:
            self.scheduler = make_scheduler(factory, self.optimizer)

    def update(self, rows: Sequence[tuple[HeldBucket, list[Tensor]]]) -> None:
        """One optimizer step on one bucket or on all of them, with their gradients."""
        if self.optimizer is None:
            return
        self.changing = True
        for held, gradients in rows:
            for parameter, gradient in zip(held.trained.values(), gradients, strict=True):
                parameter.grad = gradient
        try:
            with regrouped(self.optimizer, self._changes([held for held, _ in rows])):
                self.optimizer.step()
        finally:
            for held, _ in rows:
                for parameter in held.trained.values():
                    parameter.grad = None
        for held, _ in rows:
            held.publish()

    def note_gradients(self, held: HeldBucket, gradients: Sequence[Tensor]) -> None:
        """Keep the sums of a bucket's gradients, if they are requested. Replicas have equal
        gradients, so each keeps those of a share of the parameters."""
        if self.gradient_sums is None:
            return
        pairs = list(zip(held.layout.fragments, gradients, strict=True))
        for fragment, gradient in pairs[held.layout.copy :: held.layout.bucket.copies]:
            if gradient.numel():
                self.gradient_sums[fragment.name] = ElementSums.of(gradient)

    def swap_averages(self) -> None:
        """Exchange the trained weights and their averages."""
        for held in self.held.values():
            if self.optimizer is not None:
                swap_averages(held.trained.values(), self.optimizer.state)
                held.publish()

    def make_capturable(self) -> None:
        """From now on the host waits for nothing in a step, so CUDA graphs can capture it."""
        if self.training.on_nan is not None:
            raise PiperError(
                f"cuda_graphs=True: on_nan={self.training.on_nan!r} decides on the host whether a "
                "step updates anything: leave out one of them"
            )
        self.capturable = True
        for group in self._groups():
            if "capturable" in group:
                group["capturable"] = True
            elif self.scheduler is not None and not group.get("fused"):
                assert self.optimizer is not None
                raise PiperError(
                    f"cuda_graphs=True: {kind_of(self.optimizer)} reads the learning rate, "
                    "which a scheduler changes, on the host: make it fused=True"
                )
        if self.scheduler is not None:
            self._rates = [torch.tensor(g["lr"], device=self.where) for g in self._groups()]

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of each parameter group in the current step. Rates in GPU memory are
        left out: reading them waits for the GPU."""
        rates = [group["lr"] for group in self._groups() if "lr" in group]
        return tuple(float(x) for x in rates if not (isinstance(x, Tensor) and x.is_cuda))

    def settings(self) -> list[dict[str, Any]]:
        """The group settings that a captured update has baked in."""
        free = ("params", "lr") if self._rates else ("params",)
        return [{k: v for k, v in group.items() if k not in free} for group in self._groups()]

    def _changes(self, rows: Sequence[HeldBucket]) -> list[dict[str, Any]]:
        """Of each parameter group for one ``step``: the parameters, unless it updates all buckets,
        and the learning rate, if a graph reads it."""
        changes: list[dict[str, Any]] = [{} for _ in self._groups()]
        for i, change in enumerate(changes):
            if len(rows) == 1:
                change["params"] = rows[0].groups[i]
            if self._rates:
                change["lr"] = self._rates[i]
        return changes

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def model_slices(
        self, fragments: Callable[[BucketLayout], Iterable[Fragment]], buffers: Iterable[str]
    ) -> list[Slice]:
        """These fragments of all buckets, and these buffers."""
        slices = [
            one
            for held in self.held.values()
            for fragment in fragments(held.layout)
            for one in held.parameter(fragment)
        ]
        return slices + [Slice.of(MODEL, name, self.buffers[name]) for name in buffers]

    def tensors(self) -> Iterable[Tensor]:
        """All tensors that persist between steps."""
        for held in self.held.values():
            yield held.flat
            yield held.updated
        yield from self.buffers.values()
        if self.optimizer is not None:
            for kept in self.optimizer.state.values():
                yield from (item for item in kept.values() if isinstance(item, Tensor))

    def advance(self) -> None:
        """End a step: count it and advance the scheduler."""
        self.steps += 1
        if self.scheduler is not None:
            advance(self.scheduler, self.steps)
            for rate, group in zip(self._rates, self._groups(), strict=False):
                rate.fill_(group["lr"])
        self.changing = False

    def _hold(self, layout: BucketLayout, bucket: Bucket, fetch: Fetch | None) -> HeldBucket:
        size = layout.share if layout.scattered else layout.padded
        flat = torch.zeros(size, dtype=bucket.dtype, device=self.where)
        low, high = (0, layout.share) if layout.scattered else layout.mine
        updated = flat[low:high]
        if bucket.dtype != bucket.gradient:
            updated = torch.zeros(layout.share, dtype=bucket.gradient, device=self.where)
        held = HeldBucket(layout, flat, updated, {})
        if fetch is not None:
            held.fill(fetch, bucket.parameters)
        if bucket.trained:
            rows = ((f.name, layout.updated(updated, f)) for f in layout.fragments)
            held.trained = {name: nn.Parameter(row) for name, row in rows}
        return held

    def _optimizer(self, order: Sequence[str]) -> torch.optim.Optimizer | None:
        """The optimizer, with parameters in the model's order: a factory may group by position."""
        places = {name: place for place, name in enumerate(order)}
        trained = [pair for held in self.held.values() for pair in held.trained.items()]
        trained.sort(key=lambda pair: places[pair[0]])
        factory = self.training.optimizer
        return make(factory, trained) if factory is not None and trained else None
