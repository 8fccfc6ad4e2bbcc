"""Gradient reductions, optimizer updates, parameter gathers, and copies of state for a save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from piper.ir.collectives import Move
from piper.ir.dag.values import Content
from piper.ir.ops import Collective, Copy, Update
from piper.ir.plan.instructions import Instruction
from piper.runtime.comm.protocol import Begin
from piper.runtime.context import ExecutionContext
from piper.runtime.pending import BoundInstruction, Pending
from piper.state.device.device_state import HeldBucket

_ROW = 512
"""Elements whose squares are summed in fp32; a longer sum would lose precision."""


def reduce(
    context: ExecutionContext, x: Instruction, op: Collective, begin: Begin
) -> BoundInstruction:
    """Sums a bucket's gradients over all devices; or, of sharded state, over the devices of a copy
    and then over the copies."""
    slots, where = context.slots, context.where
    store = context.store(x)
    held = context.state.held[x.of]
    layout = held.layout
    kind = layout.bucket.gradient
    (target,) = x.writes
    buffer = next((s for s in x.reads if context.plan.slots[s].bucket == x.of), None)
    sources = _sources(context, held, x.reads)
    adds, scatters = target in x.adds, op.kind is Move.REDUCE_SCATTER

    def execute() -> Pending:
        if buffer is not None:
            flat = slots[buffer]
        elif layout.sharded and not scatters:  # this copy saw no microbatch
            flat = torch.zeros(layout.share, dtype=kind, device=where)
        else:
            flat = layout.buffer(kind, where)
            for name, places in sources:
                view = layout.view(flat, name)
                if not places:
                    view.zero_()  # this device computes no gradient for it
                for first, (slot, i) in enumerate(places):
                    view.add_(slots[slot][i]) if first else view.copy_(slots[slot][i])
        if scatters:
            out = torch.empty(layout.share, dtype=kind, device=where)
            handle = begin(flat, out)
        else:
            out = flat
            handle = begin(flat)

        def finish() -> None:
            store(slots[target].add_(out) if adds else out)

        return Pending(x.name, [handle], finish, keeps=(flat,))

    return execute


def _sources(
    context: ExecutionContext, held: HeldBucket, reads: tuple[int, ...]
) -> list[tuple[str, list[tuple[int, int]]]]:
    """For each parameter of a bucket, the slots with its gradients, each with the index in it."""
    bundles = [(slot, context.plan.slots[slot].names) for slot in reads]
    return [
        (name, [(slot, names.index(name)) for slot, names in bundles if name in names])
        for name in held.layout.bucket.parameters
    ]


def gather(context: ExecutionContext, x: Instruction, begin: Begin) -> BoundInstruction:
    where, store = context.where, context.store(x)
    held = context.state.held[x.of]
    layout = held.layout

    def whole() -> Pending:
        low, high = layout.mine
        part = held.flat[low:high].clone()
        return Pending(x.name, [begin(part, held.flat)], partial(store, ()))

    def parts() -> Pending:
        out = torch.empty(layout.padded, dtype=held.flat.dtype, device=where)
        handle = begin(held.flat, out)

        def finish() -> None:
            store({n: layout.view(out, n) for n in layout.bucket.parameters})

        return Pending(x.name, [handle], finish)

    return parts if layout.scattered else whole


def gradients_of(
    context: ExecutionContext, bucket: int, reads: tuple[int, ...]
) -> Callable[[], list[Tensor]]:
    """A function that returns the summed gradient of each fragment of a bucket, from the slots in
    ``reads``."""
    held = context.state.held[bucket]
    layout, slots = held.layout, context.slots
    reduced = [slot for slot in reads if context.plan.slots[slot].bucket == bucket]
    if reduced:
        (slot,) = reduced
        return lambda: [layout.updated(slots[slot], f) for f in layout.fragments]
    sources = _sources(context, held, reads)

    def summed() -> list[Tensor]:
        sums = []
        for _, places in sources:
            first, *others = [slots[slot][i] for slot, i in places]
            for other in others:
                first = first + other
            sums.append(first)
        return sums

    return summed


def update(context: ExecutionContext, x: Instruction, op: Update) -> BoundInstruction:
    """Runs the optimizer on the plan's buckets: one, all of the device's, or none if a later
    instruction updates them."""
    slots, state = context.slots, context.state
    own, collect_own = state.held[op.bucket], gradients_of(context, op.bucket, x.reads)
    collect = [(state.held[b], gradients_of(context, b, x.reads)) for b in x.buckets]
    counted, clip = context.code.count is not None, state.training.clip_norm
    waits, may_skip = state.training.waits_for_norm, state.training.on_nan is not None
    (target,) = x.writes

    def scale(held: HeldBucket, gradients: list[Tensor]) -> None:
        if counted:
            count = context.scalars.sums[Content.LOSS, 0][1]
            for gradient in gradients:
                gradient.div_(count.to(gradient.dtype))
        state.note_gradients(held, gradients)
        if clip is not None:
            coefficient = (clip / (_norm(context, counted) + 1e-6)).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(coefficient.to(gradient.dtype))

    def execute() -> None:
        if may_skip and not _finite(context, counted):
            slots[target] = torch.zeros((), dtype=torch.float64, device=context.where)
            return
        rows = [(held, gradients()) for held, gradients in collect]
        if not waits:  # the norm of sums: the count divides it at the end
            known = next((g for held, g in rows if held is own), None)
            slots[target] = squares(counted_once(own, collect_own() if known is None else known))
        else:
            slots[target] = torch.zeros((), dtype=torch.float64, device=context.where)
        for held, gradients in rows:
            scale(held, gradients)
        if rows:
            state.update(rows)

    return execute


def copy(context: ExecutionContext, x: Instruction, op: Copy) -> BoundInstruction:
    """Copies a bucket's state to host memory for a background save."""
    state = context.state

    def execute() -> Pending:
        snapshot = state.snapshot
        return Pending(x.name, [] if snapshot is None else [snapshot.copy(op.bucket)])

    return execute


