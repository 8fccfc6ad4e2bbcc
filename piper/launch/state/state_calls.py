"""The state of a session: written to files and read from them, as whole tensors, moved to another
program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from piper.base.errors import PiperError
from piper.launch.device.device import WorkerDevice
from piper.launch.state.export_model import given_source
from piper.launch.state.saving import Save, load, prepare, save, tensor_of
from piper.launch.state.switch import changes_named
from piper.launch.trainer.batch_shapes import BatchShapes
from piper.launch.trainer.session import Session
from piper.program.program import Program
from piper.state.checkpoint.plain_values import from_json
from piper.state.checkpoint.slices import runs
from piper.state.optimizer.ema import EMA

_AT_ONCE = 4 * 1024 * 1024
"""Elements that are gathered, or sent out, at a time."""


# files


def save_state(
    session: Session, path: Path, data: Any, keep: int | None, *, background: bool
) -> None:
    """``Trainer.save``, with ``data``, the position in the batches."""
    session.refuse_averaged()
    with session.undisturbed():
        session.saving.settle()
        session.unread.read()
        group = session.whole
        one = Save(session.program, prepare(group, path, keep), session.rest, data, keep)
        if background:
            session.saving.begin(group, one)
        else:
            save(group, one)


def load_state(session: Session, path: Path, *, new_settings: bool) -> Any:
    """``Trainer.load``; returns the position in the batches that was saved with the state."""
    session.refuse_averaged()
    with session.undisturbed():
        session.saving.settle()
        group, program = session.devices, session.program
        index, session.rest = load(group, program, path, new_settings=new_settings)
        session.steps = index.steps
    return from_json(index.data)


# whole tensors


def state_dict(session: Session) -> dict[str, Any]:
    """``Trainer.state_dict``."""
    program = session.program
    with session.undisturbed():
        state = program.names.named(_tensor_of(session))
    return state if program.source is None else program.names.with_added(program.source, state)


def stream_state(session: Session) -> Iterator[tuple[str, Tensor]]:
    """``Trainer.stream_state``."""
    names = session.program.names
    for keys in runs(names.keys, names.elements.__getitem__, _AT_ONCE):
        only = frozenset(names.keys[key] for key in keys)
        with session.undisturbed():
            find = _tensor_of(session, only)
        for key in keys:
            with session.undisturbed():
                tensor = find(names.keys[key])
            yield key, tensor


def _tensor_of(session: Session, only: frozenset[str] | None = None) -> Callable[[str], Tensor]:
    """``saving.tensor_of``, for the caller to read."""
    session.unread.read()
    return tensor_of(session.whole, session.program, session.rest, only)


def load_state_dict(session: Session, state: Mapping[str, Tensor], *, strict: bool) -> None:
    """``Trainer.load_state_dict``."""
    group, program = session.devices, session.program
    tensors = program.names.checked(state, strict=strict)
    with session.undisturbed():
        if group.agreement is not None:
            group.agreement.refuse_other_tensors(tensors)
        for run in runs(tensors, lambda name: tensors[name].numel(), _AT_ONCE):
            # no device is sent the whole model
            group.call(WorkerDevice.restore, {name: tensors[name] for name in run})
        held = program.held_names
        rest = {n: x.clone() for n, x in tensors.items() if n not in held}
        session.rest = rest if strict else {**session.rest, **rest}


def model(session: Session) -> nn.Module:
    """``Trainer.model``."""
    source = given_source(session.program)
    with session.undisturbed():
        find = _tensor_of(session)
        known = dict((*source.parameters(), *source.buffers()))
        tensors = {name: find(name).to(own.dtype) for name, own in known.items()}
        return source.with_tensors(tensors).model.eval()


@contextmanager
def averaged(session: Session) -> Iterator[None]:
    """``Trainer.averaged``."""
    if not isinstance(session.program.training.optimizer, EMA):
        raise PiperError(
            "the weights of this program are not averaged: compile it with optimizer=piper.EMA("
            "lambda parameters: ..., decay=0.999)"
        )
    session.refuse_averaged()
    _swap_averages(session)
    session.is_averaged = True
    try:
        yield
    finally:
        session.is_averaged = False
        if not session.is_closed and not session.devices.damaged:
            _swap_averages(session)


def _swap_averages(session: Session) -> None:
    with session.undisturbed():
        session.whole.call(WorkerDevice.swap_averages)


# another program


def switch_to(session: Session, program: Program, allow: Sequence[str]) -> None:
    """``Trainer.switch``."""
    session.refuse_averaged()
    changes = changes_named(allow)
    with session.undisturbed():
        session.go_on_with(program, changes)
        session.shapes = BatchShapes(program, session.shapes.most)
