"""The state of training as whole tensors under original names, in memory and in one file."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from piper.codec import Format, MalformedError
from piper.errors import PiperError, warn
from piper.launch.fetching import fetcher
from piper.launch.state_checks import check_state
from piper.launch.worker_group import Restored
from piper.optimizer import make
from piper.program import Program
from piper.runtime.groups import Group
from piper.runtime.portable import Portions, assemble

_FORMAT = Format("training state", 1)
_AT_ONCE = 4 * 1024 * 1024
"""Elements that are brought together, or handed out, at a time."""


def whole_state(program: Program, portions: list[Portions], rest: Mapping[str, Tensor]) -> Restored:
    """All devices' portions put together, and what no device holds: from ``rest``, or as it was
    at first."""
    tensors = program.names.named(tensor_of(program, portions, rest))
    kinds = dict.fromkeys(kind for found in portions for kind in found.optimizer)
    return Restored(
        tensors=tensors,
        optimizer={
            kind: assemble(
                program.parameters,
                program.buckets,
                [p for f in portions for p in f.optimizer.get(kind, ())],
            )
            for kind in kinds
        },
        numbers={key: item for found in portions for key, item in found.numbers.items()},
        steps=portions[0].steps,
        scheduler=next((f.scheduler for f in portions if f.scheduler is not None), None),
        groups=_distinct([group for found in portions for group in found.groups]),
        kind=next((f.kind for f in portions if f.kind), ""),
    )


def _distinct(groups: Sequence[Group]) -> list[Group]:
    """Each group once: replicas have the same ones."""
    found: dict[tuple[str, ...], Group] = {}
    for group in groups:
        found.setdefault(group.names, group)
    return list(found.values())


def tensor_of(
    program: Program, portions: list[Portions], rest: Mapping[str, Tensor]
) -> Callable[[str], Tensor]:
    """Gives a whole tensor by its first name, from the devices' portions of it."""
    parameters = assemble(
        program.parameters, program.buckets, [p for found in portions for p in found.parameters]
    )
    buffers = {n: x for found in reversed(portions) for n, x in found.buffers.items()}
    known = {**rest, **buffers, **parameters}

    def find(name: str) -> Tensor:
        return known[name].clone() if name in known else fetcher(program)(name).cpu().clone()

    return find


def in_turn(keys: Mapping[str, str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """``keys`` in runs of a few megabytes; ``sizes`` are their elements."""
    run: list[str] = []
    total = 0
    for key in keys:
        if run and total + sizes[key] > _AT_ONCE:
            yield run
            run, total = [], 0
        run.append(key)
        total += sizes[key]
    if run:
        yield run


def write(path: str | Path, program: Program, state: Restored) -> None:
    """Write the state to ``path``: a new file takes the old one's place only when it is whole."""
    content = {
        "format": str(_FORMAT),
        "tensors": dict(state.tensors),
        "added": _added(program, state.tensors),
        "optimizer": {k: dict(v) for k, v in (state.optimizer or {}).items()},
        "numbers": [(name, kind, item) for (name, kind), item in (state.numbers or {}).items()],
        "steps": state.steps,
        "scheduler": state.scheduler,
        "groups": [[list(g.names), dict(g.settings), dict(g.schedule)] for g in state.groups],
        "kind": state.kind,
    }
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise PiperError(f"the state cannot be saved to {target}: {error}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            with _checksums():
                torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if not isinstance(error, Exception):
            raise
        raise PiperError(
            f"the state cannot be saved to {target}: {error}; what was there before is untouched"
        ) from error


def _added(program: Program, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the model's modules add to a state dict, as far as a file can hold it that runs no code
    when it is read."""
    if program.source is None:
        return {}
    whole = program.names.with_added(program.source, tensors)
    found = {key: whole[key] for key in program.names.added if key in whole}
    for key in [key for key, item in found.items() if not _is_data(item)]:
        warn(
            f"{key} of the model's state dict is not in the checkpoint: it is a "
            f"{type(found.pop(key)).__name__}, and a file holds tensors, numbers, text and "
            "containers of these only"
        )
    return found


def _is_data(item: Any) -> bool:
    if isinstance(item, dict):
        return all(map(_is_data, (*item.keys(), *item.values())))
    if isinstance(item, list | tuple | set):
        return all(map(_is_data, item))
    return isinstance(item, Tensor | str | bytes | int | float | None)


@contextmanager
def _checksums() -> Iterator[None]:
    """Whatever else the process saves without."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def read(path: str | Path, program: Program) -> Restored:
    """The state in a file."""
    try:
        _refuse_damage(path)
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise PiperError(f"there is no state at {path}") from error
    except Exception as error:
        raise PiperError(f"{path} cannot be read as a state of training: {error}") from error
    try:
        content = _FORMAT.content(content)
    except MalformedError as error:
        raise PiperError(f"{path} is no state of training that Piper saved: {error}") from None
    missing = _FIELDS - content.keys()
    if missing:
        raise PiperError(f"{path} is incomplete: it lacks {', '.join(sorted(missing))}")
    try:
        check_state(content, program)
    except MalformedError as error:
        raise PiperError(f"{path} cannot be used: {error}") from None
    _refuse_other_optimizer(path, program, content["kind"])
    return Restored(
        tensors=program.names.checked(content["tensors"]),
        optimizer=content["optimizer"],
        numbers={(name, kind): item for name, kind, item in content["numbers"]},
        steps=content["steps"],
        scheduler=content["scheduler"],
        groups=[_group(item) for item in content["groups"]],
        kind=content["kind"],
    )


_FIELDS = {"tensors", "optimizer", "numbers", "steps", "scheduler", "groups", "kind"}


def _group(item: Any) -> Group:
    """A group as it was saved; older files have the settings alone."""
    if isinstance(item, dict):
        return Group((), item, {})
    names, settings, schedule = item
    return Group(tuple(names), settings, schedule)


def _refuse_damage(path: str | Path) -> None:
    """Torch reads whatever the numbers have become; a file has a checksum for each tensor."""
    with zipfile.ZipFile(path) as file:
        if (damaged := file.testzip()) is not None:
            raise zipfile.BadZipFile(f"it is damaged: the checksum of {damaged} differs")
        for record in file.infolist():
            if record.external_attr:  # to torch a directory, whose content it does not read
                raise zipfile.BadZipFile(f"it is damaged: {record.filename} is not a plain file")


def _refuse_other_optimizer(path: str | Path, program: Program, kind: str) -> None:
    """An optimizer cannot go on from another kind's state."""
    factory = program.training.optimizer
    if factory is None or not kind:
        return
    mine = type(make(factory, [nn.Parameter(torch.zeros(1))])).__name__
    if mine != kind:
        raise PiperError(
            f"{path} was saved with the optimizer {kind}, but this program trains with {mine}: use "
            "load_state_dict to take over the weights alone"
        )
