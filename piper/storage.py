"""A compiled program in a folder: JSON for all that it is, one file for constants. No pickle.

program.json    strategy, settings, facts, names, plans, memory
graphs.json     each distinct program once
constants.pt    tensors that the model's code holds outside parameters and buffers
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from piper.capture.batch import Batch
from piper.capture.codegen import compiler_named
from piper.capture.program import Program as ChunkProgram
from piper.capture.serial import (
    program_from_json,
    program_to_json,
    spec_from_json,
    spec_to_json,
)
from piper.capture.tensors import TensorSpec
from piper.codec import decode, encode
from piper.errors import PiperError
from piper.ir.dag import Bucket, Rest, StreamRule
from piper.ir.facts import Model
from piper.lower.lower import Settings
from piper.lower.memory import Memory
from piper.lower.plan import Plan
from piper.optimizer import OptimizerFactory, SchedulerFactory
from piper.program import Code, Piece, Program, Training
from piper.strategy import Strategy
from piper.weights import Source, StateNames

_FORMAT = "piper program 4"


def save(program: Program, folder: Path) -> None:
    """Write ``program`` into ``folder``."""
    graphs = _Graphs()
    data = {
        "format": _FORMAT,
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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "program.json").write_text(json.dumps(data))
        (folder / "graphs.json").write_text(json.dumps([program_to_json(p) for p in graphs.items]))
        constants = {
            "code": dict(program.code.constants),
            "evaluation_code": dict(program.evaluation_code.constants),
        }
        torch.save(constants, folder / "constants.pt")
    except OSError as error:
        raise PiperError(f"the program cannot be saved to {folder}: {error}") from error


def load(
    folder: Path,
    source: Source | None,
    optimizer: OptimizerFactory | None,
    scheduler: SchedulerFactory | None,
) -> Program:
    """The program in ``folder``."""
    try:
        data = json.loads((folder / "program.json").read_text())
        graphs = json.loads((folder / "graphs.json").read_text())
        constants = torch.load(folder / "constants.pt", weights_only=True)
    except FileNotFoundError as error:
        raise PiperError(f"{folder} is no saved program: {error}") from error
    except (ValueError, OSError) as error:
        raise PiperError(f"the program in {folder} cannot be read: {error}") from error
    if data.get("format") != _FORMAT:
        raise PiperError(f"{folder} holds {data.get('format')!r}, not {_FORMAT!r}")
    device = torch.device(data["device"])
    programs = [program_from_json(graph, device) for graph in graphs]
    training = Training(optimizer, scheduler, data["clip_norm"], data["precision"], data["seed"])
    return Program(
        strategy=Strategy.from_json(data["strategy"]),
        training=training,
        source=source,
        names=decode(StateNames, data["names"]),
        settings=decode(Settings, data["settings"]),
        models=decode(Mapping[int, Model], data["models"]),
        plans=tuple(Plan.from_json(plan) for plan in data["plans"]),
        evaluation_plans=tuple(Plan.from_json(plan) for plan in data["evaluation_plans"]),
        memory=decode(tuple[Memory, ...], data["memory"]),
        buckets=decode(tuple[Bucket, ...], data["buckets"]),
        streams=_streams_from_json(data["streams"]),
        microbatches=data["microbatches"],
        code=_code_from_json(data["code"], programs, constants["code"]),
        evaluation_code=_code_from_json(
            data["evaluation_code"], programs, constants["evaluation_code"]
        ),
        example=_batch_from_json(data["example"]),
        device=device,
        compiler=compiler_named(data["compiler"]),
    )


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


def _streams_from_json(data: list[Any]) -> dict[str, StreamRule]:
    """By hand, since ``decode`` takes the first type of a union, and ``sms`` may be of two."""
    return {
        name: StreamRule(priority, Rest.REST if sms == Rest.REST.value else sms)
        for name, (priority, sms) in data
    }


def _code_to_json(code: Code, graphs: _Graphs) -> dict[str, Any]:
    return {
        "pieces": encode(code.pieces),
        "programs": [[n, [graphs.number(p) for p in row]] for n, row in code.programs.items()],
        "values": [[n, [spec_to_json(s) for s in row]] for n, row in code.values.items()],
        "loss": code.loss,
        "count": code.count,
        "parameters": [[name, spec_to_json(spec)] for name, spec in code.parameters.items()],
    }


def _code_from_json(
    data: dict[str, Any], programs: list[ChunkProgram], constants: dict[str, Tensor]
) -> Code:
    return Code(
        pieces=decode(tuple[Piece, ...], data["pieces"]),
        programs={n: tuple(programs[i] for i in row) for n, row in data["programs"]},
        values={n: tuple(map(spec_from_json, row)) for n, row in data["values"]},
        loss=data["loss"],
        count=data["count"],
        constants=constants,
        parameters={name: spec_from_json(spec) for name, spec in data["parameters"]},
    )


def _batch_to_json(batch: Batch) -> dict[str, Any]:
    leaves = [
        {"tensor": spec_to_json(TensorSpec.of(x))} if isinstance(x, Tensor) else {"plain": x}
        for x in batch.leaves
    ]
    return {"leaves": leaves, "spec": pytree.treespec_dumps(batch.spec)}


def _batch_from_json(data: dict[str, Any]) -> Batch:
    leaves = []
    for leaf in data["leaves"]:
        if "tensor" in leaf:
            spec = spec_from_json(leaf["tensor"])
            leaf = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        else:
            leaf = leaf["plain"]
        leaves.append(leaf)
    args, kwargs, targets = pytree.treespec_loads(data["spec"]).unflatten(leaves)
    return Batch.of(kwargs or args, targets)
