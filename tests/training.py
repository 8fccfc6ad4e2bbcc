"""Trains twice: in plain PyTorch, microbatch by microbatch, and under a strategy.

A strategy with M microbatches whose regions are on groups of g devices must give the numbers of
plain PyTorch with M * g microbatches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import piper
from piper.capture.intercept.mixed_precision import MixedPrecision
from piper.capture.model import capture
from piper.strategies.directives import Directive, order, partition, place, split
from tests.one_device import SingleDevice
from tests.reference import slices

STEPS = 5
ULPS = 1e-6
"""The error of a sum over devices, as a fraction of a tensor's largest element, in fp32."""

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Scheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
Inputs = Sequence[Any] | Mapping[str, Any]
Batch = tuple[Inputs, Sequence[Tensor]]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer for comparisons within ulps: Adam's first steps turn a nearly zero gradient
    into a full-size step, and so the last bit of a sum into a visible difference."""
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@dataclass(frozen=True)
class Run:
    """The results of training: loss and gradient norm of each step, and the final state."""

    losses: tuple[Tensor, ...]
    norms: tuple[Tensor, ...]
    state: dict[str, Tensor]


def copies(model: nn.Module, loss: Any) -> tuple[nn.Module, Any]:
    """The model, and the loss if it is a module; tensors that they share stay shared."""
    memo: dict[int, Any] = {}
    model = copy.deepcopy(model, memo)
    return model, copy.deepcopy(loss, memo) if isinstance(loss, nn.Module) else loss


def plain(
    model: nn.Module,
    loss: Any,
    batches: Sequence[Batch],
    *,
    microbatches: int,
    optimizer: Optimizer = sgd,
    scheduler: Scheduler | None = None,
    clip_norm: float | None = None,
    bf16: bool = False,
) -> Run:
    """Plain PyTorch on copies. ``bf16`` computes with bf16 copies of the model's weights, and in
    fp32 where autocast does; gradients are summed and weights updated in fp32."""
    model, loss = copies(model, loss)
    masters = _parameters(model, loss)
    made = optimizer([p for p in masters if p.requires_grad])
    schedule = scheduler(made) if scheduler else None
    losses, norms = [], []
    for batch in batches:
        if bf16:
            low, low_loss = copies(model, loss)
            low.bfloat16()
            if isinstance(low_loss, nn.Module):
                low_loss.bfloat16()
            losses.append(_gradients(low, low_loss, batch, microbatches, masters))
        else:
            losses.append(_gradients(model, loss, batch, microbatches))
        trained = [p for p in masters if p.grad is not None]
        limit = float("inf") if clip_norm is None else clip_norm
        norms.append(nn.utils.clip_grad_norm_(trained, limit))
        made.step()
        made.zero_grad(set_to_none=True)
        if schedule is not None:
            schedule.step()
    return Run(tuple(losses), tuple(norms), whole_state(model, loss))


def _parameters(model: nn.Module, loss: Any) -> list[nn.Parameter]:
    own = list(model.parameters())
    if isinstance(loss, nn.Module):
        known = set(map(id, own))
        own += [p for p in loss.parameters() if id(p) not in known]
    return own


def _gradients(
    model: nn.Module,
    loss: Any,
    batch: Batch,
    microbatches: int,
    masters: Sequence[nn.Parameter] | None = None,
) -> Tensor:
    """Accumulate one batch's gradients on the parameters or, summed in fp32, on ``masters``."""
    inputs, targets = batch
    args = dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs)
    losses, counts = [], []
    for x, y in zip(slices(args, microbatches), slices(tuple(targets), microbatches), strict=True):
        if masters is not None:
            x = _lowered(x)
        with nullcontext() if masters is None else MixedPrecision():
            found = loss(model(**x) if isinstance(x, dict) else model(*x), *y)
        if isinstance(found, tuple):
            found[0].backward()
            counts.append(found[1].detach())
        else:
            (found / microbatches).backward()
        losses.append((found[0] if isinstance(found, tuple) else found).detach())
        if masters is not None:
            _collect(_parameters(model, loss), masters)
    total = torch.stack(losses).sum()
    if not counts:
        return total / microbatches
    count = torch.stack(counts).sum()
    for parameter in _parameters(model, loss) if masters is None else masters:
        if parameter.grad is not None:
            parameter.grad.div_(count)
    return total / count


def _lowered(tree: Any) -> Any:
    """A batch with its floating-point tensors in bf16."""

    def low(x: Any) -> Any:
        return x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x

    return torch.utils._pytree.tree_map(low, tree)


