"""A change of strategy in the middle of a run: ``Trainer.switch``.

First it checks that the switch is possible: the next program trains the same model with the same
optimizer, and its devices exist. Then every device lists the tensor slices that it gives, as in the
index of a checkpoint. Each device of the next program allocates its state beside the old one,
copies the slices that its process already has, and receives the rest. The old program stays
unchanged until the last slice has arrived.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum

from piper.base.arguments import choice
from piper.base.errors import PiperError, WorkerError, warn
from piper.base.units import class_text
from piper.capture.trace.computation import LOSS_PLACE
from piper.launch.device.device import WorkerDevice
from piper.launch.device.device_programs import device_programs
from piper.launch.device.report import Refusal
from piper.launch.device.worker_group import Each, WorkerGroup, answers_of_all, joined
from piper.launch.optimizer_facts import difference, facts_of
from piper.launch.state.saving import accepted, index_of
from piper.launch.state.state_checks import check_state
from piper.program.program import Program
from piper.state.checkpoint.index import Index, Part
from piper.state.checkpoint.slices import Slice


class Change(Enum):
    """What a switch may be allowed to change, by name."""

    MODEL = "model"
    LOSS = "loss"
    PRECISION = "precision"
    CLIP_NORM = "clip_norm"
    ON_NAN = "on_nan"


def changes_named(names: Sequence[str]) -> frozenset[Change]:
    """The changes named in ``allow=names``."""
    given = [names] if isinstance(names, str) else names
    return frozenset(choice("allow", name, Change) for name in given)


def switch(group: WorkerGroup, old: Program, new: Program, allow: frozenset[Change]) -> None:
    """Continue with ``new``, or refuse it and change nothing."""
    if not isinstance(new, Program):
        raise PiperError(f"switch takes what piper.compile returns, not {class_text(new)}")
    if (why := group.once(lambda: _difference(old, new, allow))) is not None:
        raise _refused(why)
    group.switch(new, lambda devices: _move(devices, group.running(old), new))


def _move(group: WorkerGroup, old: Program, new: Program) -> None:
    """Move the state to the devices of ``new``, or refuse it and change nothing."""
    try:
        parts = group.call(WorkerDevice.give)
        index = group.once(lambda rows: _index(old, new, joined(rows)), parts)
        wants = _prepared(group, old, new, index)
    except WorkerError:  # those that are left cannot go on
        raise
    except PiperError:
        with suppress(PiperError):  # the workers may have ended
            group.call(WorkerDevice.abandon)
            group.seat(old.devices, old.device)
        raise
    if old.training.seed != new.training.seed:
        warn(
            f"the program that is switched to was compiled with seed={new.training.seed}, the one "
            f"before with seed={old.training.seed}: random numbers, as of dropout, go on "
            "differently"
        )
    group.call(WorkerDevice.finish, group.once(lambda: uuid.uuid4().hex), wants)
    group.call(WorkerDevice.take)
    group.seat(new.devices, new.device)


def _prepared(
    group: WorkerGroup, old: Program, new: Program, index: Index
) -> dict[int, list[Slice]]:
    """The slices that each device needs from others, with the state of ``new`` allocated."""
    if group.agreement is not None:
        group.agreement.agree_on(new)
    try:
        group.seat({*old.devices, *new.devices}, new.device)
    except PiperError as error:
        raise _refused(str(error)) from None
    of = device_programs(new)
    parts = Each(lambda device: of(device) if device in new.devices else None, new.training)
    prepared = answers_of_all(group, group.call(WorkerDevice.prepare, parts, index))
    if whys := [why for one in prepared for why in one.refused]:
        raise _refused(whys[0])
    return {one.device: one.requests for one in prepared}


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
    name, before, now = other
    return f"its {name} is {now}, the one before has {before}"


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
