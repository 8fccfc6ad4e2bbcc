"""Checks whether a program can resume from the index of a checkpoint: names, types and shapes,
before any of it is used. A ``MalformedError`` says what does not fit."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from piper.base.errors import PiperError, warn
from piper.base.reading import MalformedError, shown, within, wrong
from piper.base.units import class_text, counted
from piper.program.program import Program
from piper.state.checkpoint.index import Index
from piper.state.checkpoint.plain_values import from_json
from piper.state.optimizer.factory import kind_of
from piper.state.optimizer.probe import kept_kinds, sample_optimizer
from piper.state.optimizer.scheduler import make_scheduler


def check_index(index: Index, program: Program, what: str) -> None:
    """Refuse an index that ``program`` could not have saved; ``what`` names its source in
    errors."""
    for key, name in index.keys.items():
        with within(f"keys.{key}"):
            if name not in index.model:
                raise MalformedError(f"there is no tensor {shown(name)}")
    shapes = {key: index.model[name][0].shape for key, name in index.keys.items()}
    program.names.check(shapes, what=what)
    check_state(index, program)
    _refuse_other_optimizer(index.kind, program)
    _refuse_half_kept(index, program)


def check_state(index: Index, program: Program) -> None:
    """The same for the state that devices hold, from a checkpoint or from memory."""
    for name, spec in program.parameters.items():
        with within(f"model.{name}"):
            if index.first(name) not in index.model:
                raise MalformedError("it is missing")
            entry = index.model[index.first(name)][0]
            if entry.shape != spec.shape:
                raise MalformedError(
                    f"it has shape {list(entry.shape)}, the parameter {list(spec.shape)}"
                )
            if entry.dtype.is_floating_point != spec.dtype.is_floating_point:
                raise MalformedError(f"it is {entry.dtype}, the parameter {spec.dtype}")
    for kind, tensors in index.optimizer.items():
        for name, slices in tensors.items():
            with within(f"optimizer.{kind}.{name}"):
                if (shape := slices[0].shape) != _known(name, index)[0].shape:
                    raise MalformedError(f"it has shape {list(shape)}, not its parameter's")
    named = [(f"values[{i}]", value.name) for i, value in enumerate(index.values)]
    named += [(f"groups[{i}]", name) for i, x in enumerate(index.groups) for name in x.names]
    for place, name in named:
        with within(place):
            _known(name, index)
    with within("scheduler"):
        _scheduler(from_json(index.scheduler), program)


def _known(name: str, index: Index) -> Any:
    if name not in index.model:
        raise MalformedError(f"there is no parameter {shown(name)}")
    return index.model[name]


def _refuse_other_optimizer(kind: str, program: Program) -> None:
    """An optimizer cannot continue from the state of another kind of optimizer."""
    factory = program.training.optimizer
    if factory is None or not kind:
        return
    mine = kind_of(sample_optimizer(factory, program.trained)[1])
    if mine != kind:
        raise PiperError(
            f"the checkpoint was saved with the optimizer {kind}, but this program trains with "
            f"{mine}: use load_state_dict to take over the weights alone"
        )


def _refuse_half_kept(index: Index, program: Program) -> None:
    """An optimizer cannot continue from only a part of a parameter's optimizer state."""
    factory = program.training.optimizer
    if factory is None or not index.kind or not index.steps:
        return
    kept: dict[str, set[str]] = {name: set() for group in index.groups for name in group.names}
    for kind, entries in index.optimizer.items():
        for name in entries:
            kept.setdefault(name, set()).add(kind)
    for value in index.values:
        kept.setdefault(value.name, set()).add(value.kind)
    wanted = kept_kinds(factory, program.trained, program.device)
    if any(wanted.values()) and not any(kept.values()):
        warn(
            f"the checkpoint was saved after {counted(index.steps, 'step')}, but has nothing of "
            f"what {index.kind} keeps: the optimizer begins anew"
        )
        return
    for name, kinds in wanted.items():
        here = kept.get(index.first(name))  # None if the parameter was not trained
        if here is not None and (lacking := sorted(kinds - here)):
            raise MalformedError(f"optimizer: it lacks {', '.join(lacking)} of {name}")


def _scheduler(item: Any, program: Program) -> None:
    if item is None:
        return
    if not isinstance(item, dict):
        raise wrong(item, "a table")
    training = program.training
    if training.scheduler is None or training.optimizer is None:
        return
    _, optimizer = sample_optimizer(training.optimizer, program.trained)
    mine = make_scheduler(training.scheduler, optimizer).state_dict()
    if mine.keys() != item.keys():
        other = sorted(map(str, mine.keys() ^ item.keys()))
        raise MalformedError(f"it is not this program's: they differ in {', '.join(other)}")
    for name, value in mine.items():
        with within(name):
            _same_kind(item[name], value)


def _same_kind(item: Any, mine: Any) -> None:
    """Refuse an ``item`` that cannot replace ``mine``; where ``mine`` is None, accept anything."""
    numbers = (bool, int, float, Tensor)
    for kinds in (numbers, (list, tuple), (dict,), (str,)):
        if isinstance(mine, kinds) and not isinstance(item, kinds):
            raise wrong(item, class_text(mine))
    if isinstance(mine, list | tuple) and mine:  # one per param group; ``item`` may have more
        for place, other in enumerate(item):
            with within(place):
                _same_kind(other, mine[0])
