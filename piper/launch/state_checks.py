"""Whether what a checkpoint says is a state of training: names, types and shapes, before any of it
is used. A ``MalformedError`` says where it is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from piper.codec import MalformedError, count, shown, string, within, wrong
from piper.optimizer import make, make_scheduler
from piper.program import Program


def check_state(content: Mapping[str, Any], program: Program) -> None:
    """Refuse what is no state that ``program`` could have left."""
    with within("tensors"):
        for name, tensor in _table(content["tensors"]).items():
            with within(name):
                _like(_tensor(tensor), program, program.names.keys.get(name, name), None)
    with within("optimizer"):
        for kind, row in _table(content["optimizer"]).items():
            with within(kind):
                for name, tensor in _table(row).items():
                    with within(name):
                        _known(name, program)
                        _like(_tensor(tensor), program, name, program.parameters[name].shape)
    with within("numbers"):
        _numbers(content["numbers"], program)
    with within("steps"):
        count(content["steps"])
    with within("groups"):
        if type(content["groups"]) is not list:
            raise wrong(content["groups"], "a list")
        for place, group in enumerate(content["groups"]):
            with within(place):
                _group(group, program)
    with within("kind"):
        string(content["kind"])
    with within("scheduler"):
        _scheduler(content["scheduler"], program)


def _group(item: Any, program: Program) -> None:
    """The names that it holds, its settings and its schedule's; older files have settings alone."""
    names: Any = ()
    settings, schedule = item, {}
    if not isinstance(item, dict):
        if type(item) not in (list, tuple) or len(item) != 3:
            raise wrong(item, "names, settings and a schedule")
        names, settings, schedule = item
    if type(names) not in (list, tuple):
        raise wrong(names, "a list of names")
    for name in names:
        _known(string(name), program)
    for table in (settings, schedule):
        _plain(_table(table))
        if "params" in table:
            raise MalformedError("settings have no params")


def _table(item: Any) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise wrong(item, "a table")
    for name in item:
        string(name)
    return item


def _tensor(item: Any) -> Tensor:
    plain = isinstance(item, Tensor) and item.layout is torch.strided and not item.is_quantized
    if not plain or item.is_meta:
        raise wrong(item, "a tensor with numbers")
    return item


def _like(tensor: Tensor, program: Program, name: str, shape: tuple[int, ...] | None) -> None:
    spec = program.parameters.get(name)
    if spec is None:
        return
    if shape is not None and tuple(tensor.shape) != shape:
        raise MalformedError(f"it has shape {list(tensor.shape)}, the parameter {list(shape)}")
    if shape is None and tensor.is_floating_point() != spec.dtype.is_floating_point:
        raise MalformedError(f"it is {tensor.dtype}, the parameter {spec.dtype}")


def _known(name: Any, program: Program) -> None:
    if name not in program.parameters:
        raise MalformedError(f"there is no parameter {shown(name)}")


def _numbers(items: Any, program: Program) -> None:
    if type(items) is not list:
        raise wrong(items, "a list")
    for place, item in enumerate(items):
        with within(place):
            if type(item) not in (tuple, list) or len(item) != 3:
                raise wrong(item, "a parameter, a name and a value")
            name, kind, value = item
            _known(string(name), program)
            string(kind)
            _plain(value)


def _plain(item: Any, depth: int = 0) -> None:
    """Tensors and plain values, nested a little."""
    if depth > 8:
        raise MalformedError("this is nested too deeply")
    if isinstance(item, dict):
        for key, value in item.items():
            if not isinstance(key, str | int | float | None):
                raise wrong(key, "a name")
            _plain(value, depth + 1)
    elif isinstance(item, list | tuple | set):
        for value in item:
            _plain(value, depth + 1)
    elif isinstance(item, Tensor):
        _tensor(item)
    elif not isinstance(item, bool | int | float | complex | str | None | torch.dtype):
        raise wrong(item, "a plain value")


def _scheduler(item: Any, program: Program) -> None:
    if item is None:
        return
    _plain(_table(item))
    training = program.training
    if training.scheduler is None or training.optimizer is None:
        return
    optimizer = make(training.optimizer, [nn.Parameter(torch.zeros(1))])
    mine = make_scheduler(training.scheduler, optimizer).state_dict()
    if mine.keys() != item.keys():
        other = sorted(map(str, mine.keys() ^ item.keys()))
        raise MalformedError(f"it is not this program's: they differ in {', '.join(other)}")
    for name, value in mine.items():
        with within(name):
            _same_kind(item[name], value)


def _same_kind(item: Any, mine: Any) -> None:
    """Whether ``item`` can stand where ``mine`` does; None may be anything yet."""
    numbers = (bool, int, float, Tensor)
    for kinds in (numbers, (list, tuple), (dict,), (str,)):
        if isinstance(mine, kinds) and not isinstance(item, kinds):
            raise wrong(item, f"a {type(mine).__name__}")
    if isinstance(mine, list | tuple) and mine:  # one for each group, of which there may be more
        for place, other in enumerate(item):
            with within(place):
                _same_kind(other, mine[0])
