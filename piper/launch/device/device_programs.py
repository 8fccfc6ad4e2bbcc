"""What each device gets of a program: its own plans, the executables that they run, and the buckets
of which it has a part; and the initial weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from torch import Tensor

from piper.base.errors import PiperError
from piper.capture.code.chunk_program import ChunkProgram
from piper.capture.code.executables import Executables
from piper.ir.ops import Compute
from piper.ir.plan.plan import Plan
from piper.launch.device.weight_readers import FirstWeights
from piper.launch.trainer.batch_tensors import tokens_of
from piper.program.compiled import Step
from piper.program.program import Program
from piper.state.device_program import DeviceProgram, buffers_of
from piper.state.weights.first_buffers import computed_buffer
from piper.state.weights.source import Source
from piper.state.weights.weight_files import WeightFiles

_NOTHING = ChunkProgram({}, {})
"""The program of chunks that other devices run."""


def device_programs(program: Program) -> Callable[[int], DeviceProgram]:
    """A function from a device of ``program`` to what it gets. Nothing is read of the program
    before the first call."""
    owners = cache(lambda: _owners(program))
    names = tuple(dict.fromkeys(program.names.keys.values()))

    def of(device: int) -> DeviceProgram:
        training, evaluation = program.steps
        buckets = {
            number: bucket
            for number, bucket in enumerate(program.buckets)
            if any(device in group for group in bucket.groups)
        }
        held = {name for bucket in buckets.values() for name in bucket.parameters}
        gives = dict.fromkeys(name for name, owner in owners().items() if owner == device)
        return DeviceProgram(
            device=device,
            devices=program.devices,
            kind=program.device,
            compiler=program.compiler,
            steps=(_own(training, device), _own(evaluation, device)),
            streams=program.streams,
            buckets=buckets,
            parameters={name: program.parameters[name] for name in held},
            order=tuple(name for name in names if name in held or name in gives),
            training=program.training,
            gives=tuple(gives),
            tokens=tokens_of(program.example, program.example.size),
        )

    return of


def _owners(program: Program) -> dict[str, int]:
    """The first device that has each buffer."""
    owners: dict[str, int] = {}
    for step in program.steps:
        for plan in step.plans:
            for name in buffers_of((plan, step.code)):
                owners[name] = min(owners.get(name, plan.devices[0]), *plan.devices)
    return dict(sorted(owners.items(), key=lambda item: item[1]))


def _own(step: Step, device: int) -> tuple[Plan, Executables]:
    """The plan of ``device``, and the executables with its chunks and group sizes alone, without
    what the trainer computes from a batch."""
    plan, code = step.plan_of(device), step.code
    run = [(x.op.chunk, x.rows.parts) for x in plan.instructions if isinstance(x.op, Compute)]
    chunks, sizes = {chunk for chunk, _ in run}, {size for _, size in run}
    used = {name for chunk in chunks for name in code.pieces[chunk].buffers}
    return plan, replace(
        code,
        programs={
            n: tuple(p if i in chunks else _NOTHING for i, p in enumerate(row))
            for n, row in code.programs.items()
            if n in sizes
        },
        constants={name: x for name, x in code.constants.items() if name in used},
        parameters={},
        totals=None,
    )


def first_weights(program: Program) -> FirstWeights:
    """The readers of the program's initial weights."""
    source = program.source
    if source is None:
        raise PiperError(
            "this program was loaded without weights: give source= to Program.load, for "
            "instance piper.Source(model)"
        )
    tensors = {**dict(source.parameters()), **dict(source.buffers())}
    seed = program.training.seed
    if not isinstance(source.init, WeightFiles):
        return FirstWeights(tensors, source.init, {}, seed)
    located = program.located or {}
    for name in located:
        tensors[name] = tensors[name].detach().to("meta")
    init = source.init.init
    if init is None:
        tensors |= _computed(source, tensors.keys() - located.keys(), seed)
    return FirstWeights(tensors, init, located, seed)


def _computed(source: Source, names: set[str], seed: int) -> dict[str, Tensor]:
    """The buffers among ``names`` that have no values yet, as their modules compute them."""
    buffers = {}
    for prefix, module in source.roots():
        for path, buffer in module.named_buffers():
            if prefix + path in names and buffer.is_meta:
                buffers[prefix + path] = computed_buffer(module, path, prefix + path, seed)
    return buffers
