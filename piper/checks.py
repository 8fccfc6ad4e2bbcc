"""Whether the parts of a program that was read from files fit each other.

Each part is well formed by itself when it gets here. Numbers that stand for something else (slots,
devices, chunks, values, buckets) must be those of something, and plans must pass what the compiler
asks of its own. A ``MalformedError`` says what does not fit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from piper.capture.model import Precision
from piper.capture.program import Kind, Pass, Ref
from piper.capture.program import Program as ChunkProgram
from piper.capture.saving import Remat
from piper.codec import MalformedError, shown, within
from piper.ir.dag import Bucket, Collective, Compute, Transfer, Update
from piper.ir.facts import Model, bundled
from piper.ir.values import ExtraRole
from piper.lower.plan import Instruction, Plan, Verb
from piper.lower.verify import slots_fault
from piper.program import Code, Piece, Program

_OPS = {
    Verb.COMPUTE: Compute,
    Verb.SEND: Transfer,
    Verb.RECV: Transfer,
    Verb.COLLECTIVE: Collective,
    Verb.UPDATE: Update,
    Verb.FREE: type(None),
}
_OF_BUCKETS = (
    ExtraRole.REDUCED, ExtraRole.SUMMED, ExtraRole.UPDATED, ExtraRole.GATHERED
)  # fmt: skip


def check(program: Program) -> None:
    """Refuse a program whose parts do not fit."""
    program.training.check()
    if program.training.precision not in [p.value for p in Precision]:
        raise MalformedError(f"precision: {shown(program.training.precision)} is unknown")
    for n, model in program.models.items():
        with within(f"models for groups of {n}"):
            _model(model)
    _same_models(program)
    for name, code in (("code", program.code), ("evaluation_code", program.evaluation_code)):
        with within(name):
            _code(code, program)
    with within("buckets"):
        for place, bucket in enumerate(program.buckets):
            with within(place):
                _bucket(bucket, program)
        _held(program)
    with within("plans"):
        _plans(program.plans, program.code, program)
    with within("evaluation_plans"):
        _plans(program.evaluation_plans, program.evaluation_code, program)
        if sorted(d for plan in program.evaluation_plans for d in plan.devices) != list(
            program.devices
        ):
            raise MalformedError("they are for other devices than those that train")
    with within("memory"):
        _memory(program)
    with within("names"):
        if program.names.keys.keys() != program.names.shapes.keys():
            raise MalformedError("keys and shapes are of different tensors")
    with within("example"):
        _example(program)


def _in_range(numbers: Sequence[int], count: int, what: str) -> None:
    for number in numbers:
        if not 0 <= number < count:
            raise MalformedError(f"there is no {what} {number}")


def _distinct(items: Sequence[object], what: str) -> None:
    twice = [item for item, n in Counter(items).items() if n > 1]
    if twice:
        raise MalformedError(f"the {what} {shown(twice[0])} is there twice")


# the facts of the model


def _model(model: Model) -> None:
    values = len(model.values)
    for place, chunk in enumerate(model.chunks):
        with within(f"chunks[{place}]"):
            if chunk.index != place:
                raise MalformedError(f"the chunk says that it is number {chunk.index}")
            _in_range((*chunk.inputs, *chunk.outputs), values, "value")
            _known(chunk.parameters, model.parameters, "parameter")
            _known(chunk.detached, chunk.parameters, "parameter of the chunk")
            if set(chunk.variants) != set(Remat):
                raise MalformedError("a variant for each policy of recomputing is wanted")
            ends = {
                Kind.INPUT: len(chunk.inputs),
                Kind.INPUT_GRAD: len(chunk.inputs),
                Kind.OUTPUT: len(chunk.outputs),
                Kind.OUTPUT_GRAD: len(chunk.outputs),
            }
            for variant in chunk.variants.values():
                if Pass.F not in variant.passes:
                    raise MalformedError("the pass F is missing")
                for facts in variant.passes.values():
                    for ref in (*facts.reads, *facts.writes, *facts.last):
                        _in_range([ref.index], ends.get(ref.kind, 1), ref.kind.value)
                    sizes = (facts.flops, facts.workspace, facts.eased, facts.moved)
                    _sizes((*sizes, facts.moved_fused))
                _sizes((variant.saved_bytes, variant.kept_bytes, variant.handoff_bytes))
    outputs = [value for chunk in model.chunks for value in chunk.outputs]
    _distinct(outputs, "output")
    _sizes([n for value in model.values for n in (*value.shape, value.nbytes)])
    _sizes([n for p in model.parameters.values() for n in (*p.shape, p.nbytes)])
    _sizes(list(model.buffers.values()))
    _in_range([model.loss], values, "value")
    if model.count is not None:
        _in_range([model.count], values, "value")
    if model.loss not in outputs:
        raise MalformedError("no chunk makes the loss")
    if model.batch < 1:
        raise MalformedError(f"batch is {model.batch}")


def _sizes(numbers: Sequence[int]) -> None:
    for number in numbers:
        if number < 0:
            raise MalformedError(f"{number} is not a valid size")


def _known(names: Sequence[str], known: object, what: str) -> None:
    for name in names:
        if name not in known:  # type: ignore[operator]
            raise MalformedError(f"there is no {what} {shown(name)}")


def _same_models(program: Program) -> None:
    """All models are one at other shapes; the code is of the same chunks."""
    sizes = program.models.keys()
    if not sizes or 0 in sizes:
        raise MalformedError("models: at least one is wanted, for groups of one device or more")
    for name, code in (("code", program.code), ("evaluation_code", program.evaluation_code)):
        if not code.programs.keys() == code.values.keys() == sizes:
            raise MalformedError(f"{name}: it is for groups of other sizes than the models are")
    first = next(iter(program.models.values()))
    shape = [(c.inputs, c.outputs, c.parameters, c.buffers, c.changes) for c in first.chunks]
    for n, model in program.models.items():
        other = [(c.inputs, c.outputs, c.parameters, c.buffers, c.changes) for c in model.chunks]
        if other != shape or len(model.values) != len(first.values):
            raise MalformedError(
                f"models: that for groups of {n} is of other chunks than the first"
            )
    pieces = [
        (p.inputs, p.outputs, p.parameters, p.buffers, p.updates) for p in program.code.pieces
    ]
    if pieces != shape:
        raise MalformedError("code: its pieces are not the chunks of the model")
    if (program.code.loss, program.code.count) != (first.loss, first.count):
        raise MalformedError("code: its loss is not the loss of the model")


# what chunks do


def _code(code: Code, program: Program) -> None:
    for n, specs in code.values.items():
        for place, piece in enumerate(code.pieces):
            with within(f"pieces[{place}]"):
                _in_range((*piece.inputs, *piece.outputs), len(specs), "value")
                _known(piece.parameters, code.parameters, "parameter")
                _known(piece.updates, piece.buffers, "buffer of the piece")
        _in_range([code.loss, *([] if code.count is None else [code.count])], len(specs), "value")
        if len(code.programs[n]) != len(code.pieces):
            raise MalformedError(f"{len(code.pieces)} pieces, but {len(code.programs[n])} programs")
    if not any(code.loss in piece.outputs for piece in code.pieces):
        raise MalformedError("no piece makes the loss")
    seen: set[tuple[int, int]] = set()
    for row in code.programs.values():
        for place, (piece, chunk) in enumerate(zip(code.pieces, row, strict=True)):
            if (place, id(chunk)) not in seen:
                seen.add((place, id(chunk)))
                with within(f"programs of {piece.name}"):
                    _refs(chunk, piece)


def _refs(chunk: ChunkProgram, piece: Piece) -> None:
    """What the passes of a program take and make is what its piece has."""
    ends = {
        Kind.PARAMETER: len(piece.parameters),
        Kind.PARAMETER_GRAD: len(piece.parameters),
        Kind.BUFFER: len(piece.buffers),
        Kind.UPDATE: len(piece.updates),
        Kind.INPUT: len(piece.inputs),
        Kind.INPUT_GRAD: len(piece.inputs),
        Kind.OUTPUT: len(piece.outputs),
        Kind.OUTPUT_GRAD: len(piece.outputs),
    }
    for ref in chunk.specs:
        if ref.kind in ends:
            _in_range([ref.index], ends[ref.kind], ref.kind.value)
    made = {
        Kind.SAVED: chunk.functions[Pass.F].results,
        Kind.KEPT: chunk.functions[Pass.F].results,
        Kind.HANDOFF: chunk.functions[Pass.BI].results if Pass.BI in chunk.functions else (),
    }
    for which, function in chunk.functions.items():
        for ref in function.arguments:
            if ref.kind in made and ref not in made[ref.kind]:
                raise MalformedError(f"the pass {which.value} reads {ref}, which no pass makes")
    for kind, refs in made.items():
        own = [ref for ref in refs if ref.kind is kind]
        if own != [Ref(kind, i) for i in range(len(own))]:
            raise MalformedError(f"its {kind.value} tensors are not numbered in order")


# state


def _bucket(bucket: Bucket, program: Program) -> None:
    _known(bucket.parameters, program.parameters, "parameter")
    members = [device for group in bucket.groups for device in group]
    _distinct(members, "device")
    _known_devices(members, program)
    sizes = {len(group) for group in bucket.groups}
    if len(sizes) != 1 or 0 in sizes or not bucket.parameters:
        raise MalformedError("a bucket has parameters, and groups of one size")
    if bucket.within < 1 or next(iter(sizes)) % bucket.within:
        raise MalformedError(f"groups of {next(iter(sizes))} are not divided by {bucket.within}")
    if not 0 <= bucket.rule.zero <= 3:
        raise MalformedError(f"zero={bucket.rule.zero} is none of 0, 1, 2, 3")
    if bucket.ways != len(bucket.groups):
        raise MalformedError(f"experts in {bucket.ways} shares, but {len(bucket.groups)} groups")
    specs = [program.parameters[name] for name in bucket.parameters]
    for name, spec in zip(bucket.parameters, specs, strict=True):
        if spec.dtype != bucket.dtype:
            raise MalformedError(f"{name} is {spec.dtype}, the bucket {bucket.dtype}")
        divided = bucket.ways == 1 or (
            0 <= bucket.dim < len(spec.shape) and spec.shape[bucket.dim] % bucket.ways == 0
        )
        if not divided:
            raise MalformedError(f"{name} cannot be divided over {bucket.ways} devices")
    if bucket.elements * bucket.ways != sum(math.prod(spec.shape) for spec in specs):
        raise MalformedError(f"{bucket.elements} elements are not those of its parameters")
    wanted = program.training.master or bucket.dtype
    if bucket.gradient != wanted:
        raise MalformedError(f"its gradients are {bucket.gradient}, not {wanted}")


def _held(program: Program) -> None:
    """Every parameter is in one bucket."""
    names = [name for bucket in program.buckets for name in bucket.parameters]
    _distinct(names, "parameter")
    _known(list(program.parameters), set(names), "bucket for")


# plans


def _known_devices(devices: Sequence[int], program: Program) -> None:
    known = set(program.devices)
    for device in devices:
        if device not in known:
            raise MalformedError(f"there is no device {device}")


def _plans(plans: Sequence[Plan], code: Code, program: Program) -> None:
    if not plans:
        raise MalformedError("there is none")
    _distinct([device for plan in plans for device in plan.devices], "device")
    there: Counter[tuple[Verb, int]] = Counter()
    ops: dict[int, Instruction] = {}
    for place, plan in enumerate(plans):
        with within(place):
            _plan(plan, code, program)
            for at, x in enumerate(plan.instructions):
                if isinstance(x.op, Transfer | Collective):
                    there[x.verb, x.node] += len(plan.devices)
                    other = ops.setdefault(x.node, x)
                    if (other.op, other.role, other.of) != (x.op, x.role, x.of):
                        raise MalformedError(f"instructions[{at}]: other devices do something else")
    for node, x in ops.items():
        match x.op:
            case Transfer(source=source, target=target):
                wanted = {(Verb.SEND, node): len(source), (Verb.RECV, node): len(target)}
            case Collective(groups=groups):
                wanted = {(Verb.COLLECTIVE, node): sum(map(len, groups))}
            case _:
                continue
        if any(there[key] != n for key, n in wanted.items()):
            raise MalformedError(
                f"{shown(x.name)}: some of its participants do not take part, or twice"
            )


def _plan(plan: Plan, code: Code, program: Program) -> None:
    slots = len(plan.slot_bytes)
    with within("devices"):
        if not plan.devices:
            raise MalformedError("there is none")
        _known_devices(plan.devices, program)
    for at, given in enumerate(plan.given):
        with within(f"given[{at}]"):
            _in_range([given.slot], slots, "slot")
            _shared(plan, given.group, code)
            _in_range([given.value], min(map(len, code.values.values())), "value")
            _in_range([given.microbatch], program.microbatches, "microbatch")
            _in_range([given.value], len(program.example.tensors), "tensor of the batch")
    _distinct([given.slot for given in plan.given], "slot")
    for at, x in enumerate(plan.instructions):
        try:
            _instruction(x, plan, code, program)
        except MalformedError as error:
            error.at.append(f".instructions[{at}]")
            raise
    if (fault := slots_fault(plan)) is not None:
        raise MalformedError(f"its devices {fault}")


def _shared(plan: Plan, group: Sequence[int], code: Code) -> None:
    """Every device of a plan is in a group for whose size there is code."""
    if len(group) not in code.programs or not set(plan.devices).issubset(group):
        raise MalformedError(f"its devices are not in the group {shown(list(group))}")


def _instruction(x: Instruction, plan: Plan, code: Code, program: Program) -> None:
    _in_range((*x.reads, *x.writes, *x.adds), len(plan.slot_bytes), "slot")
    _in_range(x.waits, len(plan.instructions), "instruction")
    if not isinstance(x.op, _OPS[x.verb]):
        raise MalformedError(f"the verb {x.verb.value} does not go with {shown(x.op)}")
    if not set(x.adds).issubset(x.writes):
        raise MalformedError("it adds to what it does not write")
    if len(set(x.writes)) != len(x.writes):
        raise MalformedError("it writes a slot twice")
    if x.role in _OF_BUCKETS:
        _in_range([x.of], len(program.buckets), "bucket")
    mine = set(plan.devices)
    match x.op:
        case None:
            if len(x.reads) != 1 or x.writes:
                raise MalformedError("a free is of one slot")
        case Compute(chunk=chunk, which=which, microbatch=microbatch):
            _in_range([chunk], len(code.pieces), "chunk")
            _in_range([microbatch], program.microbatches, "microbatch")
            _shared(plan, x.group, code)
            if which not in (functions := code.programs[len(x.group)][chunk].functions):
                raise MalformedError(f"chunk {chunk} has no pass {which.value}")
            outputs, loss = code.pieces[chunk].outputs, code.loss
            refs = [
                ref
                for ref in bundled(functions[which].arguments)
                if not (ref.kind is Kind.OUTPUT_GRAD and outputs[ref.index] == loss)
            ]
            if len(x.reads) < len(refs):
                raise MalformedError(f"it reads {len(x.reads)} slots, its pass {len(refs)}")
        case Transfer(source=source, target=target):
            members = source if x.verb is Verb.SEND else target
            _known_devices((*source, *target), program)
            if not mine.issubset(members):
                raise MalformedError("its devices do not take part in it")
            if len(source) % len(target) and len(target) % len(source):
                raise MalformedError(f"{len(source)} devices cannot send to {len(target)}")
            if len(x.reads if x.verb is Verb.SEND else x.writes) != 1:
                raise MalformedError("a message is of one slot")
        case Collective(groups=groups):
            members = tuple(device for group in groups for device in group)
            _distinct(members, "device")
            _known_devices(members, program)
            if not mine.issubset(members) or len({len(group) for group in groups}) != 1:
                raise MalformedError(
                    "its devices do not take part in it, or its groups differ in size"
                )
        case Update(bucket=bucket):
            _in_range([bucket], len(program.buckets), "bucket")
            if not all(
                mine.issubset(d for group in program.buckets[b].groups for d in group)
                for b in (bucket,)
            ):
                raise MalformedError(f"its devices hold nothing of bucket {bucket}")


# the rest


def _memory(program: Program) -> None:
    if len(program.memory) != len(program.plans):
        raise MalformedError(f"{len(program.plans)} plans, but {len(program.memory)} of these")
    for place, (plan, memory) in enumerate(zip(program.plans, program.memory, strict=True)):
        with within(place):
            if memory.devices != plan.devices:
                raise MalformedError("it is of other devices than the plan")
            if len(memory.over_time) != len(plan.instructions):
                raise MalformedError(
                    f"{len(memory.over_time)} moments, {len(plan.instructions)} wanted"
                )
            _in_range([memory.peak_at + 1], len(plan.instructions) + 1, "moment")
            _sizes((memory.parameters, memory.optimizer, memory.peak, *memory.over_time))
            _sizes(list(memory.at_peak.values()))


def _example(program: Program) -> None:
    tensors = program.example.tensors
    for code in (program.code, program.evaluation_code):
        for n, specs in code.values.items():
            if len(tensors) > len(specs):
                raise MalformedError(f"{len(tensors)} tensors, but {len(specs)} values")
            parts = program.microbatches * n
            for place, (x, spec) in enumerate(zip(tensors, specs, strict=False)):
                whole = tuple(x.shape)
                rows = (spec.shape[0] * parts, *spec.shape[1:]) if whole else ()
                if whole != rows or x.dtype != spec.dtype:
                    raise MalformedError(f"its tensor {place} is not what the code takes")
    program.example.size  # noqa: B018 - refuses sizes that disagree
