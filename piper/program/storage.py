"""Saves and loads a compiled program in a folder: JSON, and one file for constants. No pickle.

program.json    strategy, settings, facts, names
graphs.json     each distinct program once
constants.pt    tensors that the model's code holds outside parameters and buffers
checksums.json  the version of the format and the checksums of these files, to detect damage

Loading an untrusted folder executes nothing from it: the types in this file and in ``serialize``
are its schema. Plans are not saved but made again, so a file cannot hold a plan that the compiler
would not make.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import torch
from torch import Tensor

from piper.base import checked_folder as folders
from piper.base.codec import Count, Format, Int64, decode, encode, picked
from piper.base.errors import PiperError
from piper.base.reading import MalformedError, parsed, rows, shown, within
from piper.capture.batch import Batch
from piper.capture.code.chunk_program import ChunkProgram
from piper.capture.code.codegen import compiler_named
from piper.capture.code.executables import ChunkSignature, Executables
from piper.capture.code.serialize import (
    device_named,
    program_from_json,
    program_to_json,
)
from piper.capture.code.totals import Totals
from piper.capture.trace.computation import Computation
from piper.capture.trees import tree_from_json, tree_to_json
from piper.cost.answers import Answers, Asked
from piper.cost.rough_costs import Costs
from piper.ir.dag.build import build
from piper.ir.dag.facts import Facts, Model
from piper.ir.equal_numbers import EqualNumbers
from piper.ir.tensors import TensorSpec
from piper.lower.lower import Settings, lower
from piper.program.checks import check, check_placed
from piper.program.compiled import Compiled, Parts, Step, evaluated
from piper.state.optimizer.factory import OptimizerFactory
from piper.state.optimizer.scheduler import SchedulerFactory
from piper.state.optimizer.training import Training
from piper.state.weights.source import Source, StateNames
from piper.strategies.strategy import Strategy

C = TypeVar("C", bound=Compiled)
_FORMAT = Format("program", 15)
NAMES = ("program.json", "graphs.json", "constants.pt")


class _TotalsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    program: Count
    means: tuple[bool, ...]
    parts: Count
    complete: bool
    batches: Count | None


class _CodeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``Executables`` without constants; programs by their number in graphs.json."""

    pieces: tuple[ChunkSignature, ...]
    programs: Mapping[int, tuple[Count, ...]]
    values: Mapping[int, tuple[TensorSpec, ...]]
    loss: Count
    count: Count | None
    outputs: Mapping[str, Count]
    parameters: Mapping[str, TensorSpec]
    totals: _TotalsFile | None
    mixes: str | None


class _StepFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    whole: Model | None
    """None: the first of ``models``."""
    models: Mapping[int, Model] | None
    """None, for evaluation: the facts are those of training."""
    code: _CodeFile


class _ExampleFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    leaves: tuple[TensorSpec | bool | int | float | str | None, ...]
    tree: Any


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """program.json."""

    strategy: list[Any]
    clip_norm: float | None
    on_nan: Literal["skip", "stop"] | None
    precision: Literal["fp32", "bf16"]
    seed: Int64
    default_dtype: torch.dtype
    settings: Settings
    """Without its costs."""
    costs: Costs | None
    answers: Answers | None
    """Of a cost model, if it is not ``Costs``."""
    training: _StepFile
    evaluation: _StepFile
    names: StateNames
    example: _ExampleFile
    device: str
    compiler: str
    computation: Computation | None


_CODE = ("pieces", "values", "loss", "count", "outputs", "parameters", "mixes")
"""The fields of ``Executables`` that a file has as they are."""
_TOTALS = ("means", "parts", "complete", "batches")
"""Those of ``Totals``."""
_TRAINING = ("clip_norm", "precision", "seed", "on_nan", "default_dtype")
"""Those of ``Training``."""


def save(program: Compiled, folder: Path) -> None:
    """Write ``program`` into ``folder``."""
    folders.write(folder, _FORMAT, files_of(program))


def files_of(program: Compiled) -> dict[str, bytes]:
    """The files of a program, by name."""
    if program.plans != program.lowered.plans:
        raise PiperError(
            "the plans of this program are not the plans of its strategy, and a program is "
            "saved without plans: launch it on virtual devices, which need no copy of it"
        )
    graphs: EqualNumbers[ChunkProgram] = EqualNumbers()
    training, evaluation = program.steps
    costs = _plain_costs(program)
    file = _File(
        strategy=program.strategy.to_json(),
        **picked(program.training, _TRAINING),
        settings=program.settings,
        costs=costs if isinstance(costs, Costs) else None,
        answers=costs if isinstance(costs, Answers) else None,
        training=_step_to_file(training, graphs),
        evaluation=_step_to_file(evaluation, graphs, training.facts),
        names=program.names,
        example=_ExampleFile(
            tuple(TensorSpec.of(x) if isinstance(x, Tensor) else x for x in program.example.leaves),
            tree_to_json(program.example.spec),
        ),
        device=program.device.type,
        compiler=type(program.compiler).__name__.lower(),
        computation=program.computation,
    )
    data = encode(file)
    del data["settings"]["costs"]
    buffer = io.BytesIO()
    torch.save([dict(step.code.constants) for step in program.steps], buffer)
    return {
        "program.json": json.dumps(data).encode(),
        "graphs.json": json.dumps([program_to_json(p) for p in graphs.values]).encode(),
        "constants.pt": buffer.getvalue(),
    }


