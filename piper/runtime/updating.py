"""Gradients summed over devices, scalars, updates and gathers, as functions of no arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from piper.capture.program import Pass
from piper.ir.dag import Compute, Update
from piper.lower.plan import Instruction, updated
from piper.runtime.board import Board
from piper.runtime.pending import Act, Pending
from piper.runtime.state import Held

_ROW = 512
"""Elements whose squares are added up in fp32; more would lose digits."""


def reduce(board: Board, x: Instruction) -> Act:
    slots, where = board.slots, board.where
    store = board.store
    held = board.state.held[x.of]
    layout = held.layout
    kind = layout.bucket.gradient
    if layout.divided:
        scatter = board.comm.reduce_scatter(x.node, x.stream, layout.block)
    else:
        sum_up = board.comm.all_reduce(x.node, x.stream, layout.group)
    (target,) = x.writes
    sources = _sources(board, held, x.reads)
    adds = target in x.adds
    summed = board.buffers_of_sums

    def act() -> Pending:
        flat = summed.pop(x.of, None)
        if flat is None:
            flat = torch.empty(layout.padded, dtype=kind, device=where)
            flat[layout.elements :].zero_()
            for name, places in sources:
                view = layout.view(flat, name)
                if not places:
                    view.zero_()  # this device computes none of the sum's parts
                for first, (slot, i) in enumerate(places):
                    view.add_(slots[slot][i]) if first else view.copy_(slots[slot][i])
        if layout.divided:
            out = torch.empty(layout.share, dtype=kind, device=where)
            handle = scatter(flat, out)
        else:
            out = flat
            handle = sum_up(flat)

        def finish() -> None:
            store(target, slots[target].add_(out) if adds else out)

        return Pending(x.name, [handle], finish, keeps=(flat,))

    return act


def sum_copies(board: Board, x: Instruction) -> Act:
    slots, where = board.slots, board.where
    store = board.store
    layout = board.state.held[x.of].layout
    sum_up = board.comm.all_reduce(x.node, x.stream, layout.across)
    (target,) = x.writes

    def act() -> Pending:
        if x.reads:
            (source,) = x.reads
            data = slots[source]
        else:  # this copy saw no microbatch
            data = torch.zeros(layout.share, dtype=layout.bucket.gradient, device=where)
        handle = sum_up(data)

        def finish() -> None:
            store(target, data)

        return Pending(x.name, [handle], finish)

    return act


def _sources(
    board: Board, held: Held, reads: tuple[int, ...]
) -> list[tuple[str, list[tuple[int, int]]]]:
    """For each parameter of a bucket, the slots with its gradients and their places there."""
    bundles = [(slot, board.grads[slot]) for slot in reads if slot in board.grads]
    return [
        (name, [(slot, names.index(name)) for slot, names in bundles if name in names])
        for name in held.layout.bucket.parameters
    ]


def gather(board: Board, x: Instruction) -> Act:
    where, store = board.where, board.store
    held = board.state.held[x.of]
    layout = held.layout
    begin = board.comm.all_gather(x.node, x.stream, layout.block)
    (target,) = x.writes

    def whole() -> Pending:
        low, high = layout.mine
        part = held.flat[low:high].clone()
        handle = begin(part, held.flat)

        def finish() -> None:
            store(target, ())

        return Pending(x.name, [handle], finish)

    def parts() -> Pending:
        out = torch.empty(layout.padded, dtype=held.flat.dtype, device=where)
        handle = begin(held.flat, out)

        def finish() -> None:
            store(target, {n: layout.view(out, n) for n in layout.bucket.parameters})

        return Pending(x.name, [handle], finish)

    return parts if layout.scattered else whole


def total(board: Board, x: Instruction, group: tuple[int, ...]) -> Act:
    slots, where = board.slots, board.where
    store = board.store
    sum_up = board.comm.all_reduce(x.node, x.stream, group)
    (target,) = x.writes
    counted = board.code.count is not None
    half = len(x.reads) // 2 if counted else len(x.reads)
    largest = max(board.state.program.loss_groups)
    sizes = {} if counted else _loss_groups(board)
    shares = [largest / sizes.get(slot, largest) for slot in x.reads[:half]]
    uneven = any(share != 1 for share in shares)
    weights = torch.tensor(shares, dtype=torch.float64, device=where) if uneven else None

    def act() -> Pending:
        data = torch.zeros(2, dtype=torch.float64, device=where)
        for i, part in enumerate((x.reads[:half], x.reads[half:])):
            if part:
                scalars = torch.stack([slots[slot].reshape(()) for slot in part])
                if weights is not None:
                    scalars = scalars * weights
                narrow = scalars.dtype in (torch.bfloat16, torch.float16)
                data[i] = (scalars.float() if narrow else scalars).sum()
        handle = sum_up(data)

        def finish() -> None:
            board.totals.loss = data
            store(target, data)

        return Pending(x.name, [handle], finish)

    return act


def _loss_groups(board: Board) -> dict[int, int]:
    """For each slot that holds a loss at the end, over how many devices its rows are divided."""
    code = board.code
    return {
        slot: len(x.group)
        for x in board.plan.instructions
        if isinstance(x.op, Compute)
        and x.op.which is Pass.F
        and code.loss in code.pieces[x.op.chunk].outputs
        for slot in x.writes
    }


def norm(board: Board, x: Instruction, group: tuple[int, ...]) -> Act:
    slots, where = board.slots, board.where
    store = board.store
    sum_up = board.comm.all_reduce(x.node, x.stream, group)
    (target,) = x.writes
    before = board.state.program.training.clip_norm is not None
    takers = [u for u in board.plan.instructions if isinstance(u.op, Update)] if before else []
    collect = [
        (board.state.held[u.op.bucket], _gradients(board, u)) for u in takers
        if isinstance(u.op, Update)
    ]  # fmt: skip

    def act() -> Pending:
        data = torch.zeros((), dtype=torch.float64, device=where)
        for held, gradients in collect:
            data += squares(_counted(held, gradients()))
        for slot in () if before else x.reads:
            data += slots[slot]
        handle = sum_up(data)

        def finish() -> None:
            board.totals.norm = data
            store(target, data)

        return Pending(x.name, [handle], finish)

    return act


def _gradients(board: Board, x: Instruction) -> Callable[[], list[Tensor]]:
    """Gives the summed gradient of each fragment that an update is about."""
    assert isinstance(x.op, Update)
    held = board.state.held[x.op.bucket]
    layout, slots = held.layout, board.slots
    reduced = [slot for slot in x.reads if board.buckets.get(slot) == x.op.bucket]
    if reduced:
        (slot,) = reduced
        if layout.divided:
            return lambda: [slots[slot][f.start : f.stop] for f in layout.fragments]
        return lambda: [layout.view(slots[slot], f.name) for f in layout.fragments]
    sources = _sources(board, held, x.reads)

    def summed() -> list[Tensor]:
        found = []
        for _, places in sources:
            first, *others = [slots[slot][i] for slot, i in places]
            for other in others:
                first = first + other
            found.append(first)
        return found

    return summed


def update(board: Board, x: Instruction, place: int) -> Act:
    """The optimizer on what the instruction at ``place`` updates: one bucket, all of the device,
    or, if a later instruction does that, nothing yet."""
    assert isinstance(x.op, Update)
    slots, state = board.slots, board.state
    training = state.program.training
    own, collect_own = state.held[x.op.bucket], _gradients(board, x)
    whole = state.program.settings.optimizer.whole
    updates = updated(board.plan, whole=whole)[place]
    collect = [
        (state.held[u.op.bucket], _gradients(board, u)) for u in updates if isinstance(u.op, Update)
    ]
    counted, clip = board.code.count is not None, training.clip_norm
    (target,) = x.writes

    def scale(gradients: list[Tensor]) -> None:
        if counted:
            assert board.totals.loss is not None
            for gradient in gradients:
                gradient.div_(board.totals.loss[1].to(gradient.dtype))
        if clip is not None:
            coefficient = _clip(board, clip, counted)
            for gradient in gradients:
                gradient.mul_(coefficient.to(gradient.dtype))

    def act() -> None:
        rows = [(held, gradients()) for held, gradients in collect]
        if clip is None:  # of sums: the count is divided off at the end
            found = next((g for held, g in rows if held is own), None)
            slots[target] = squares(_counted(own, collect_own() if found is None else found))
        else:
            slots[target] = torch.zeros((), dtype=torch.float64, device=board.where)
        for _, gradients in rows:
            scale(gradients)
        if rows:
            state.update(rows)

    return act


def _clip(board: Board, limit: float, counted: bool) -> Tensor:
    """What all gradients are multiplied with so that their norm stays within ``limit``."""
    assert board.totals.norm is not None
    norm = board.totals.norm.sqrt()
    if counted:
        assert board.totals.loss is not None
        norm = norm / board.totals.loss[1]
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def _counted(held: Held, gradients: list[Tensor]) -> list[Tensor]:
    """Those that this device adds to the norm: holders of equal ones share them out."""
    return gradients[held.layout.copy :: len(held.layout.across)]


def squares(gradients: Sequence[Tensor]) -> Tensor:
    """The squared norm of all gradients together."""
    real = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
    norms = [norms.to(torch.float64) for norms in _norms(real)]
    return torch.cat(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """Norms of parts of which the gradients consist.

    In fp64 where that is cheap. On a GPU it would first make a copy in fp64, while a norm in fp32
    adds up in a tree. On a CPU it takes ten times as long, while norms of short rows lose nothing.
    """
    if gradients and gradients[0].is_cuda:
        return [torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))]
    found, rest = [], []
    for gradient in gradients:
        if gradient.dtype is torch.float32 and gradient.numel() >= _ROW:
            flat = gradient.reshape(-1)
            whole = len(flat) // _ROW * _ROW
            found.append(torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1))
            gradient = flat[whole:]
        if gradient.numel():
            rest.append(gradient)
    if rest:
        found.append(torch.stack(torch._foreach_norm(rest, 2, dtype=torch.float64)))
    return found
