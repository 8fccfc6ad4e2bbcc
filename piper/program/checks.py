"""Checks of a program read from files: its facts, its code and its strategy are of each other.

The types of the file are checked before, and lowering checks what it makes of the parts. Here the
facts that plans are made from are compared with what the code says of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from piper.base.modes import Precision
from piper.base.reading import MalformedError, shown, within
from piper.capture.captured_facts import ends_of, of_signature, of_state
from piper.capture.code.chunk_program import ChunkProgram
from piper.capture.code.codegen import Eager
from piper.capture.code.executables import ChunkSignature, Executables
from piper.ir.dag.dag import Dag
from piper.ir.dag.facts import Model
from piper.ir.passes import Kind, Ref
from piper.ir.rules import ShardRule
from piper.ir.tensors import TensorSpec
from piper.program.compiled import Parts, Step

_DEFAULTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_STEPS = ("training", "evaluation")


def check(program: Parts) -> None:
    """Refuse inconsistent parts of a program that has no plans yet."""
    program.training.check()
    if program.training.default_dtype not in _DEFAULTS:
        raise MalformedError(f"default_dtype: {program.training.default_dtype} cannot be it")
    if program.settings.clip != program.training.waits_for_norm:
        raise MalformedError(
            "settings.clip: it does not say whether there is a clip_norm or on_nan"
        )
    if program.settings.fused != (not isinstance(program.compiler, Eager)):
        raise MalformedError("settings.fused: it does not say whether the compiler fuses")
    computation = program.computation
    if computation is not None and len(computation.places) != len(computation.operations):
        raise MalformedError("computation.places: there is not one for each operation")
    for name, step in zip(_STEPS, program.steps, strict=True):
        with within(name):
            _check_facts(step, program)
    with within("names"):
        _check_names(program)


def check_placed(program: Parts, training: Dag, evaluation: Dag) -> None:
    """Refuse code that was not made for the strategy. The DAGs are those of the strategy applied to
    the facts of each mode."""
    for name, dag, step in zip(_STEPS, (training, evaluation), program.steps, strict=True):
        with within(name):
            run = {(node.compute.chunk, node.parts) for node in dag.nodes}
            for n in {node.parts for node in dag.nodes if node.devices} - step.code.programs.keys():
                raise MalformedError(f"there is no code for groups of {n} devices")
            for n in step.code.programs:
                _check_code(dag, step, n, run)
            _check_example(program, step.code, dag, run)


def _check_facts(step: Step, program: Parts) -> None:
    """The facts are those of the code, as far as it says them."""
    code, facts = step.code, step.facts
    if not facts.models.keys() == code.programs.keys() == code.values.keys():
        raise MalformedError("models, programs and values are for groups of different sizes")
    first = next(iter(facts.models))
    if code.parameters.keys() != {name for piece in code.pieces for name in piece.parameters}:
        raise MalformedError("parameters: they are not those of its pieces")
    for n, model in ((first, facts.whole), *facts.models.items()):
        if (model.remat, [chunk.tags for chunk in model.chunks]) != (
            facts.whole.remat,
            [chunk.tags for chunk in facts.whole.chunks],
        ):
            raise MalformedError("models: they differ in what is recomputed")
        said = _said(model, code, n, program)
        for name in Model.__slots__:
            if getattr(model, name) != getattr(said, name):
                raise MalformedError(f"models[{n}].{name}: the code says otherwise")


def _said(model: Model, code: Executables, n: int, program: Parts) -> Model:
    """``model`` with everything that the code for groups of ``n`` devices says of it."""
    pairs = list(zip(code.pieces, code.programs[n], strict=True))
    return replace(
        model,
        chunks=tuple(
            replace(chunk, index=place, **of_signature(piece, made))
            for place, (chunk, (piece, made)) in enumerate(zip(model.chunks, pairs, strict=True))
        ),
        values=tuple(
            replace(value, shape=spec.shape, nbytes=spec.nbytes, copied=spec.copied)
            for value, spec in zip(model.values, code.values[n], strict=True)
        ),
        loss=code.loss,
        count=code.count,
        outputs=tuple(code.outputs.values()),
        batch=program.example.size,
        **of_state(pairs, code.parameters, program.training.master),
    )


def _check_code(dag: Dag, step: Step, n: int, run: set[tuple[int, int]]) -> None:
    """The code for groups of ``n`` devices matches the recomputation policy and the sharding of
    every chunk. ``run`` holds the chunks with their group sizes: at a size that runs only experts,
    the other chunks have code of another size."""
    code, models = step.code, (step.facts.whole, step.facts.models[n])
    for place, (piece, made) in enumerate(zip(code.pieces, code.programs[n], strict=True)):
        with within(f"code of {piece.name}"):
            for model in models:
                for which, facts in model.chunks[place].variants[dag.policy(place)].passes.items():
                    own = (facts.reads, facts.writes, facts.uses_parameters, facts.last)
                    if own != ends_of(made, which):
                        raise MalformedError(
                            f"the pass {which.value} is not what the strategy recomputes"
                        )
            if (place, n) in run:
                _check_ends(made, piece, code.values[n], dag.shards.get(place), models[1], place)
            for i, name in enumerate(piece.parameters):
                shape = list(code.parameters[name].shape)
                if (rule := dag.shard(place, name)) is not None:
                    shape[rule.dim] = -(-shape[rule.dim] // rule.ways)  # the last may be padded
                if list(made.specs[Ref(Kind.PARAMETER, i)].shape) != shape:
                    raise MalformedError(f"it does not take {name} as {shape}")


def _check_ends(
    made: ChunkProgram,
    piece: ChunkSignature,
    values: Sequence[TensorSpec],
    rule: ShardRule | None,
    model: Model,
    place: int,
) -> None:
    """The inputs and outputs of a piece match the values between pieces. Those of sharded experts
    have as many elements in another shape, or the shape of the room for sorted rows."""
    sorted_rows = model.chunks[place].sorted_rows
    by_expert = sorted_rows if rule is not None and rule.ways > 1 else None
    for kind, ends in ((Kind.INPUT, piece.inputs), (Kind.OUTPUT, piece.outputs)):
        for i, value in enumerate(ends):
            own, other = made.specs.get(Ref(kind, i), values[value]), values[value]
            if rule is None:
                same = own.shape == other.shape
            elif by_expert and (kind, i) != (Kind.INPUT, by_expert.counts):
                same = own.shape == (rule.room(by_expert.rows), *other.shape[1:])
            else:
                same = own.numel == other.numel
            if not same or own.dtype != other.dtype:
                raise MalformedError(f"its {kind.value} {i} is {own}, but value {value} is {other}")


def _check_names(program: Parts) -> None:
    names = program.names
    if names.keys.keys() != names.shapes.keys():
        raise MalformedError("keys and shapes are of different tensors")
    if missing := program.parameters.keys() - set(names.keys.values()):
        raise MalformedError(f"there is no key for {shown(min(missing))}")
    for key, name in names.keys.items():
        spec = program.parameters.get(name)
        if spec is not None and spec.shape != names.shapes[key]:
            raise MalformedError(
                f"{shown(key)} has the shape {list(names.shapes[key])}, not {spec}"
            )


def _check_example(program: Parts, code: Executables, dag: Dag, run: set[tuple[int, int]]) -> None:
    """The code takes the tensors of the example."""
    tensors = program.example.tensors
    microbatches = dag.microbatches[1] if dag.microbatches else 1
    fed = {n for chunk, n in run if set(range(len(tensors))) & set(code.pieces[chunk].inputs)}
    computed = Precision(program.training.precision).dtype
    made = {value for piece in code.pieces for value in piece.outputs}
    totals = 0 if code.totals is None else len(code.totals.means)
    for n, specs in code.values.items():
        given = [value for value in range(len(specs)) if value not in made]
        if given != list(range(len(tensors) + totals)):
            raise MalformedError(f"{len(tensors)} tensors, but the code takes {len(given)}")
        if n not in fed:
            continue
        for place, (x, spec) in enumerate(zip(tensors, specs, strict=False)):
            cut = microbatches * n if program.example.has_rows(x) else 1
            rows = (spec.shape[0] * cut, *spec.shape[1:]) if x.shape else ()
            kinds = {x.dtype, computed if computed and x.is_floating_point() else x.dtype}
            if tuple(x.shape) != rows or spec.dtype not in kinds:
                raise MalformedError(f"example: its tensor {place} is not what the code takes")
