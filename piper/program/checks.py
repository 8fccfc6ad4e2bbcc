"""Checks that the parts of a program read from files are consistent.

Each part is well formed by itself when it gets here. References (to chunks, values, batch tensors)
must exist. The facts that plans are made from must match the code that plans run, and the strategy
must match the code. A ``MalformedError`` says what does not match.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from piper.base.reading import MalformedError, shown, within
from piper.capture.captured_facts import ends_of
from piper.capture.code.chunk_program import ChunkProgram
from piper.capture.code.codegen import Eager
from piper.capture.code.executables import ChunkSignature, Executables
from piper.capture.model import Precision
from piper.ir.dag.dag import Dag
from piper.ir.dag.facts import ChunkFacts, Facts, Model, ParameterFacts, Variant
from piper.ir.passes import SAVED, Kind, Pass, Ref
from piper.ir.rules import ShardRule
from piper.ir.tensors import TensorSpec
from piper.program.code_checks import check_code, in_range, known
from piper.program.compiled import Compiled

_PREFIXES = ("", "evaluation_")
"""Of the names of the parts of both steps in a file."""
_READ = (*SAVED, Kind.BI_SAVED, Kind.INPUT, Kind.OUTPUT, Kind.OUTPUT_GRAD)
_WRITTEN = (*SAVED, Kind.BI_SAVED, Kind.OUTPUT, Kind.INPUT_GRAD, Kind.PARAMETER_GRAD)
_GRADIENTS = (Kind.OUTPUT_GRAD, Kind.INPUT_GRAD, Kind.PARAMETER_GRAD)


def check(program: Compiled) -> None:
    """Refuse inconsistent parts of a program that has no plans yet."""
    program.training.check()
    if program.training.precision not in [p.value for p in Precision]:
        raise MalformedError(f"precision: {shown(program.training.precision)} is unknown")
    if program.settings.clip != program.training.waits_for_norm:
        raise MalformedError(
            "settings.clip: it does not say whether there is a clip_norm or on_nan"
        )
    if program.settings.fused != (not isinstance(program.compiler, Eager)):
        raise MalformedError("settings.fused: it does not say whether the compiler fuses")
    what = program.computation
    if what is not None and len(what.places) != len(what.operations):
        raise MalformedError("computation.places: there is not one for each operation")
    for prefix, step in zip(_PREFIXES, program.steps, strict=True):
        with within(f"{prefix}code"):
            check_code(step.code)
    for prefix, step in zip(_PREFIXES, program.steps, strict=True):
        with within(f"{prefix}facts"):
            _facts(step.facts, step.code, program)
    with within("names"):
        _names(program)


def check_placed(program: Compiled, training: Dag, evaluation: Dag) -> None:
    """Refuse code that was not made for the strategy. The DAGs are those of the strategy applied to
    the facts of each mode."""
    dags = (training, evaluation)
    for prefix, dag, step in zip(_PREFIXES, dags, program.steps, strict=True):
        with within(f"{prefix}code"):
            run = {(node.compute.chunk, node.parts) for node in dag.nodes}
            _placed(dag, step.facts, step.code, run)
            parts = dag.microbatches[1] if dag.microbatches else 1
            with within("example"):
                _example(program, step.code, parts, run)


# the facts of the model


def _facts(facts: Facts, code: Executables, program: Compiled) -> None:
    if facts.models.keys() != code.programs.keys():
        raise MalformedError("models: they are for groups of other sizes than the code is")
    first = next(iter(facts.models))
    for place, n, model in (
        ("whole", first, facts.whole),
        *((f"models for groups of {n}", n, model) for n, model in facts.models.items()),
    ):
        with within(place):
            _model(model, code, n, program)
    if any(_policies(model) != _policies(facts.whole) for model in facts.models.values()):
        raise MalformedError("models: they differ in what is recomputed")


def _policies(model: Model) -> tuple[object, ...]:
    return (model.remat, [chunk.tags for chunk in model.chunks])


def _model(model: Model, code: Executables, n: int, program: Compiled) -> None:
    """The facts match the code at the shapes of groups of ``n`` devices."""
    if (model.loss, model.count) != (code.loss, code.count):
        raise MalformedError("its loss is not the loss of the code")
    if model.outputs != tuple(code.outputs.values()):
        raise MalformedError("its outputs are not those of the code")
    if model.batch != program.example.size:
        raise MalformedError(f"batch is {model.batch}, the example's {program.example.size}")
    specs = code.values[n]
    if [(v.shape, v.nbytes, v.copied) for v in model.values] != [
        (spec.shape, spec.nbytes, spec.copied) for spec in specs
    ]:
        raise MalformedError("values: they are not those of the code")
    if len(model.chunks) != len(code.pieces):
        raise MalformedError(f"{len(model.chunks)} chunks, but {len(code.pieces)} pieces")
    if model.parameters != _parameters(code, n, program):
        raise MalformedError("parameters: they are not those of the code")
    if model.buffers != _buffers(code, n):
        raise MalformedError("buffers: they are not those of the code")
    policies = set(program.strategy.policies(model.remat))
    if any(set(chunk.variants) != policies for chunk in model.chunks):
        raise MalformedError("a variant for each policy of recomputing is wanted")
    rows = zip(model.chunks, code.pieces, code.programs[n], strict=True)
    for place, (chunk, piece, made) in enumerate(rows):
        with within(f"chunks[{place}]"):
            if chunk.index != place:
                raise MalformedError(f"the chunk says that it is number {chunk.index}")
            _chunk(chunk, piece, made)
    _gradients(model)


def _parameters(code: Executables, n: int, program: Compiled) -> dict[str, ParameterFacts]:
    trained = {
        piece.parameters[ref.index]
        for piece, made in zip(code.pieces, code.programs[n], strict=True)
        for ref in made.specs
        if ref.kind is Kind.PARAMETER_GRAD
    }
    master = program.training.master
    return {
        name: ParameterFacts(
            spec.shape, spec.nbytes, name in trained, spec.dtype, master or spec.dtype
        )
        for name, spec in code.parameters.items()
    }


def _buffers(code: Executables, n: int) -> dict[str, int]:
    return {
        name: made.specs[Ref(Kind.BUFFER, i)].nbytes
        for piece, made in zip(code.pieces, code.programs[n], strict=True)
        for i, name in enumerate(piece.buffers)
    }


def _chunk(chunk: ChunkFacts, piece: ChunkSignature, made: ChunkProgram) -> None:
    ends = (chunk.inputs, chunk.outputs, chunk.parameters, chunk.buffers, chunk.changes)
    if ends != (piece.inputs, piece.outputs, piece.parameters, piece.buffers, piece.updates):
        raise MalformedError("its ends are not those of the piece of code")
    if chunk.sorted_rows is not None:
        in_range([chunk.sorted_rows.counts], len(chunk.inputs), "input")
        _sizes((chunk.sorted_rows.experts, chunk.sorted_rows.rows))
    if chunk.random != made.functions[Pass.F].random:
        raise MalformedError("random: the code says otherwise")
    grads = [Ref(Kind.PARAMETER_GRAD, i) in made.specs for i in range(len(piece.parameters))]
    if chunk.detached != tuple(
        name for name, there in zip(piece.parameters, grads, strict=True) if not there
    ):
        raise MalformedError("detached: the code makes gradients of others")
    if not chunk.gradients.keys() <= _of(made.specs, (Kind.INPUT_GRAD,)):
        raise MalformedError("gradients: they are not those of the code")
    _sizes(n for g in chunk.gradients.values() for n in (g.nbytes, g.copied or 0))
    for policy, variant in chunk.variants.items():
        with within(policy.value):
            _variant(variant, piece, made)


def _variant(variant: Variant, piece: ChunkSignature, made: ChunkProgram) -> None:
    """Under every recomputation policy, passes read and make the same gradients as the code."""
    if variant.passes.keys() != made.functions.keys():
        raise MalformedError("it has other passes than the code")
    ends = {
        Kind.INPUT: len(piece.inputs),
        Kind.INPUT_GRAD: len(piece.inputs),
        Kind.OUTPUT: len(piece.outputs),
        Kind.OUTPUT_GRAD: len(piece.outputs),
    }
    for which, facts in variant.passes.items():
        with within(which.value):
            reads, writes, *_ = ends_of(made, which)
            for own, wanted, kinds in (
                (facts.reads, reads, _READ),
                (facts.writes, writes, _WRITTEN),
            ):
                for ref in own:
                    if ref.kind not in kinds or (ref.term and ref.kind is not Kind.INPUT_GRAD):
                        raise MalformedError(f"a pass has no {ref} there")
                    in_range([ref.index], ends.get(ref.kind, 1), ref.kind.value)
                if _of(own, _GRADIENTS) != _of(wanted, _GRADIENTS):
                    raise MalformedError("its gradients are not those of the code")
            sizes = (facts.flops, facts.workspace, facts.moved, facts.moved_fused)
            _sizes((*sizes, facts.eased, facts.housed))
    _sizes((variant.saved_bytes, variant.saved_for_bw_bytes, variant.bi_saved_bytes))


def _of(refs: Iterable[Ref], kinds: Collection[Kind]) -> set[Ref]:
    return {ref for ref in refs if ref.kind in kinds}


def _gradients(model: Model) -> None:
    """Every gradient that a backward reads is made by the backward of a later chunk."""
    made: set[int] = {model.loss}
    for chunk in reversed(model.chunks):
        passes = chunk.variants[model.remat].passes.values()
        for ref in (ref for facts in passes for ref in facts.reads if ref.kind in _GRADIENTS):
            if chunk.outputs[ref.index] not in made:
                raise MalformedError(f"chunks[{chunk.index}]: no pass makes its {ref}")
        for ref in (ref for facts in passes for ref in facts.writes):
            if ref.kind is Kind.INPUT_GRAD:
                made.add(chunk.inputs[ref.index])


def _sizes(numbers: Iterable[int]) -> None:
    for number in numbers:
        if number < 0:
            raise MalformedError(f"{number} is not a valid size")


# the strategy


def _placed(dag: Dag, facts: Facts, code: Executables, run: Collection[tuple[int, int]]) -> None:
    """The code of every chunk matches its recomputation policy and sharding, and exists for all its
    group sizes. ``run`` holds the chunks with their group sizes: at a size that runs only experts,
    the other chunks have code of another size."""
    for node in dag.nodes:
        if node.devices and node.parts not in code.programs:
            raise MalformedError(f"there is none for groups of {node.parts} devices")
    for n, row in code.programs.items():
        for place, (piece, made) in enumerate(zip(code.pieces, row, strict=True)):
            with within(f"programs of {piece.name}"):
                for model in (facts.whole, facts.models[n]):
                    _recomputed(model.chunks[place].variants[dag.policy(place)], made)
                rule = dag.shards.get(place)
                if (place, n) in run:
                    _values(made, piece, code.values[n], rule, facts.models[n].chunks[place])
                for i, name in enumerate(piece.parameters):
                    shape = list(code.parameters[name].shape)
                    if (rule := dag.shard(place, name)) is not None:
                        shape[rule.dim] //= rule.ways
                    spec = made.specs.get(Ref(Kind.PARAMETER, i))
                    if spec is None or list(spec.shape) != shape:
                        raise MalformedError(f"it does not take {name} as {shape}")


def _values(
    made: ChunkProgram,
    piece: ChunkSignature,
    values: Sequence[TensorSpec],
    rule: ShardRule | None,
    chunk: ChunkFacts,
) -> None:
    """The inputs and outputs of a piece match the values between pieces. Those of sharded experts
    have as many elements in another shape, or the shape of the room for sorted rows."""
    by_expert = chunk.sorted_rows if rule is not None and rule.ways > 1 else None
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


def _recomputed(variant: Variant, made: ChunkProgram) -> None:
    for which, facts in variant.passes.items():
        own = (facts.reads, facts.writes, facts.uses_parameters, facts.last)
        if own != ends_of(made, which):
            raise MalformedError(f"the pass {which.value} is not what the strategy recomputes")


# the rest


def _names(program: Compiled) -> None:
    names = program.names
    if names.keys.keys() != names.shapes.keys():
        raise MalformedError("keys and shapes are of different tensors")
    known(sorted(program.parameters), set(names.keys.values()), "key for")
    for key, name in names.keys.items():
        spec = program.parameters.get(name)
        if spec is not None and spec.shape != names.shapes[key]:
            raise MalformedError(
                f"{shown(key)} has the shape {list(names.shapes[key])}, not {spec}"
            )


def _example(
    program: Compiled, code: Executables, microbatches: int, run: Collection[tuple[int, int]]
) -> None:
    tensors = program.example.tensors
    batch = range(len(tensors))
    fed = {n for chunk, n in run if not set(batch).isdisjoint(code.pieces[chunk].inputs)}
    computed = Precision(program.training.precision).dtype
    made = {value for piece in code.pieces for value in piece.outputs}
    totals = 0 if code.totals is None else len(code.totals.means)
    for n, specs in code.values.items():
        given = [value for value in range(len(specs)) if value not in made]
        if given != list(range(len(tensors) + totals)):
            raise MalformedError(f"{len(tensors)} tensors, but the code takes {len(given)}")
        if n not in fed:
            continue
        parts = microbatches * n
        for place, (x, spec) in enumerate(zip(tensors, specs, strict=False)):
            whole = tuple(x.shape)
            cut = parts if program.example.has_rows(x) else 1
            rows = (spec.shape[0] * cut, *spec.shape[1:]) if whole else ()
            kinds = {x.dtype, computed if computed and x.is_floating_point() else x.dtype}
            if whole != rows or spec.dtype not in kinds:
                raise MalformedError(f"its tensor {place} is not what the code takes")
