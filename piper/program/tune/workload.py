"""What is known of a captured model before a strategy is applied: lower bounds of the time and the
memory of candidates, and a rough time, by which they are tried in turn.

The facts are those of the whole batch on one device. A device with a share of the rows, the
sequence and the weights does at least this share of every operation. Layers are taken as equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from piper.cost.cluster import Cluster
from piper.cost.hardware import Device
from piper.cost.link_time import communication_seconds
from piper.cost.tasks import TaskKind, computed_in
from piper.ir.collectives import Move
from piper.ir.dag.facts import ChunkFacts, Model, OpCost, ParameterFacts, Variant
from piper.ir.passes import Pass, RematPolicy
from piper.ir.rules import OptimizerCost
from piper.program.tune.candidate import Candidate

_SPLIT = {"zb-h1": 1 / 3, "zb-v": 1 / 6, "dualpipev": 1 / 6, "v-half": 1 / 2}
"""Schedules that split backwards, and a usual bubble: this share of a rank's time for one
microbatch, times the other ranks."""
_SHARDED = 0.8
"""The share of its saved activations that a sharded region surely has: it may save others."""
_HIDDEN = 0.7
"""The share of computation beside which communication of state is usually hidden."""


@dataclass(frozen=True)
class Workload:
    """A model, the name of its regions, a cluster and an optimizer."""

    model: Model
    regions: str
    cluster: Cluster
    optimizer: OptimizerCost
    fused: bool = False
    _known: dict[object, float] = field(default_factory=dict, repr=False)

    @cached_property
    def layers(self) -> int:
        """The number of regions."""
        return len({c.tags[self.regions] for c in self._inner})

    @cached_property
    def _usual(self) -> ParameterFacts | None:
        """A trained parameter, whose dtypes stand for all."""
        return next((p for p in self.model.parameters.values() if p.trained), None)

    @cached_property
    def _inner(self) -> list[ChunkFacts]:
        return [c for c in self.model.chunks if self.regions in c.tags]

    @cached_property
    def _outer(self) -> list[ChunkFacts]:
        return [c for c in self.model.chunks if self.regions not in c.tags]

    def seconds(self, c: Candidate) -> float:
        """A lower bound on the seconds of a step: the pipeline with free communication, cut into
        stages in the best way."""
        once, m = self._once(c), c.microbatches
        if c.per_rank > 1 or c.schedule in _SPLIT or c.pp == 1:
            return m * once / c.pp
        # rank r computes m times, after the forwards and before the backwards of those before it
        return once / (1 - (1 - 1 / m) ** c.pp)

    def peak(self, c: Candidate) -> float:
        """A lower bound on the bytes of the fullest device: state, and saved activations."""
        sharded = c.tp * c.cp
        share = (1 if sharded == 1 else _SHARDED) / (c.parts * sharded)
        saved = self._saved(self.model.remat)
        if c.recomputed:
            saved = min(saved, self._saved(RematPolicy.ALL))
        state = self._state(c)
        held = [1] * c.pp
        if c.per_rank == 1 and c.schedule in ("1f1b", "zb-h1"):
            held = [min(c.pp - rank, c.microbatches) for rank in range(c.pp)]
        return 1 / sum(1 / max(state + n * saved * share, 1.0) for n in held)

    def guess(self, c: Candidate) -> float:
        """A rough time of a step."""
        uneven = -(-self.layers // c.stages) * c.stages / max(1, self.layers)
        once = self._once(c, rough=True) * max(1.0, uneven) / c.pp
        m = c.microbatches
        bubble = (c.pp - 1) * once * _SPLIT.get(c.schedule, 1 / c.per_rank)
        inside = self._inside(c) * (m + (c.pp - 1) / c.per_rank)
        hop = (0, c.dp * c.cp * c.tp) if c.pp > 1 else ()
        sends = 2 * (c.stages - 1) * self._moved(None, hop, self._wide(c))
        return m * once + bubble + inside + sends + self._of_state(c, m * once)

    def _once(self, c: Candidate, *, rough: bool = False) -> float:
        """Seconds of a forward and a backward of one microbatch through the whole model: at least,
        or, if ``rough``, at the speeds that products of its sizes reach."""
        share = 1 / (c.parts * c.tp * c.cp)
        key = share, c.recomputed, rough
        if key not in self._known:
            again = c.recomputed / max(1, self.layers)
            inner = self._computing(self._inner, share, self.model.remat, rough) * (1 - again)
            if again:
                inner += self._computing(self._inner, share, RematPolicy.ALL, rough) * again
            outer = self._computing(self._outer, share, self.model.remat, rough)
            self._known[key] = inner + outer
        return self._known[key]

    def _computing(
        self, chunks: Sequence[ChunkFacts], share: float, policy: RematPolicy, rough: bool
    ) -> float:
        return sum(self._variant(chunk.variants[policy], share, rough) for chunk in chunks)

    def _variant(self, variant: Variant, share: float, rough: bool) -> float:
        key = id(variant), share, rough
        if key not in self._known:
            passes = [variant.passes[p] for p in (Pass.F, Pass.B) if p in variant.passes]
            kernels = [k for p in passes for k in (p.cost.fused if self.fused else p.cost.each)]
            self._known[key] = min(
                sum(k.count * self._kernel(device, k, share, rough) for k in kernels)
                for device in self._devices
            )
        return self._known[key]

    def _kernel(self, device: Device, kernel: OpCost, share: float, rough: bool) -> float:
        """Seconds of ``share`` of a kernel; its largest size is that of the rows."""
        speed = device.peak(self._dtype) * device.attention
        if kernel.product and not rough:
            speed = device.fastest(self._dtype)
        elif kernel.product:
            *others, most = sorted(kernel.product)
            mine = OpCost(1, product=(max(1, int(most * share)), *others))
            speed = device.peak(self._dtype) * device.reached(mine, self._dtype)
        computing = (kernel.flops - kernel.skipped) * share / speed
        return device.overhead + max(computing, kernel.nbytes * share / device.bandwidth)

    @cached_property
    def _devices(self) -> list[Device]:
        """One device of each kind."""
        return [*{id(d): d for box in self.cluster.machines for d in box.devices}.values()]

    @cached_property
    def _dtype(self) -> torch.dtype:
        return computed_in(self.model)

    def _saved(self, policy: RematPolicy) -> float:
        """Bytes that the forwards of all regions save for their backwards."""
        if policy not in self._known:
            variants = [chunk.variants[policy] for chunk in self._inner]
            saved = float(sum(v.saved_bytes + v.saved_for_bw_bytes for v in variants))
            self._known[policy] = saved
        return self._known[policy]

    @cached_property
    def _elements(self) -> int:
        """Elements of the trained parameters of all regions."""
        names = {name for chunk in self._inner for name in chunk.parameters}
        known = self.model.parameters
        kept = [known[n] for n in names if known[n].trained]
        return sum(p.nbytes // p.dtype.itemsize for p in kept)

    def _state(self, c: Candidate) -> float:
        """Bytes of the state of all regions of a pipeline on one device of each rank."""
        usual = self._usual
        if usual is None:
            return 0.0
        own, summed = usual.dtype.itemsize, usual.gradient.itemsize
        elements, n = self._elements / (c.tp * c.ep), c.dp * c.cp
        updated = summed * (self.optimizer.state + (usual.dtype != usual.gradient))
        sums = summed if c.microbatches > 1 and c.zero < 2 else 0
        parameters = own / (n if c.zero == 3 else 1)
        return elements * (parameters + updated / (n if c.zero else 1) + sums)

    def _wide(self, c: Candidate) -> float:
        """Bytes of the activations between two regions, for the rows of a device."""
        return self._widest / (c.parts * c.cp)

    @cached_property
    def _widest(self) -> int:
        values = self.model.values
        return max((values[v].nbytes for x in self._inner for v in x.outputs), default=0)

    def _moved(self, kind: Move | None, group: Sequence[int], nbytes: float) -> float:
        if len(group) < 2 or not nbytes:
            return 0.0
        way = self.cluster.way(tuple(group))
        return communication_seconds(kind or TaskKind.SEND, way, int(nbytes))

    def _inside(self, c: Candidate) -> float:
        """Seconds of the communication inside regions for a microbatch, on a rank."""
        wide, layers = self._wide(c), self.layers / c.pp
        times = 8 + 4 * c.recomputed / max(1, self.layers)  # gathers and scatters of F and B
        tensor = times * self._moved(Move.ALL_GATHER, range(c.tp), wide)
        step = c.tp
        context = times * self._moved(Move.ALL_TO_ALL, range(0, c.cp * step, step), wide / c.tp)
        rows = range(c.ep) if c.ep > 1 else ()
        return layers * (tensor + context + 4 * self._moved(Move.ALL_TO_ALL, rows, 2 * wide))

    def _of_state(self, c: Candidate, computing: float) -> float:
        """Seconds of exposed communication of state, and of the update."""
        inner = c.tp
        group = range(0, c.dp * c.cp * inner, inner)
        bound = self._state(c) / c.pp
        elements = self._elements / (c.tp * c.ep * c.pp)
        gathered = self._moved(Move.ALL_GATHER, group, 2 * elements)
        reduced = self._moved(Move.REDUCE_SCATTER, group, 4 * elements)
        m = c.microbatches
        moved = {0: 2 * reduced, 1: gathered + reduced, 2: gathered + m * reduced}.get(
            c.zero, m * (2 * gathered + reduced)
        )
        beside = computing if c.zero > 1 else computing / m
        device = self.cluster.device(0)
        return max(0.0, moved - _HIDDEN * beside) + 2 * bound / device.bandwidth
