"""What each node of a DAG takes on a cluster: from a recorded profile where there is one, otherwise
from operations, bytes and links."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from piper.capture.program import Pass
from piper.capture.saving import Remat
from piper.cost.cluster import Device, Way
from piper.cost.communicating import collective_seconds, send_seconds
from piper.ir.dag import Collective, Compute, Dag, Node, Transfer, Update
from piper.lower.recorded import Recorded
from piper.lower.sizes import Sizes


class Prices:
    """Seconds, for one DAG."""

    def __init__(
        self,
        dag: Dag,
        sizes: Sizes,
        recorded: Recorded | None,
        *,
        dtype: torch.dtype,
        fused: bool,
        optimizer: float,
    ) -> None:
        """``dtype`` is what matrices are multiplied in; ``fused`` says whether a compiler fuses
        the rest; ``optimizer`` is its state, in bytes for each byte it updates."""
        self._dag, self._sizes, self._recorded = dag, sizes, recorded
        self._dtype, self._fused, self._optimizer = dtype, fused, optimizer
        self._computing: dict[tuple[object, ...], float] = {}
        self._talking: dict[tuple[object, ...], float] = {}

    def computing(self, node: Node, device: Device) -> float:
        """Of a computation or an update, on each device of that kind."""
        match node.op:
            case Compute(chunk=chunk, which=which) as op:
                key: tuple[object, ...] = chunk, which, node.parts, id(device)
                predicted = partial(self._pass, op, node.parts, device)
            case Update(bucket=bucket):
                key = bucket, id(device)
                predicted = partial(self._update, bucket, device)
            case _:
                raise AssertionError(f"{node.op} computes nothing")
        if key not in self._computing:
            self._computing[key] = self._measured_or(predicted, node)
        return self._computing[key]

    def talking(self, node: Node, way: Way) -> float:
        """Of a communication."""
        nbytes = self._sizes.moved(node)
        kind = node.op.kind if isinstance(node.op, Collective) else None
        key = kind, way, nbytes
        if key not in self._talking:
            predicted = partial(self._communication, node, way, nbytes)
            self._talking[key] = self._measured_or(predicted, node)
        return self._talking[key]

    def useful(self, node: Node) -> int:
        """Operations of a computation on all its devices, without what is computed again."""
        op = node.compute
        group = node.parts
        model = self._sizes.models.get(group, self._dag.model)
        passes = model.chunks[op.chunk].variants[Remat.NONE].passes
        found = passes.get(op.which) or passes.get(Pass.B)
        return found.flops * group if found else 0

    def _measured_or(self, predicted: Callable[[], float], node: Node) -> float:
        recorded = self._recorded
        known = None if recorded is None else recorded.seconds(self._dag, self._sizes, node)
        return predicted() if known is None else known

    def _pass(self, op: Compute, group: int, device: Device) -> float:
        facts = self._sizes.facts(op, group)
        moved = facts.moved_fused if self._fused else facts.moved
        return device.seconds(facts.flops, moved, self._dtype)

    def _update(self, bucket: int, device: Device) -> float:
        updated = self._sizes.part(bucket, 1) * self._dag.buckets[bucket].gradient.itemsize
        # reads gradients, parameters and state; writes parameters and state
        return device.seconds(0, int(updated * (3 + 2 * self._optimizer)), self._dtype)

    def _communication(self, node: Node, way: Way, nbytes: int) -> float:
        if isinstance(node.op, Collective):
            return collective_seconds(node.op.kind, way, nbytes)
        assert isinstance(node.op, Transfer)
        return send_seconds(way, nbytes)