def _plain_costs(program: Compiled) -> Costs | Answers:
    """The cost model of ``program`` if it is plain data, otherwise its recorded answers."""
    if isinstance(program.settings.costs, Costs):
        return program.settings.costs
    asked = Asked(program.settings.costs)
    again = with_plans(replace(program, settings=replace(program.settings, costs=asked)), Compiled)
    _ = again.evaluation_step.plans  # asks, too
    return asked.answers


def files_in(folder: Path) -> dict[str, bytes]:
    """The files of the program in ``folder``, by name."""
    return folders.read(folder, _FORMAT, NAMES)


def load(
    files: Mapping[str, bytes],
    folder: Path,
    source: Source | None,
    optimizer: OptimizerFactory | None,
    scheduler: SchedulerFactory | None,
    kind: type[C],
) -> C:
    """The program of ``files`` from ``folder``. The optimizer must be one that its settings were
    made for."""
    with _reading(folder, "constants.pt"):
        constants = _constants(files["constants.pt"])
    with _reading(folder, "program.json"):
        file: _File = decode(_File, parsed(files["program.json"]))
        device = device_named(file.device)
    with _reading(folder, "graphs.json"):
        graphs = rows(parsed(files["graphs.json"]), program_from_json)
    with _reading(folder, "program.json"):
        training = _step_from_file(file.training, graphs, constants[0])
        read = Parts(
            strategy=Strategy.from_json(file.strategy),
            training=Training(optimizer, scheduler, **picked(file, _TRAINING)),
            source=source,
            names=file.names,
            settings=replace(file.settings, costs=file.costs or file.answers or Costs()),
            training_step=training,
            evaluation_step=_step_from_file(
                file.evaluation, graphs, constants[1], training.facts
            ),
            example=_example_from_file(file.example),
            device=device,
            compiler=compiler_named(file.compiler),
            computation=file.computation,
        )  # fmt: skip
        check(read)
        return with_plans(read, kind)


@contextmanager
def _reading(folder: Path, name: str) -> Iterator[None]:
    """Names the file in every error, also where its parts do not fit together."""
    try:
        yield
    except PiperError as error:
        raise PiperError(f"the program in {folder} cannot be used: {name}: {error}") from None
    except Exception as error:
        raise PiperError(
            f"the program in {folder} cannot be used: {name}: its parts do not fit together "
            f"({type(error).__name__}: {error})"
        ) from error


def with_plans(read: Parts, kind: type[C]) -> C:
    """``read`` with the plans that lowering makes from it."""
    training, evaluation = read.steps
    placed = read.strategy.apply(build(training.facts.whole))
    again = placed
    if evaluation.facts is not training.facts:
        again = read.strategy.apply(build(evaluation.facts.whole))
    check_placed(read, placed, again)
    lowered = lower(placed, training.facts.models, read.settings)
    evaluation, buckets = evaluated(evaluation, training, lowered, read.strategy, read.settings)
    parts = {field.name: getattr(read, field.name) for field in fields(Parts)}
    parts["training_step"] = replace(training, planned=lambda: lowered.plans)
    parts["evaluation_step"] = evaluation
    return kind(**parts, lowered=lowered, buckets=buckets)


def _constants(content: bytes) -> list[dict[str, Tensor]]:
    """The constants of the code of both steps."""
    constants = torch.load(io.BytesIO(content), weights_only=True)
    kinds = {type(x) for x in constants} | {
        kind for tensors in constants for kind in map(type, tensors)
    }
    if len(constants) != 2 or not kinds <= {dict, str}:
        raise MalformedError("these are not two tables of tensors")
    for tensor in (tensor for tensors in constants for tensor in tensors.values()):
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            raise MalformedError(f"{shown(type(tensor))} is not a tensor")
    return list(constants)


def _step_to_file(
    step: Step, graphs: EqualNumbers[ChunkProgram], known: Facts | None = None
) -> _StepFile:
    facts, code = step.facts, step.code
    totals = None
    if (own := code.totals) is not None:
        totals = _TotalsFile(graphs.of(own.program), **picked(own, _TOTALS))
    same = facts is known or facts.whole == next(iter(facts.models.values()))
    return _StepFile(
        whole=None if same else facts.whole,
        models=None if facts is known else facts.models,
        code=_CodeFile(
            programs={n: tuple(map(graphs.of, row)) for n, row in code.programs.items()},
            totals=totals,
            **picked(code, _CODE),
        ),
    )


def _step_from_file(
    file: _StepFile,
    graphs: list[ChunkProgram],
    constants: Mapping[str, Tensor],
    known: Facts | None = None,
) -> Step:
    code, totals = file.code, None
    if (own := code.totals) is not None:
        totals = Totals(graphs[own.program], **picked(own, _TOTALS))
    if file.models:
        facts = Facts(file.whole or next(iter(file.models.values())), file.models)
    elif known is not None:
        facts = known
    else:
        raise MalformedError("training.models: there is no model")
    return Step(
        facts,
        Executables(
            programs={n: tuple(graphs[i] for i in row) for n, row in code.programs.items()},
            constants=constants,
            totals=totals,
            **picked(code, _CODE),
        ),
    )


def _example_from_file(file: _ExampleFile) -> Batch:
    with within("example.tree"):
        tree = tree_from_json(file.tree)
    leaves = [
        x.empty(torch.device("meta")) if isinstance(x, TensorSpec) else x for x in file.leaves
    ]
    args, kwargs, targets = tree.unflatten(leaves)
    return Batch.of(kwargs or args, targets)
