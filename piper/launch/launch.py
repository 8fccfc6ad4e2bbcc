"""``launch`` takes a compiled program, starts its devices and returns a trainer."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any

from piper.base.arguments import Recover, choice, whole_number
from piper.base.errors import PiperError
from piper.base.modes import without_modes
from piper.base.units import class_text, seconds_of
from piper.launch.device.worker_group import WorkerGroup
from piper.launch.launchers import LAUNCHERS, Options, Where
from piper.launch.messages.calling_group import CallingGroup
from piper.launch.messages.custom_ops import refuse_in_worker
from piper.launch.recovery.policy import Policy
from piper.launch.recovery.recovering_group import RecoveringGroup
from piper.launch.recovery.replace import Replace
from piper.launch.recovery.reroute import Reroute
from piper.launch.recovery.restart import Restart
from piper.launch.running import start
from piper.launch.trainer.batch_shapes import BatchShapes
from piper.launch.trainer.trainer import Trainer
from piper.program.compile.stages import Stages
from piper.program.program import Program


def launch(
    program: Program,
    on: str = Where.VIRTUAL.value,
    *,
    shapes: int = 0,
    progress: bool | None = None,
    **options: Any,
) -> Trainer:
    """Start the devices of ``program`` and return a trainer, to be used in a ``with`` block.

    ``on`` names a launcher, such as "virtual", "processes", "torchrun" or "ray". ``shapes`` is the
    number of batch shapes allowed besides the example's; each gets its own program, compiled at the
    first such batch. What is done is shown as in ``piper.compile``, with ``progress``.
    ``options`` are specific to the launcher (``launchers.py``): for those with processes
    ``timeout`` (seconds, or "5min", that any operation may take) and ``share_gpus`` (several
    processes may share a GPU); for "processes" and "ray" ``restarts`` (how often a run goes on
    after workers die, fail or hang) and ``recover`` (how); on GPUs ``cuda_graphs`` (capture a step
    once and replay it) and ``shake`` (a seed: delay streams at random to find races).
    """
    if not isinstance(program, Program):
        raise PiperError(
            f"launch takes what piper.compile returns, not {class_text(program)}: "
            "piper.launch(piper.compile(model, strategy, ...))"
        )
    refuse_in_worker()
    program.refuse_refrozen()
    programs = BatchShapes(program, shapes)
    with without_modes(program.training.default_dtype):
        stages = Stages("launching", progress)
        with stages.stage("starting the devices"):
            group = _worker_group(on, options)
        try:
            policy = None
            if isinstance(group, CallingGroup) and group.options.restarts:
                with stages.stage("planning for faults"):
                    policy = _policy(Recover(group.options.recover), program)
            with stages.stage("loading the program"):
                start(group, program)
            if isinstance(group, CallingGroup) and policy is not None:
                group = RecoveringGroup(group, program, policy)
        except BaseException as error:
            group.close(error)
            raise
        stages.end()
        return Trainer(group, programs)


_TIMES = ("timeout", "start_timeout", "mirror", "stall")
"""Options that are times, such as 30 or "5min"."""


_DEVICES = ("cpu", "cuda", "gpu", "mps")
_MEANT = dict.fromkeys(
    ("device", "precision", "optimizer", "scheduler", "clip_norm", "strategy"),
    " It is an argument of piper.compile.",
)
"""Arguments that people look for here."""


def _worker_group(on: str, options: dict[str, Any]) -> WorkerGroup:
    if on not in [one.value for one in Where] and str(on).partition(":")[0] in _DEVICES:
        raise PiperError(
            f"on={on!r} is a kind of device, and on= says how workers start, such as 'virtual' or "
            "'processes': the device is that of the program, piper.compile(..., device='cuda')"
        )
    launcher = LAUNCHERS[choice("on", on, Where)]
    _refuse_unknown(on, options, launcher.options)
    times = {name: seconds_of(name, options[name]) for name in _TIMES if name in options}
    whole_number("restarts", options.get("restarts", 0), 0)
    _check_recover(options)
    group: WorkerGroup = launcher.worker_group()(launcher.options(**{**options, **times}))
    return group


def _policy(recover: Recover, program: Program) -> Policy:
    if recover is Recover.REROUTE:
        return Reroute(program)
    return Restart() if recover is Recover.RESTART else Replace()


def _check_recover(options: dict[str, Any]) -> None:
    """Refuse an answer to faults that cannot be given."""
    if "recover" not in options:
        return
    recover = choice("recover", options["recover"], Recover)
    if not options.get("restarts"):
        raise PiperError(
            f"recover={recover.value!r} says how training continues after a fault: say how often, "
            "restarts="
        )


def _refuse_unknown(on: str, options: dict[str, Any], kind: type[Options]) -> None:
    """Refuse an option that the launcher does not have."""
    known = ["shapes", "progress", *(field.name for field in fields(kind))]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f" Did you mean {near[0]}=?" if near else _MEANT.get(name, "")
            raise PiperError(
                f"launch(on={on!r}) has no option {name}=.{meant} "
                f"It has: {', '.join(f'{one}=' for one in known)}"
            )