def _finite(context: ExecutionContext, counted: bool) -> bool:
    """Whether the global gradient norm is finite. All devices have the same norm, so they agree.
    The host waits for it."""
    if context.scalars.finite is None:
        context.scalars.finite = bool(torch.isfinite(_norm(context, counted)))
    return context.scalars.finite


def _norm(context: ExecutionContext, counted: bool) -> Tensor:
    sums = context.scalars.sums
    norm = sums[Content.NORM, 0].sqrt()
    return norm / sums[Content.LOSS, 0][1] if counted else norm


def counted_once(held: HeldBucket, gradients: list[Tensor]) -> list[Tensor]:
    """The gradients that this device adds to the global norm. Replicas have equal gradients, so
    each adds a share of them."""
    return gradients[held.layout.copy :: held.layout.bucket.copies]


def squares(gradients: Sequence[Tensor]) -> Tensor:
    """The squared norm over all these gradients."""
    real = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
    norms = [norms.to(torch.float64) for norms in _norms(real)]
    return torch.cat(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """Norms of parts that together make up the gradients.

    In fp64 only where that is cheap. On a GPU, fp64 would first copy gradients of other dtypes, and
    an fp32 norm is accurate: it sums in a tree. On a CPU, fp64 takes ten times as long, and fp32
    norms of short rows lose no precision.
    """
    if gradients and gradients[0].is_cuda:
        doubles = [g for g in gradients if g.dtype is torch.float64]
        others = [g for g in gradients if g.dtype is not torch.float64]
        return [
            torch.stack(torch._foreach_norm(alike, 2, dtype=dtype))
            for alike, dtype in ((doubles, torch.float64), (others, torch.float32))
            if alike
        ]
    norms, rest = [], []
    for gradient in gradients:
        if gradient.dtype is torch.float32 and gradient.numel() >= _ROW:
            flat = gradient.reshape(-1)
            whole = len(flat) // _ROW * _ROW
            norms.append(torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1))
            gradient = flat[whole:]
        if gradient.numel():
            rest.append(gradient)
    if rest:
        norms.append(torch.stack(torch._foreach_norm(rest, 2, dtype=torch.float64)))
    return norms
