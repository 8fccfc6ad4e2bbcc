"""A compiled program in a folder: JSON for all that it is, one file for constants. No pickle.

program.json    strategy, settings, facts, names, plans, memory
graphs.json     each distinct program once
constants.pt    tensors that the model's code holds outside parameters and buffers
checksums.json  the checksums of these, by which damage is found

Whoever wrote a folder, reading it runs nothing of it: everything is checked against what it must be
before it is used, and ``check`` says whether the parts fit each other.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piper import folder as folders
from piper.capture.batch import Batch
from piper.capture.codegen import compiler_named
from piper.capture.program import Program as ChunkProgram
from piper.capture.serial import (
    device_named,
    program_from_json,
    program_to_json,
    spec_from_json,
    spec_to_json,
)
from piper.capture.tensors import TensorSpec
from piper.capture.trees import tree_from_json, tree_to_json
from piper.checks import check
from piper.codec import (
    MalformedError,
    count,
    decode,
    encode,
    pairs,
    parsed,
    rows,
    string,
    table,
    whole,
    within,
    wrong,
)
from piper.errors import PiperError
from piper.ir.dag import Bucket, StreamRule
from piper.ir.facts import Model
from piper.lower.lower import Settings
from piper.lower.memory import Memory
from piper.lower.plan import Plan
from piper.optimizer import (
    OptimizerFactory,
    SchedulerFactory,
    check_divisible,
    check_taken,
    cost_of,
    name_of,
    try_scheduler,
)
from piper.program import Code, Piece, Program, Training, trained_shapes
from piper.strategy import Strategy
from piper.weights import Source, StateNames

_FORMAT = "piper program 4"


def save(program: Program, folder: Path) -> None:
    """Write ``program`` into ``folder``."""
    graphs = _Graphs()
    data = {
        "strategy": program.strategy.to_json(),
        "clip_norm": program.training.clip_norm,
        "precision": program.training.precision,
        "seed": program.training.seed,
        "settings": encode(program.settings),
        "models": encode(program.models),
        "names": encode(program.names),
        "plans": [plan.to_json() for plan in program.plans],
        "evaluation_plans": [plan.to_json() for plan in program.evaluation_plans],
        "memory": encode(program.memory),
        "buckets": encode(program.buckets),
        "streams": encode(program.streams),
        "microbatches": program.microbatches,
        "code": _code_to_json(program.code, graphs),
        "evaluation_code": _code_to_json(program.evaluation_code, graphs),
        "example": _batch_to_json(program.example),
        "device": program.device.type,
        "compiler": type(program.compiler).__name__.lower(),
    }
    constants = {
        "code": dict(program.code.constants),
        "evaluation_code": dict(program.evaluation_code.constants),
    }
    buffer = io.BytesIO()
    torch.save(constants, buffer)
    files = {
        "program.json": json.dumps(data).encode(),
        "graphs.json": json.dumps([program_to_json(p) for p in graphs.items]).encode(),
        "constants.pt": buffer.getvalue(),
    }
    folders.write(folder, _FORMAT, files)


def load(
    folder: Path,
    source: Source | None,
    optimizer: OptimizerFactory | None,
    scheduler: SchedulerFactory | None,
) -> Program:
    """The program in ``folder``."""
    files = folders.read(folder, _FORMAT, ("program.json", "graphs.json", "constants.pt"))
    with _reading(folder, "constants.pt"):
        constants = _constants(files["constants.pt"])
    with _reading(folder, "program.json"):
        data = table(parsed(files["program.json"]), _PARTS)
        device = _part(data, "device", device_named)
    with _reading(folder, "graphs.json"):
        programs = rows(parsed(files["graphs.json"]), lambda x: program_from_json(x, device))
    with _reading(folder, "program.json"):
        program = _program(data, device, programs, constants, source, optimizer, scheduler)
        check(program)
    _try_callables(program)
    return program


def _try_callables(program: Program) -> None:
    """Try an optimizer that may be another than the one compiled with, as ``compile`` does."""
    training, steps = program.training, program.settings.optimizer
    training.check()
    try_scheduler(training.optimizer, training.scheduler)
    if training.optimizer is None:
        return
    check_taken(training.optimizer, trained_shapes(program.buckets, program.code))
    history = ("build", *map(str, program.strategy.directives))
    check_divisible(training.optimizer, program.buckets, history, program.device)
    if cost_of(training.optimizer, program.device).whole and not steps.whole:
        raise PiperError(
            f"the optimizer {name_of(training.optimizer)} takes one step for all parameters (it "
            "counts its steps, has hooks on them, or looks across parameters), but the program was "
            "compiled with one that steps bucket by bucket: compile it with this optimizer"
        )


@contextmanager
def _reading(folder: Path, name: str) -> Iterator[None]:
    try:
        yield
    except PiperError as error:
        raise PiperError(f"the program in {folder} cannot be used: {name}: {error}") from None


_PARTS = (
    "strategy", "clip_norm", "precision", "seed", "settings", "models", "names", "plans",
    "evaluation_plans", "memory", "buckets", "streams", "microbatches", "code", "evaluation_code",
    "example", "device", "compiler",
)  # fmt: skip


def _part(data: dict[str, Any], name: str, read: Callable[[Any], Any]) -> Any:
    with within(name):
        try:
            return read(data[name])
        except MalformedError:
            raise
        except PiperError as error:
            raise MalformedError(str(error)) from None


def _program(
    data: dict[str, Any],
    device: torch.device,
    programs: list[ChunkProgram],
    constants: Mapping[str, Mapping[str, Tensor]],
    source: Source | None,
    optimizer: OptimizerFactory | None,
    scheduler: SchedulerFactory | None,
) -> Program:
    def part(name: str, kind: Any) -> Any:
        return _part(data, name, lambda item: decode(kind, item))

    def plans(name: str) -> tuple[Plan, ...]:
        return _part(data, name, lambda item: tuple(rows(item, Plan.from_json)))

    def code(name: str) -> Code:
        return _part(data, name, lambda item: _code_from_json(item, programs, constants[name]))

    training = Training(
        optimizer, scheduler, part("clip_norm", float | None), part("precision", str),
        part("seed", int),
    )  # fmt: skip
    return Program(
        strategy=_part(data, "strategy", lambda item: Strategy.from_json(rows(item))),
        training=training,
        source=source,
        names=part("names", StateNames),
        settings=part("settings", Settings),
        models=part("models", Mapping[int, Model]),
        plans=plans("plans"),
        evaluation_plans=plans("evaluation_plans"),
        memory=part("memory", tuple[Memory, ...]),
        buckets=part("buckets", tuple[Bucket, ...]),
        streams=part("streams", Mapping[str, StreamRule]),
        microbatches=_part(data, "microbatches", lambda item: whole(item, 1)),
        code=code("code"),
        evaluation_code=code("evaluation_code"),
        example=_part(data, "example", _batch_from_json),
        device=device,
        compiler=_part(data, "compiler", lambda item: compiler_named(string(item))),
    )


def _constants(content: bytes) -> dict[str, dict[str, Tensor]]:
    try:
        found = torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        raise MalformedError(str(error)) from error
    table(found, ("code", "evaluation_code"))
    for name, tensors in found.items():
        with within(name):
            if type(tensors) is not dict:
                raise wrong(tensors, "a table of tensors")
            for key, tensor in tensors.items():
                if type(tensor) is not Tensor or tensor.layout is not torch.strided:
                    raise wrong(type(tensor), "a tensor")
                string(key)
    return found


class _Graphs:
    """Distinct programs, numbered as they come."""

    def __init__(self) -> None:
        self.items: list[ChunkProgram] = []
        self._numbers: dict[int, int] = {}

    def number(self, program: ChunkProgram) -> int:
        if id(program) not in self._numbers:
            self._numbers[id(program)] = len(self.items)
            self.items.append(program)
        return self._numbers[id(program)]


def _code_to_json(code: Code, graphs: _Graphs) -> dict[str, Any]:
    return {
        "pieces": encode(code.pieces),
        "programs": [[n, [graphs.number(p) for p in row]] for n, row in code.programs.items()],
        "values": [[n, [spec_to_json(s) for s in row]] for n, row in code.values.items()],
        "loss": code.loss,
        "count": code.count,
        "parameters": [[name, spec_to_json(spec)] for name, spec in code.parameters.items()],
    }


_CODE = ("pieces", "programs", "values", "loss", "count", "parameters")


def _code_from_json(
    data: Any, programs: list[ChunkProgram], constants: Mapping[str, Tensor]
) -> Code:
    table(data, _CODE)

    def numbered(item: Any) -> tuple[ChunkProgram, ...]:
        return tuple(rows(item, lambda n: programs[whole(n, 0, len(programs))]))

    def specs(item: Any) -> tuple[TensorSpec, ...]:
        return tuple(rows(item, spec_from_json))

    return Code(
        pieces=_part(data, "pieces", lambda item: decode(tuple[Piece, ...], item)),
        programs=_part(data, "programs", lambda item: pairs(item, count, numbered)),
        values=_part(data, "values", lambda item: pairs(item, count, specs)),
        loss=_part(data, "loss", count),
        count=_part(data, "count", lambda item: None if item is None else count(item)),
        constants=constants,
        parameters=_part(data, "parameters", lambda item: pairs(item, string, spec_from_json)),
    )


def _batch_to_json(batch: Batch) -> dict[str, Any]:
    leaves = [
        {"tensor": spec_to_json(TensorSpec.of(x))} if isinstance(x, Tensor) else {"plain": x}
        for x in batch.leaves
    ]
    return {"leaves": leaves, "tree": tree_to_json(batch.spec)}


def _batch_from_json(data: Any) -> Batch:
    table(data, ("leaves", "tree"))
    with within("leaves"):
        leaves = rows(data["leaves"], _leaf_from_json)
    with within("tree"):
        tree = tree_from_json(data["tree"])
        if tree.num_leaves != len(leaves):
            raise MalformedError(f"it has {tree.num_leaves} leaves, but {len(leaves)} are given")
    args, kwargs, targets = tree.unflatten(leaves)
    return Batch.of(kwargs or args, targets)


def _leaf_from_json(data: Any) -> Any:
    match data:
        case {"tensor": written} if len(data) == 1:
            spec = spec_from_json(written)
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        case {"plain": bool() | int() | float() | str() | None as plain} if len(data) == 1:
            return plain
        case _:
            raise wrong(data, "a tensor or a plain value")
