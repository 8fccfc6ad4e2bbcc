"""Checkpoints: each device writes and reads its own part, one process handles the whole.

A save is prepared, written by all devices and committed by one rename. A load first checks that it
is possible (the index fits the program, no file is damaged), and only then changes anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from msgspec import structs
from torch import Tensor

from piper.base.arguments import whole_number
from piper.base.atomic import Staged, stage
from piper.base.errors import PiperError, warn
from piper.base.reading import MalformedError, file_bytes
from piper.launch.device.device import WorkerDevice
from piper.launch.device.device_programs import first_weights
from piper.launch.device.report import Refusal
from piper.launch.device.worker_group import WorkerGroup, answers_of_all, everyone, joined
from piper.launch.state.new_settings import changed_settings, with_new_settings
from piper.launch.state.state_checks import check_index
from piper.program.program import Program
from piper.state.checkpoint.commit import CHECKPOINT, keep_last, numbered
from piper.state.checkpoint.hf_export import WEIGHTS, WEIGHTS_INDEX
from piper.state.checkpoint.index import INDEX, GroupEntry, Index, Part
from piper.state.checkpoint.plain_values import to_json
from piper.state.checkpoint.slices import MODEL, Slice, by_name
from piper.state.checkpoint.tensor_files import Reader
from piper.state.device.checkpoint_parts import write_part
from piper.state.device.whole_tensors import assembled
from piper.state.optimizer.factory import joined_kinds

T = TypeVar("T")


# whole tensors in memory


def tensor_of(
    group: WorkerGroup,
    program: Program,
    rest: Mapping[str, Tensor],
    only: frozenset[str] | None = None,
) -> Callable[[str], Tensor]:
    """A function from a tensor's first name to the whole tensor, assembled from the slices of all
    devices: of any tensor, or of those in ``only``. Tensors that no device holds come from
    ``rest``, or have their initial values."""
    parts = answers_of_all(group, group.call(WorkerDevice.export, only))
    held = assembled(one for slices in reversed(parts) for one in slices)
    find = known_or_first(program, {**rest, **held})
    return lambda name: find(name).cpu().clone()


def known_or_first(program: Program, known: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
    """A function from a tensor's first name to its value in ``known``, or else its initial one."""
    fetch = cache(lambda: first_weights(program))
    return lambda name: known[name] if name in known else fetch()(name).whole()


def accepted(parts: Iterable[T | Refusal]) -> list[T]:
    """What the devices answered; raises the first refusal."""
    good = []
    for part in parts:
        if isinstance(part, Refusal):
            raise PiperError(part.why)
        good.append(part)
    return good


# folders


