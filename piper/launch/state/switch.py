"""A change of strategy in the middle of a run: ``Trainer.switch``.

First it checks that the switch is possible: the next program trains the same model with the same
optimizer, and its devices exist. Then every device lists the tensor slices that it gives, as in the
index of a checkpoint. Each device of the next program allocates its state beside the old one,
copies the slices that its process already has, and receives the rest. The old program stays
unchanged until the last slice has arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

import torch
import torch.distributed as dist

from piper.base.errors import PiperError, warn
from piper.capture.trace.computation import LOSS_PLACE
from piper.launch.device.device import LoadedDevice, assignment_of
from piper.launch.device.step_graph import refuse_uncapturable
from piper.launch.device.worker_group import Refusal, WorkerGroup
from piper.launch.optimizer_facts import difference, facts_of
from piper.launch.state.saving import accepted, index_of
from piper.launch.state.state_checks import check_state
from piper.program.program import Program
from piper.runtime.comm.gloo import Peers
from piper.state.checkpoint.index import Index, Part
from piper.state.checkpoint.slices import Slice, at_device
from piper.state.device.checkpoint_parts import all_held
from piper.state.device.device_state import DeviceState
from piper.state.device.resharding import Exchange, parcels, still_missing
from piper.state.device.restore import refusal, settle, wanted


class Change(Enum):
    """What a switch may be allowed to change, by name."""

    MODEL = "model"
    LOSS = "loss"
    PRECISION = "precision"
    CLIP_NORM = "clip_norm"
    ON_NAN = "on_nan"


def changes_named(names: Sequence[str]) -> frozenset[Change]:
    """The changes named in ``allow=names``."""
    known = [change.value for change in Change]
    given = [names] if isinstance(names, str) else list(names)
    for name in given:
        if name not in known:
            raise PiperError(f"allow={name!r} is unknown; choose from {', '.join(known)}")
    return frozenset(map(Change, given))


def switch(group: WorkerGroup, old: Program, new: Program, allow: frozenset[Change]) -> None:
    """Continue with ``new``, or refuse it and change nothing."""
    if not isinstance(new, Program):
        raise PiperError(f"switch takes what piper.compile returns, not a {type(new).__name__}")
    if (why := _difference(old, new, allow)) is not None:
        raise _refused(why)
    try:
        parts = group.give_parts()
        index = group.once(lambda: _index(old, new, parts))
        if whys := group.prepare_switch(new, index):
            raise _refused(whys[0])
    except PiperError:
        group.abandon_switch()
        raise
    if old.training.seed != new.training.seed:
        warn(
            f"the program that is switched to was compiled with seed={new.training.seed}, the one "
            f"before with seed={old.training.seed}: random numbers, as of dropout, go on "
            "differently"
        )
    group.finish_switch()


def _refused(why: str) -> PiperError:
    return PiperError(f"the trainer cannot switch to this program, and nothing has changed: {why}")


# checks


def _difference(old: Program, new: Program, allow: frozenset[Change]) -> str | None:
    """Why ``new`` cannot continue the run of ``old``, as far as the programs alone show."""
    mine, others = new.names, old.names
    for name in sorted(mine.keys.keys() ^ others.keys.keys()):
        has = "has" if name in mine.keys else "lacks"
        return f"it is of another model, which {has} {name}"
    for name, shape in mine.shapes.items():
        if shape != others.shapes[name] or mine.keys[name] != others.keys[name]:
            return f"it is of another model, in which {name} differs"
    for name in sorted(_trained(old) ^ _trained(new)):
        trained = "trained" if name in _trained(new) else "frozen"
        return f"it is of another model, in which {name} is {trained}"
    if old.device.type != new.device.type:
        return f"it was compiled for {new.device.type}, the one before for {old.device.type}"
    before, after = old.training.default_dtype, new.training.default_dtype
    if before != after:
        return (
            f"it was compiled with {after} as torch's default dtype, the one before with {before}: "
            f"call torch.set_default_dtype({before}) before compile"
        )
    for change in (Change.PRECISION, Change.CLIP_NORM, Change.ON_NAN):
        before, after = (getattr(program.training, change.value) for program in (old, new))
        if before != after and change not in allow:
            return (
                f"its {change.value} is {after}, the one before has {before}: compile it with the "
                f"same, or say switch(program, allow=[{change.value!r}]) if it is to change"
            )
    return _other_computation(old, new, allow) or _other_optimizer(old, new)


def _other_computation(old: Program, new: Program, allow: frozenset[Change]) -> str | None:
    """Why ``new`` computes something else, although all names and shapes are the same."""
    one, two = old.computation, new.computation
    if one is None or two is None or old.training.precision != new.training.precision:
        return None
    unlike = one.difference(two)
    if unlike is None:
        return None
    change = Change.LOSS if unlike.place == LOSS_PLACE else Change.MODEL
    if change in allow or Change.MODEL in allow:  # another model's loss is another operation too
        return None
    what = "it has another loss" if change is Change.LOSS else "it is of another model"
    return (
        f"{what}: {unlike.place} computes {unlike.two} where the one before computes {unlike.one}; "
        f"compile it with the same, or say switch(program, allow=[{change.value!r}]) if it is to "
        "change"
    )


def _trained(program: Program) -> set[str]:
    return {name for b in program.buckets if b.trained for name in b.parameters}


def _other_optimizer(old: Program, new: Program) -> str | None:
    """How the optimizer differs. The run's optimizer continues, so a new setting would be
    ignored."""
    other = difference(facts_of(old), facts_of(new))
    if other is None:
        return None
    return f"its {other.what} is {other.two!s}, the one before has {other.one!s}"


def _index(old: Program, new: Program, parts: Sequence[Part | Refusal]) -> Index:
    """The index of the present state: which device has which slice. Refused if ``new`` cannot
    continue from it."""
    try:
        index = index_of(old, accepted(parts), None)
        check_state(index, new)
    except PiperError as error:
        raise _refused(str(error)) from error
    constants = {name for step in new.steps for name in step.code.constants}
    if missing := sorted(new.held_names - index.model.keys() - constants):
        raise _refused(f"it is of another model, which uses {missing[0]}")
    return index


# moving the state


@dataclass(frozen=True, slots=True)
class Crossing:
    """How the processes of a job reach each other while the state moves between them."""

    members: tuple[int, ...]
    """The devices of all processes, before and after."""
    store: dist.Store
    """Used for this switch only."""
    timeout: timedelta
    alone: bool
    """Whether all processes are on this machine."""


class NextState:
    """A device's state under the next program, allocated beside its present one."""

    def __init__(
        self,
        program: Program,
        number: int,
        where: torch.device,
        index: Index,
        present: LoadedDevice | None,
        *,
        capturable: bool,
    ) -> None:
        """``program`` may not have the device ``number``; then nothing is allocated. ``present`` is
        None if the process has no device now. With ``capturable``, steps will be captured as CUDA
        graphs."""
        self._index = index
        self._number = number
        self._capturable = capturable
        self.state: DeviceState | None = None
        self.missing: list[Slice] = []
        """The slices that other devices must send."""
        self.refused: list[str] = []
        if number not in program.devices:
            return
        try:
            if capturable:
                refuse_uncapturable(program)
            self.state = DeviceState(assignment_of(program, number), where, None)
            if capturable:
                self.state.make_capturable()
        except PiperError as error:
            self.refused = [str(error)]
            return
        if (why := refusal(self.state, index)) is not None:
            self.refused = [why]
            return
        here = () if present is None else all_held(present.state)
        self.missing = still_missing(wanted(self.state, index), here)

    @property
    def requests(self) -> list[Slice]:
        """The slices that it needs, for other processes."""
        return at_device(self.missing, self._number)

    def receive(
        self,
        number: int,
        gives: Sequence[Slice],
        wants: Mapping[int, Sequence[Slice]],
        crossing: Crossing,
    ) -> None:
        """Take part, as device ``number``, in sending all slices to the devices that need them."""
        link = Peers(
            crossing.members, number, crossing.store, crossing.timeout, alone=crossing.alone
        )
        rows = parcels(self._index, wants, number)
        Exchange(number, gives, self.missing).run(rows, link)
        link.barrier()

    def settled(self) -> DeviceState:
        """The state, once all of it has arrived."""
        assert self.state is not None
        settle(self.state, self._index)
        if self._capturable:
            self.state.make_capturable()
        return self.state
