"""What a device keeps between steps: parameters in flat buffers, buffers, the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from piper.base.errors import PiperError
from piper.ir.ops import Compute
from piper.ir.passes import Kind, Ref
from piper.ir.rules import Bucket
from piper.ir.shards import RANK
from piper.ir.tensors import TensorSpec
from piper.state.assignment import Assignment
from piper.state.checkpoint.boxes import Box
from piper.state.device.bucket_layout import BucketLayout
from piper.state.device.pieces import pieces_of, whole_shard
from piper.state.device.snapshot import Snapshot
from piper.state.optimizer.factory import kind_of, make
from piper.state.optimizer.probe import make_scheduler
from piper.state.weights.first_tensors import Fetch


@dataclass(slots=True)
class HeldBucket:
    """One bucket on one device."""

    layout: BucketLayout
    flat: Tensor
    """The parameters the programs read: whole, or this device's part if they are scattered."""
    updated: Tensor
    """What the optimizer updates: this device's range of ``flat``, or a copy in more precision."""
    trained: tuple[nn.Parameter, ...]
    """The optimizer's parameters, one for each fragment."""
    groups: list[list[nn.Parameter]] = field(default_factory=list)
    """The same, as the optimizer groups them."""

    @property
    def is_copy(self) -> bool:
        return self.layout.bucket.gradient != self.layout.bucket.dtype

    def places(self) -> dict[str, list[tuple[Box, Tensor]]]:
        """By parameter, the boxes of it that this device has, and the memory that each is kept in;
        ``publish`` brings parts to where they are kept a second time."""
        layout = self.layout
        found: dict[str, list[tuple[Box, Tensor]]] = {n: [] for n in layout.bucket.parameters}
        if layout.scattered or self.is_copy:
            for fragment in layout.fragments:
                row = self.updated[fragment.start : fragment.stop]
                for piece in pieces_of(layout, fragment):
                    into = piece.of_range(row, layout, fragment)
                    found[fragment.name].append((piece.whole, into))
        if not layout.scattered:
            for name, places in found.items():
                view = layout.view(self.flat, name)
                places += [(p.whole, p.shard.of(view)) for p in whole_shard(layout, name)]
        return found

    def publish(self) -> None:
        """Bring what was updated into this device's part of ``flat``."""
        if self.is_copy:
            low, high = (0, self.layout.share) if self.layout.scattered else self.layout.mine
            self.flat[low:high].copy_(self.updated)