def prepare(group: WorkerGroup, path: str | Path, keep: int | None) -> Staged:
    """Check the arguments of a save, and stage the folder to write to."""
    target = _absolute(path)
    if keep is not None:
        whole_number("keep", keep, otherwise=", or None to keep all")
        numbered(target)
    return group.once(lambda: stage(target, CHECKPOINT))


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint to which the devices write their parts."""

    program: Program
    staged: Staged
    rest: Mapping[str, Tensor]
    """Model tensors that no device holds, if they no longer have their initial values."""
    data: Any
    """The position in the training data."""
    keep: int | None

    def finish(self, group: WorkerGroup, parts: Sequence[Part | Refusal]) -> None:
        """Commit the checkpoint, after all devices have written their ``parts``."""
        group.once(lambda rows: self._commit(joined(rows)), parts)

    def _commit(self, parts: Sequence[Part | Refusal]) -> None:
        staged, folder = self.staged, self.staged.folder
        with staged.failing():
            good = accepted(parts)
            good.append(_write_rest(self.program, folder, good, self.rest))
            if absent := [p.file for p in good if p.facts and not (folder / p.file).exists()]:
                raise PiperError(
                    f"{absent[0]} was written on another machine: all machines must share the "
                    "folder"
                )
            index = index_of(self.program, good, self.data, staged.named)
            (folder / INDEX).write_bytes(index.to_bytes())
            staged.commit()
        if self.keep is not None:
            keep_last(staged.target, self.keep)


def save(group: WorkerGroup, one: Save) -> None:
    """Write a checkpoint."""
    try:
        parts = group.call(WorkerDevice.write_part, one.staged.folder)
    except BaseException:
        one.staged.discard()
        raise
    one.finish(group, parts)


def _absolute(path: str | Path) -> Path:
    """``path`` as an absolute path: workers may have another working directory."""
    return Path(os.path.abspath(path))


def _write_rest(
    program: Program, folder: Path, parts: Iterable[Part], rest: Mapping[str, Tensor]
) -> Part:
    """Write the tensors of the model that no device wrote."""
    there = {one.name for part in parts for one in part.slices if one.table == MODEL}
    names = [n for n in dict.fromkeys(program.names.keys.values()) if n not in there]
    tensors = first_weights(program).tensors if names else {}
    find = known_or_first(program, rest)
    slices = []
    for name in names:
        like = rest.get(name, tensors[name])
        get = partial(find, name)  # when it is written: the tensors need not fit into memory
        slices.append(Slice.whole(MODEL, name, like.shape, like.dtype, get))
    return write_part(Part(slices), folder, "rest.safetensors")


def index_of(
    program: Program, parts: Sequence[Part], data: Any, named: Callable[[str], str] = str
) -> Index:
    """The index of the parts of all devices. ``named`` returns the last name of a file."""
    groups: dict[tuple[str, ...], GroupEntry] = {}
    for part in parts:
        for entry in part.groups:  # replicas have equal entries
            groups.setdefault(entry.names, entry)
    slices = (one for part in parts for one in part.slices)
    return Index(
        tables=by_name(
            replace(one, at=structs.replace(one.location, file=named(one.location.file)))
            for one in slices
        ),
        values=tuple(value for part in parts for value in part.values),
        keys=program.names.keys,
        files={named(part.file): part.facts for part in parts if part.facts is not None},
        steps=parts[0].steps,
        seed=program.training.seed,
        strategy=str(program.strategy),
        kind=joined_kinds(part.kind for part in parts),
        groups=tuple(groups.values()),
        scheduler=next((p.scheduler for p in parts if p.scheduler is not None), None),
        data=to_json(data),
    )


def load(
    group: WorkerGroup, program: Program, path: str | Path, *, new_settings: bool
) -> tuple[Index, dict[str, Tensor]]:
    """Resume from a checkpoint, or refuse it and change nothing. With ``new_settings`` the settings
    of the optimizer are the program's. Returns its index, and the model tensors that no device
    holds."""
    folder = _absolute(path)
    index = group.once(lambda: read_index(folder, program))
    if whys := joined(answers_of_all(group, group.call(WorkerDevice.refusals, folder, index))):
        raise PiperError(f"{path} cannot be loaded, and nothing has changed: {whys[0]}")
    if index.seed != program.training.seed:
        warn(
            f"{path} was saved with seed={index.seed}, but the program was compiled with "
            f"seed={program.training.seed}: random numbers, as of dropout, continue differently"
        )
    given = answers_of_all(group, group.call(WorkerDevice.groups))
    if new_settings:
        index = with_new_settings(index, joined(given))
    elif changed := changed_settings(index, joined(given)):
        listed = ", ".join(f"{name}={old} (given {new})" for name, (old, new) in changed.items())
        warn(
            f"{path} was saved with other settings of the optimizer, which are restored: {listed}. "
            "For the given ones, pass new_settings=True to trainer.load or fit, or --new-settings "
            "to piper train"
        )
    _read_parts(group, folder, index)
    rest: dict[str, Tensor] = {}
    with Reader(folder) as reader:
        for name in dict.fromkeys(program.names.keys.values()):
            if name not in program.held_names:
                slices = index.model[index.first(name)]
                rest[name] = torch.zeros(slices[0].shape, dtype=slices[0].dtype)
                reader.fill(Slice.of(MODEL, name, rest[name]), slices)
    return index, rest


def _read_parts(group: WorkerGroup, folder: Path, index: Index) -> None:
    """Resume from a checkpoint that no device refuses. If one of several trainers fails, all learn
    it."""
    failed = ""
    try:
        group.call(WorkerDevice.read_part, folder, index)
    except (OSError, PiperError) as error:
        if group.trainers == 1:
            raise
        failed = f"rank {group.rank}: {error}"
    if group.trainers > 1 and (whys := [why for why in everyone(group, failed) if why]):
        group.call(WorkerDevice.spoil)
        raise PiperError(f"the checkpoint could not be read to its end: {whys[0]}")


def read_index(target: Path, program: Program) -> Index:
    """The index of a checkpoint; refused if ``program`` cannot resume from it."""
    try:
        if target.is_file():
            raise PiperError(
                f"{target} is a file: a checkpoint is a folder. The state dict of a model that "
                "torch.save wrote goes to trainer.load_state_dict(torch.load(path)). One that an "
                "earlier Piper saved as a file must be loaded, and its state_dict taken, with that "
                "version"
            )
        if not target.exists():
            raise PiperError(f"there is no checkpoint at {target}")
        index = Index.from_bytes(file_bytes(target / INDEX))
        check_index(index, program, f"the checkpoint {target}")
    except FileNotFoundError as error:
        raise _no_checkpoint(target) from error
    except OSError as error:
        raise PiperError(f"{target} cannot be read: {error}") from error
    except MalformedError as error:
        raise PiperError(f"{target} cannot be used: {INDEX}: {error}") from None
    return index


def _no_checkpoint(target: Path) -> PiperError:
    """The error for a folder without an index, with what it seems to be instead."""
    if any((target / name).exists() for name in (WEIGHTS, WEIGHTS_INDEX)):
        return PiperError(
            f"{target} has the weights of a model, and is no checkpoint of training: it has no "
            f"{INDEX}. Give it to compile or capture, init=piper.weights({str(target)!r})"
        )
    inside = sorted(path.parent.name for path in target.glob(f"*/{INDEX}"))
    advice = f", but checkpoints in it: load one of {', '.join(inside[-5:])}" if inside else ""
    return PiperError(f"{target} is no checkpoint: it has no {INDEX}{advice}")