def _collect(low: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]) -> None:
    for parameter, master in zip(low, masters, strict=True):
        if parameter.grad is not None:
            grad = parameter.grad.float()
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            parameter.grad = None


def whole_state(model: nn.Module, loss: Any) -> dict[str, Tensor]:
    """The state of the model and its loss, by the names that a trainer uses."""
    found = dict(model.state_dict())
    if isinstance(loss, nn.Module):
        found |= {f"loss:{name}": x for name, x in loss.state_dict().items()}
    return {name: x.detach().clone() for name, x in found.items()}


def single(
    model: nn.Module,
    loss: Any,
    batches: Sequence[Batch],
    *,
    microbatches: int,
    optimizer: Optimizer = sgd,
    seed: int = 0,
) -> Run:
    """The reference for models that draw random numbers: the captured step on one device. It has no
    gradient norm."""
    inputs, targets = batches[0]
    captured = capture(model, inputs=inputs, targets=targets, loss=loss, microbatches=microbatches)
    model, loss = copies(model, loss)
    trainer = SingleDevice(captured, model, optimizer, seed=seed)
    losses = [trainer.step(*_given(batch)).loss for batch in batches]
    return Run(tuple(losses), (), whole_state(model, loss))


def compiled(
    model: nn.Module,
    strategy: Sequence[Directive],
    loss: Any,
    batches: Sequence[Batch],
    *,
    optimizer: Optimizer | None = sgd,
    **options: Any,
) -> piper.Program:
    """``strategy`` compiled for batches like the first."""
    inputs, targets = batches[0]
    return compile_shared(
        model,
        piper.Strategy(strategy),
        inputs=inputs,
        targets=targets,
        loss=loss,
        optimizer=optimizer,
        **options,
    )


def compile_shared(
    model: nn.Module,
    strategy: piper.Strategy,
    *,
    memory_limit: int | None = None,
    costs: piper.Costs | None = None,
    **options: Any,
) -> piper.Program:
    """As ``piper.compile``, but captures are shared within ``shared_captures``."""
    captured = _captures.of(model, options)
    return captured.compile(strategy, memory_limit=memory_limit, costs=costs)


def train(program: piper.Program, batches: Sequence[Batch]) -> Run:
    """Train on virtual devices."""
    with piper.launch(program, on="virtual") as trainer:
        return steps(trainer, batches)


def steps(trainer: piper.Trainer, batches: Sequence[Batch]) -> Run:
    """Train on ``batches``, one per step."""
    results = [trainer.step(*_given(batch)) for batch in batches]
    norms = [r.grad_norm for r in results if r.grad_norm is not None]
    return Run(tuple(r.loss for r in results), tuple(norms), trainer.state_dict())


def _given(batch: Batch) -> tuple[Any, ...]:
    inputs, targets = batch
    return (inputs, *targets) if isinstance(inputs, Mapping) else (*inputs, *targets)


def assert_same(found: Run, expected: Run, tolerance: float = 0.0) -> None:
    """Losses and state are equal bit for bit or, with a ``tolerance``, each tensor within that
    fraction of its largest element. Norms are always compared within ulps: they are summed in fp64
    here and in fp32 by torch."""
    assert found.state.keys() == expected.state.keys()
    wrong = [
        f"{name} by {_distance(x, expected.state[name]):.1e}"
        for name, x in found.state.items()
        if not _close(x, expected.state[name], tolerance)
    ]
    for step, (mine, theirs) in enumerate(zip(found.losses, expected.losses, strict=True)):
        if not _close(mine, theirs, tolerance):
            wrong.append(f"loss of step {step} by {_distance(mine, theirs):.1e}")
    if expected.norms:
        for step, (mine, theirs) in enumerate(zip(found.norms, expected.norms, strict=True)):
            if not _close(mine, theirs.float(), max(tolerance, ULPS)):
                wrong.append(f"norm of step {step}: {float(mine)}, not {float(theirs)}")
    assert not wrong, f"beyond {tolerance}: {', '.join(wrong)}"


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a, b) if not tolerance else _distance(a, b) <= tolerance


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference as a fraction of the largest element; NaN if there is one."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    a, b = a.double(), b.double()
    size = b.abs().max()
    return float((a - b).abs().max() / size) if size else float((a - b).abs().max())


# strategies