class DeviceState:
    """Everything that one device holds."""

    def __init__(self, given: Assignment, where: torch.device, fetch: Fetch | None) -> None:
        """``fetch`` gives the first values of a parameter or buffer by name; None if all of it is
        to be filled from elsewhere."""
        self.device = given.device
        self.where = where
        self.training = given.training
        self.capturable = False
        """Whether steps may be captured as CUDA graphs: then the host waits for nothing in them."""
        self.steps = 0
        self.changing = False
        """Whether a step has begun to change what is kept, and is not over."""
        self.snapshot: Snapshot | None = None
        """What a save in the background has not copied yet, all or some of it."""
        self.held: dict[int, HeldBucket] = {}
        for index, bucket in enumerate(given.buckets):
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
        for name, spec in buffers_of(given).items():
            if fetch is None:
                self.buffers[name] = spec.empty(where)
            else:
                self.buffers[name] = fetch(name).whole().to(where, copy=True)
        self.optimizer = self._optimizer(given.order)
        for held in self.held.values():
            mine = {id(p) for p in held.trained}
            held.groups = [[p for p in g["params"] if id(p) in mine] for g in self._groups()]
        self._rates: list[Tensor] = []
        """On the device, the learning rate of each of the optimizer's groups, if a schedule changes
        what a captured update reads."""
        factory = given.training.scheduler
        self.scheduler = None
        if factory is not None and self.optimizer is not None:
            self.scheduler = make_scheduler(factory, self.optimizer)

    def update(self, rows: Sequence[tuple[HeldBucket, list[Tensor]]]) -> None:
        """One step of the optimizer, on some buckets with their gradients."""
        if self.optimizer is None:
            return
        self.changing = True
        for held, gradients in rows:
            for parameter, gradient in zip(held.trained, gradients, strict=True):
                parameter.grad = gradient
        try:
            with self._only([held for held, _ in rows]):
                self.optimizer.step()
        finally:
            for held, _ in rows:
                for parameter in held.trained:
                    parameter.grad = None
        for held, _ in rows:
            held.publish()

    def make_capturable(self) -> None:
        """From now on a step waits for nothing on the host, and may be captured as a CUDA graph."""
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
                raise PiperError(
                    f"cuda_graphs=True: {kind_of(*self._made())} reads the learning rate, "
                    "which a scheduler changes, on the host: make it fused=True"
                )
        if self.scheduler is not None:
            self._rates = [torch.tensor(g["lr"], device=self.where) for g in self._groups()]

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of each of the optimizer's groups, in the step that runs; none that is
        on a GPU, which would have to be waited for."""
        rates = [group["lr"] for group in self._groups() if "lr" in group]
        return tuple(float(x) for x in rates if not (isinstance(x, Tensor) and x.is_cuda))

    def settings(self) -> list[dict[str, Any]]:
        """The numbers that a captured update has fixed."""
        free = ("params", "lr") if self._rates else ("params",)
        return [{k: v for k, v in group.items() if k not in free} for group in self._groups()]

    @contextmanager
    def _only(self, rows: Sequence[HeldBucket]) -> Iterator[None]:
        """The optimizer knows of these buckets' parameters only: it looks at every one that it
        knows."""
        groups = self._groups()
        usual = [dict(group) for group in groups]
        for i, group in enumerate(groups):
            if len(rows) == 1:
                group["params"] = rows[0].groups[i]
            if self._rates:
                group["lr"] = self._rates[i]
        try:
            yield
        finally:
            for group, before in zip(groups, usual, strict=True):
                group["params"] = before["params"]
                if self._rates:
                    group["lr"] = before["lr"]

    def _made(self) -> list[torch.optim.Optimizer]:
        return [] if self.optimizer is None else [self.optimizer]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def tensors(self) -> Iterable[Tensor]:
        """All that is kept between steps."""
        for held in self.held.values():
            yield held.flat
            yield held.updated
        yield from self.buffers.values()
        if self.optimizer is not None:
            for kept in self.optimizer.state.values():
                yield from (item for item in kept.values() if isinstance(item, Tensor))

    def advance(self) -> None:
        """A step is over."""
        self.steps += 1
        if self.scheduler is not None:
            self.scheduler.step()
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
        held = HeldBucket(layout, flat, updated, ())
        if fetch is not None:
            self._fill(held, fetch)
        if bucket.trained:
            held.trained = tuple(nn.Parameter(layout.updated(updated, f)) for f in layout.fragments)
        return held

    def _fill(self, held: HeldBucket, fetch: Fetch) -> None:
        """With first weights."""
        for name, places in held.places().items():
            first = fetch(name)
            for box, into in places:
                first.read(box, into, held.layout.bucket.gradient)
        if held.layout.scattered:
            held.publish()

    def _optimizer(self, order: Sequence[str]) -> torch.optim.Optimizer | None:
        """For the parameters in the model's own order: a factory may group them by their place."""
        places = {name: place for place, name in enumerate(order)}
        found = [
            (places[fragment.name], fragment.name, parameter)
            for held in self.held.values()
            for fragment, parameter in zip(held.layout.fragments, held.trained, strict=False)
        ]
        trained = [(name, parameter) for _, name, parameter in sorted(found, key=lambda x: x[0])]
        factory = self.training.optimizer
        return make(factory, trained) if factory is not None and trained else None


def buffers_of(given: Assignment) -> dict[str, TensorSpec]:
    """The buffers of the chunks that a device runs, in training or evaluation."""
    found: dict[str, TensorSpec] = {}
    rows = ((given.plan, given.code), (given.evaluation_plan, given.evaluation_code))
    for plan, code in rows:
        programs = next(iter(code.programs.values()))
        chunks = {x.op.chunk for x in plan.instructions if isinstance(x.op, Compute)}
        for chunk in sorted(chunks):
            for place, name in enumerate(code.pieces[chunk].buffers):
                if name not in code.constants and not name.startswith(RANK):
                    found[name] = programs[chunk].specs[Ref(Kind.BUFFER, place)]
    return found
