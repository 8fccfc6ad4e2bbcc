"""Saves and loads a compiled program in a folder: JSON, and one file for constants. No pickle.

program.json    strategy, settings, facts, names
graphs.json     each distinct program once
constants.pt    tensors that the model's code holds outside parameters and buffers
checksums.json  the checksums of these files, to detect damage

Loading an untrusted folder executes nothing from it: every item is validated before use, and
``check`` verifies that the parts are consistent. Plans are not saved but made again, so a file
cannot hold a plan that the compiler would not make.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from piper.base import checked_folder as folders
from piper.base.codec import Format, decode, encode
from piper.base.errors import PiperError
from piper.base.reading import (
    MalformedError,
    count,
    pairs,
    parsed,
    row,
    rows,
    string,
    table,
    whole,
    within,
    wrong,
)
from piper.capture.batch import Batch
from piper.capture.code.chunk_program import ChunkProgram
from piper.capture.code.codegen import compiler_named
from piper.capture.code.executables import ChunkSignature, Executables
from piper.capture.code.serialize import (
    device_named,
    program_from_json,
    program_to_json,
    spec_from_json,
    spec_to_json,
)
from piper.capture.code.totals import Totals
from piper.capture.trace.computation import Computation
from piper.capture.trees import tree_from_json, tree_to_json
from piper.cost.answers import Asked
from piper.cost.rough_costs import Costs
from piper.ir.dag.build import build
from piper.ir.dag.facts import Facts, Model
from piper.ir.tensors import TensorSpec
from piper.lower.forwards import lower_forwards
from piper.lower.lower import Settings, lower
from piper.program.checks import check, check_placed
from piper.program.compiled import Compiled, Step
from piper.state.optimizer.factory import OptimizerFactory
from piper.state.optimizer.probe import SchedulerFactory
from piper.state.optimizer.training import Training
from piper.state.weights.source import Source, StateNames
from piper.strategies.strategy import Strategy

C = TypeVar("C", bound=Compiled)
_FORMAT = Format("program", 10)


def save(program: Compiled, folder: Path) -> None:
    """Write ``program`` into ``folder``."""
    if program.plans != program.lowered.plans:
        raise PiperError(
            "the plans of this program are not those that its strategy gives, and a program is "
            "saved without plans: launch it on virtual devices, which need no copy of it"
        )
    graphs = _Graphs()
    training, evaluation = program.steps
    data = {
        "strategy": program.strategy.to_json(),
        "clip_norm": program.training.clip_norm,
        "on_nan": program.training.on_nan,
        "precision": program.training.precision,
        "seed": program.training.seed,
        "default_dtype": encode(torch.dtype, program.training.default_dtype),
        "settings": encode(Settings, _with_plain_costs(program)),
        "facts": _facts_to_json(training.facts),
        "evaluation_facts": (
            None if evaluation.facts is training.facts else _facts_to_json(evaluation.facts)
        ),
        "names": encode(StateNames, program.names),
        "code": _code_to_json(training.code, graphs),
        "evaluation_code": _code_to_json(evaluation.code, graphs),
        "example": _batch_to_json(program.example),
        "device": program.device.type,
        "compiler": type(program.compiler).__name__.lower(),
        "computation": encode(Computation | None, program.computation),
    }
    constants = {
        "code": dict(training.code.constants),
        "evaluation_code": dict(evaluation.code.constants),
    }
    buffer = io.BytesIO()
    torch.save(constants, buffer)
    files = {
        "program.json": json.dumps(data).encode(),
        "graphs.json": json.dumps([program_to_json(p) for p in graphs.items]).encode(),
        "constants.pt": buffer.getvalue(),
    }
    folders.write(folder, _FORMAT, files)


def _with_plain_costs(program: Compiled) -> Settings:
    """The settings of ``program``, with the recorded answers of its cost model in its place."""
    if isinstance(program.settings.costs, Costs):
        return program.settings
    asked = Asked(program.settings.costs)
    with_plans(replace(program, settings=replace(program.settings, costs=asked)))
    return replace(program.settings, costs=asked.answers)


def load(
    folder: Path,
    source: Source | None,
    optimizer: OptimizerFactory | None,
    scheduler: SchedulerFactory | None,
) -> Compiled:
    """The program in ``folder``. The optimizer must be one that its settings were made for."""
    files = folders.read(folder, _FORMAT, ("program.json", "graphs.json", "constants.pt"))
    with _reading(folder, "constants.pt"):
        constants = _constants(files["constants.pt"])
    with _reading(folder, "program.json"):
        data = parsed(files["program.json"])
        if type(data) is dict:
            data.setdefault("computation", None)  # earlier versions lack these
            data.setdefault("default_dtype", "float32")
        table(data, _PARTS)
        device = _part(data, "device", device_named)
    with _reading(folder, "graphs.json"):
        programs = rows(parsed(files["graphs.json"]), lambda x: program_from_json(x, device))
    with _reading(folder, "program.json"):
        read = _program(data, device, programs, constants, source, optimizer, scheduler)
        check(read)
        return with_plans(read)


@contextmanager
def _reading(folder: Path, name: str) -> Iterator[None]:
    try:
        yield
    except PiperError as error:
        raise PiperError(f"the program in {folder} cannot be used: {name}: {error}") from None


_PARTS = (
    "strategy", "clip_norm", "on_nan", "precision", "seed", "settings", "facts", "evaluation_facts",
    "names", "code", "evaluation_code", "example", "device", "compiler",
    "computation", "default_dtype",
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
) -> Compiled:
    """A program without plans."""

    def part(name: str, kind: Any) -> Any:
        return _part(data, name, lambda item: decode(kind, item))

    def code(name: str) -> Executables:
        return _part(data, name, lambda item: _code_from_json(item, programs, constants[name]))

    training = Training(
        optimizer, scheduler, part("clip_norm", float | None), part("precision", str),
        part("seed", int), part("on_nan", str | None),
        _part(data, "default_dtype", _default_dtype),
    )  # fmt: skip
    facts = _part(data, "facts", _facts_from_json)
    evaluation_facts = _part(
        data, "evaluation_facts", lambda item: facts if item is None else _facts_from_json(item)
    )
    return Compiled(
        strategy=_part(data, "strategy", lambda item: Strategy.from_json(rows(item))),
        training=training,
        source=source,
        names=part("names", StateNames),
        settings=part("settings", Settings),
        training_step=Step(facts, code("code")),
        evaluation_step=Step(evaluation_facts, code("evaluation_code")),
        memory=(),
        buckets=(),
        streams={},
        microbatches=1,
        example=_part(data, "example", _batch_from_json),
        device=device,
        compiler=_part(data, "compiler", lambda item: compiler_named(string(item))),
        computation=part("computation", Computation | None),
    )


def _default_dtype(data: Any) -> torch.dtype:
    dtype: torch.dtype = decode(torch.dtype, data)
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise wrong(data, "a dtype that can be torch's default")
    return dtype


def with_plans(read: C) -> C:
    """``read`` with the plans that lowering makes from its parts."""
    training, evaluation = read.steps
    placed = read.strategy.apply(build(training.facts.whole))
    again = placed
    if evaluation.facts is not training.facts:
        again = read.strategy.as_in(placed).apply(build(evaluation.facts.whole))
    check_placed(read, placed, again)
    lowered = lower(placed, training.facts.models, read.settings)
    forwards = lower_forwards(again, evaluation.facts.models, read.settings, lowered.dag)
    program = replace(
        read,
        training_step=replace(training, plans=lowered.plans),
        evaluation_step=replace(evaluation, plans=forwards.plans),
        memory=lowered.memory,
        buckets=forwards.dag.buckets,
        streams=lowered.dag.streams,
        microbatches=placed.microbatches[1] if placed.microbatches else 1,
    )
    vars(program)["lowered"] = lowered
    return program


def _facts_to_json(facts: Facts) -> dict[str, Any]:
    """``whole`` is written only if it differs from the first of the models."""
    same = facts.whole == next(iter(facts.models.values()))
    return {
        "whole": encode(Model | None, None if same else facts.whole),
        "models": encode(Mapping[int, Model], facts.models),
    }


def _facts_from_json(data: Any) -> Facts:
    table(data, ("whole", "models"))
    models = _part(data, "models", lambda item: decode(Mapping[int, Model], item))
    if not models:
        raise MalformedError("there is no model")
    whole = _part(data, "whole", lambda item: decode(Model | None, item))
    return Facts(whole or next(iter(models.values())), models)


def _constants(content: bytes) -> dict[str, dict[str, Tensor]]:
    try:
        constants = torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        raise MalformedError(str(error)) from error
    table(constants, ("code", "evaluation_code"))
    for name, tensors in constants.items():
        with within(name):
            if type(tensors) is not dict:
                raise wrong(tensors, "a table of tensors")
            for key, tensor in tensors.items():
                if type(tensor) is not Tensor or tensor.layout is not torch.strided:
                    raise wrong(type(tensor), "a tensor")
                string(key)
    return constants


class _Graphs:
    """Numbers distinct chunk programs in order of appearance."""

    def __init__(self) -> None:
        self.items: list[ChunkProgram] = []
        self._numbers: dict[int, int] = {}

    def number(self, program: ChunkProgram) -> int:
        if id(program) not in self._numbers:
            self._numbers[id(program)] = len(self.items)
            self.items.append(program)
        return self._numbers[id(program)]


def _code_to_json(code: Executables, graphs: _Graphs) -> dict[str, Any]:
    return {
        "pieces": encode(tuple[ChunkSignature, ...], code.pieces),
        "programs": [[n, [graphs.number(p) for p in row]] for n, row in code.programs.items()],
        "values": [[n, [spec_to_json(s) for s in row]] for n, row in code.values.items()],
        "loss": code.loss,
        "count": code.count,
        "outputs": [[name, value] for name, value in code.outputs.items()],
        "parameters": [[name, spec_to_json(spec)] for name, spec in code.parameters.items()],
        "totals": _totals_to_json(code.totals, graphs),
    }


_CODE = ("pieces", "programs", "values", "loss", "count", "outputs", "parameters", "totals")


def _totals_to_json(totals: Totals | None, graphs: _Graphs) -> Any:
    if totals is None:
        return None
    return [graphs.number(totals.program), list(totals.means), totals.parts, totals.complete]


def _totals_from_json(data: Any, programs: list[ChunkProgram]) -> Totals | None:
    if data is None:
        return None
    number, means, parts, complete = row(data, 4)
    program = programs[whole(number, 0, len(programs))]
    return Totals(program, decode(tuple[bool, ...], means), whole(parts, 1), decode(bool, complete))


def _code_from_json(
    data: Any, programs: list[ChunkProgram], constants: Mapping[str, Tensor]
) -> Executables:
    data = table(
        {"totals": None} | data if type(data) is dict else data, _CODE
    )  # earlier versions lack totals

    def numbered(item: Any) -> tuple[ChunkProgram, ...]:
        return tuple(rows(item, lambda n: programs[whole(n, 0, len(programs))]))

    def specs(item: Any) -> tuple[TensorSpec, ...]:
        return tuple(rows(item, spec_from_json))

    return Executables(
        pieces=_part(data, "pieces", lambda item: decode(tuple[ChunkSignature, ...], item)),
        programs=_part(data, "programs", lambda item: pairs(item, count, numbered)),
        values=_part(data, "values", lambda item: pairs(item, count, specs)),
        loss=_part(data, "loss", count),
        count=_part(data, "count", lambda item: None if item is None else count(item)),
        outputs=_part(data, "outputs", lambda item: pairs(item, string, count)),
        constants=constants,
        parameters=_part(data, "parameters", lambda item: pairs(item, string, spec_from_json)),
        totals=_part(data, "totals", lambda item: _totals_from_json(item, programs)),
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