def pipeline(
    groups: Sequence[Sequence[int]],
    microbatches: int,
    *schedule: Directive,
    by: Sequence[int] | str = "flops",
) -> list[Directive]:
    """Stage i of the layers on group i."""
    return [
        partition("layer", into="PP", parts=len(groups), by=by),
        split(parts=microbatches),
        *(place({"PP": i}, devices=group) for i, group in enumerate(groups)),
        *schedule,
    ]


def data_parallel(devices: int, microbatches: int) -> list[Directive]:
    """The whole model on one group."""
    return [split(parts=microbatches), place({}, devices=range(devices))]


def written(stage: int, row: str) -> Directive:
    """The order of one stage, as ``"F0 F1+B0 BI1 BW1"``; ``+`` overlaps two."""
    groups = []
    for group in row.split():
        words = [(word.rstrip("0123456789"), word) for word in group.split("+")]
        groups.append([{"PP": stage, "MB": int(w[len(p) :]), "PASS": p} for p, w in words])
    return order(*groups)


def gpipe(stages: int, microbatches: int, *, halves: bool = False) -> list[Directive]:
    """All forwards, then all backwards, microbatch 0 first."""
    back = ["BI", "BW"] if halves else ["B"]
    row = [f"F{m}" for m in range(microbatches)]
    row += [f"{p}{m}" for m in range(microbatches) for p in back]
    return [written(stage, " ".join(row)) for stage in range(stages)]


def one_f_one_b(stages: int, microbatches: int) -> list[Directive]:
    """As many forwards ahead as stages follow; then one forward and one backward in turn."""
    return [
        written(stage, " ".join(_alternating(stages - stage - 1, microbatches)))
        for stage in range(stages)
    ]


def _alternating(ahead: int, microbatches: int) -> Iterator[str]:
    ahead = min(ahead, microbatches)
    yield from (f"F{m}" for m in range(ahead))
    for m in range(microbatches):
        if m + ahead < microbatches:
            yield f"F{m + ahead}"
        yield f"B{m}"


def zero_bubble(stages: int, microbatches: int) -> list[Directive]:
    """1F1B whose weight gradients are delayed by two microbatches; the last ones run at the end."""
    found = []
    for stage in range(stages):
        row: list[str] = []
        late: list[str] = []
        for word in _alternating(stages - stage - 1, microbatches):
            if word[0] == "F":
                row.append(word)
                continue
            row.append(f"BI{word[1:]}")
            late.append(f"BW{word[1:]}")
            if len(late) > 2:
                row.append(late.pop(0))
        found.append(written(stage, " ".join(row + late)))
    return found


def overlapped(stages: int, microbatches: int) -> list[Directive]:
    """1F1B in which each forward overlaps the backward that follows it."""
    found = []
    for stage in range(stages):
        row: list[str] = []
        ahead = min(stages - stage, microbatches)
        row += [f"F{m}" for m in range(ahead)]
        row += [f"F{m + ahead}+B{m}" for m in range(microbatches - ahead)]
        row += [f"B{m}" for m in range(microbatches - ahead, microbatches)]
        found.append(written(stage, " ".join(row)))
    return found


# captures shared by many strategies


class _Captures:
    """One capture for each model, loss, options and batch shape."""

    def __init__(self, *, kept: bool) -> None:
        self._kept = kept
        self._known: dict[Any, tuple[list[Any], piper.Capture]] = {}

    def of(self, model: nn.Module, options: Mapping[str, Any]) -> piper.Capture:
        if not self._kept or not isinstance(model, nn.Module):
            return piper.capture(model, **options)
        key = (id(model), model.training, *(_like(options[name]) for name in sorted(options)))
        if key not in self._known:
            same = [model, *options.values()]  # kept alive: no other object gets the same id
            self._known[key] = same, piper.capture(model, **options)
        return self._known[key][1]


def _like(option: Any) -> Any:
    """The key of an option: options with the same key count as equal."""
    if isinstance(option, Tensor):
        return option.shape, option.dtype
    if isinstance(option, Mapping):
        return tuple((name, _like(item)) for name, item in option.items())
    if isinstance(option, list | tuple):
        return tuple(map(_like, option))
    return id(option) if callable(option) else repr(option)


_captures = _Captures(kept=False)


@contextmanager
def shared_captures() -> Iterator[None]:
    """Inside, strategies share one capture of a model at one batch size."""
    global _captures  # noqa: PLW0603
    before, _captures = _captures, _Captures(kept=True)
    try:
        yield
    finally:
        _captures = before
