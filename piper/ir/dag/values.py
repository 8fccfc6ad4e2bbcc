"""The values of a step: what nodes make and read, numbered without being listed.

Every microbatch has the same values, so a value's number is its place in a table of the model's,
plus the length of that table times the microbatch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from piper.ir.dag.facts import ChunkFacts, Model
from piper.ir.passes import Kind, Pass, Ref, RematPolicy


class Role(Enum):
    """What a value is."""

    BATCH = "batch"
    """A tensor of the batch: there from the start, on every device that wants it."""
    SEED = "seed"
    """The gradient of the loss, a constant."""
    ACTIVATION = "activation"
    SAVED = "saved"
    SAVED_FOR_BW = "saved_bw"
    """What BW reads of what was saved."""
    BI_SAVED = "bi_saved"
    GRADIENT = "gradient"
    """What one chunk that reads an activation gives to its gradient, or one term of it."""
    PARAMETER_GRADIENT = "parameter gradient"
    """The gradients of a chunk's parameters."""
    TIED_GRADIENT = "tied gradient"
    """The gradients of those of a chunk's parameters that other chunks use too."""

    __hash__ = object.__hash__  # Enum's own is slow, and these are looked up millions of times


class ExtraRole(Enum):
    """What a value is that lowering added."""

    RECEIVED = "received"
    """A value as another group than its maker's has it."""
    DISPATCHED = "dispatched"
    """A value after the all-to-all dispatch to experts, each device with its own experts' part."""
    UNCOMBINED = "uncombined"
    """What experts made, before the all-to-all combine."""
    REDISTRIBUTED = "redistributed"
    """A value in another layout along an axis of its mesh, which has a number of its own; or such a
    value once more, for a backward that recomputes."""
    ADDED = "added"
    """The gradient of an activation, as far as it is added up; ``of`` is its first term."""
    REDUCED = "reduced"
    """The summed gradients of a bucket: whole, or a device's part of them."""
    SUMMED = "summed"
    """A device's part of the gradients of a bucket, summed over all copies of the bucket."""
    UPDATED = "updated"
    """The squared norm of a bucket's gradients, when the bucket has been updated."""
    GATHERED = "gathered"
    """The whole parameters of a bucket that is kept divided."""
    LOSS = "loss"
    """The sum of the losses of the whole batch, and what it is divided by."""
    NORM = "norm"
    """The squared norm of all gradients."""
    OUTPUT = "output"
    """The mean over the whole batch of a number, ``of``, that is reported beside the loss."""
    LOAD = "load"
    """How many rows each expert of a chunk, ``of``, has in the whole batch."""

    __hash__ = object.__hash__  # Enum's own is slow, and these are looked up millions of times


@dataclass(frozen=True, slots=True)
class Extra:
    """A value that lowering added: ``of`` is the value it is a form of, or the bucket."""

    role: ExtraRole
    of: int
    parts: int = 1
    """Of a form of an activation, over how many devices its rows are divided."""
    rows: int | None = None
    """Of what experts have of rows that come by count, for how many there is room."""


OF_STEP = (ExtraRole.LOSS, ExtraRole.NORM, ExtraRole.OUTPUT, ExtraRole.LOAD)
"""What is of the whole step, and of no value and no bucket."""
GIVEN = (Role.BATCH, Role.SEED)
_BUNDLES = {
    Kind.SAVED: Role.SAVED,
    Kind.SAVED_FOR_BW: Role.SAVED_FOR_BW,
    Kind.BI_SAVED: Role.BI_SAVED,
    Kind.PARAMETER_GRAD: Role.PARAMETER_GRADIENT,
}


@dataclass(frozen=True, slots=True)
class Value:
    """A value of one microbatch. ``of`` is the number of the model's value for BATCH, SEED,
    ACTIVATION and GRADIENT, and of the chunk for the others; ``by`` is the chunk that makes it,
    or -1 for what is given. ``term`` tells the terms of a GRADIENT by one chunk apart."""

    role: Role
    of: int
    by: int
    term: int = 0


class ValueTable:
    """All values that some pass of a model may read or make, and which pass does."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.values: list[Value] = []
        self._numbers: dict[Value, int] = {}
        self._makers = {v: chunk.index for chunk in model.chunks for v in chunk.outputs}
        self.terms = _terms(model)
        """For each of the model's values that has a gradient, the terms of it, in the order in
        which they are added: that of one undivided backward."""
        self.ties = tied_chunks(model)
        """For each chunk with tied parameters, a number that it shares with the chunks that use
        the same ones."""
        self._wired: dict[
            tuple[int, Pass, RematPolicy], tuple[tuple[int, ...], tuple[int, ...]]
        ] = {}
        for chunk in model.chunks:
            for policy, variant in chunk.variants.items():
                for which in variant.passes:
                    self._wired[chunk.index, which, policy] = self._wire(chunk, which, policy)
        self.size = len(self.values)

    def number(self, value: Value, microbatch: int) -> int:
        """The number of a value for one microbatch."""
        return microbatch * self.size + self._numbers[value]

    def value(self, number: int) -> tuple[Value, int]:
        """The value with that number, and its microbatch."""
        microbatch, place = divmod(number, self.size)
        return self.values[place], microbatch

    def wire(
        self, chunk: int, which: Pass, policy: RematPolicy, microbatch: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The numbers of what a pass reads and of what it makes."""
        first = microbatch * self.size
        reads, writes = self._wired[chunk, which, policy]
        return tuple(first + v for v in reads), tuple(first + v for v in writes)

    def _wire(
        self, chunk: ChunkFacts, which: Pass, policy: RematPolicy
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        facts = chunk.variants[policy].passes[which]
        reads = [self._number(v) for ref in facts.reads for v in self._read(chunk, ref)]
        writes = [self._number(v) for ref in facts.writes for v in self._written(chunk, ref)]
        return tuple(dict.fromkeys(reads)), tuple(dict.fromkeys(writes))

    def _number(self, value: Value) -> int:
        if value not in self._numbers:
            self._numbers[value] = len(self.values)
            self.values.append(value)
        return self._numbers[value]

    def _read(self, chunk: ChunkFacts, ref: Ref) -> Iterable[Value]:
        match ref.kind:
            case Kind.INPUT:
                yield self._activation(chunk.inputs[ref.index])
            case Kind.OUTPUT:
                yield self._activation(chunk.outputs[ref.index])
            case Kind.OUTPUT_GRAD if chunk.outputs[ref.index] == self._model.loss:
                yield Value(Role.SEED, self._model.loss, -1)
            case Kind.OUTPUT_GRAD:
                yield from self.terms[chunk.outputs[ref.index]]
            case _:
                yield Value(_BUNDLES[ref.kind], chunk.index, chunk.index)

    def _written(self, chunk: ChunkFacts, ref: Ref) -> Iterable[Value]:
        match ref.kind:
            case Kind.OUTPUT:
                yield self._activation(chunk.outputs[ref.index])
            case Kind.INPUT_GRAD:
                yield _term(chunk, ref)
            case Kind.PARAMETER_GRAD if chunk.index in self.ties:
                own, tied = parameters_of(self._model, chunk, self.ties)
                if own:
                    yield Value(Role.PARAMETER_GRADIENT, chunk.index, chunk.index)
                if tied:
                    yield Value(Role.TIED_GRADIENT, chunk.index, chunk.index)
            case _:
                yield Value(_BUNDLES[ref.kind], chunk.index, chunk.index)

    def _activation(self, value: int) -> Value:
        maker = self._makers.get(value, -1)
        return Value(Role.BATCH if maker < 0 else Role.ACTIVATION, value, maker)


def tied_chunks(model: Model) -> dict[int, int]:
    """The chunks whose tied parameters have all the same users, each with the number of its set of
    users; other ties are left to the reduction."""
    users: defaultdict[str, set[int]] = defaultdict(set)
    for chunk in model.chunks:
        for name in chunk.parameters:
            if model.parameters[name].trained and name not in chunk.detached:
                users[name].add(chunk.index)
    tied = {name: frozenset(chunks) for name, chunks in users.items() if len(chunks) > 1}
    numbers = {chunks: i for i, chunks in enumerate(dict.fromkeys(tied.values()))}
    found: dict[int, int] = {}
    for chunks, number in numbers.items():
        sets = {
            tied[name]
            for i in chunks
            for name in model.chunks[i].parameters
            if name in tied and name not in model.chunks[i].detached
        }
        if sets == {chunks}:
            found |= dict.fromkeys(chunks, number)
    return found


def parameters_of(
    model: Model, chunk: ChunkFacts, ties: Mapping[int, int]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The trained parameters of a chunk: its own, and those that are tied."""
    trained = [
        name
        for name in chunk.parameters
        if model.parameters[name].trained and name not in chunk.detached
    ]
    if chunk.index not in ties:
        return tuple(trained), ()
    others = {
        name
        for index, number in ties.items()
        if number == ties[chunk.index] and index != chunk.index
        for name in model.chunks[index].parameters
        if name not in model.chunks[index].detached
    }
    own = tuple(name for name in trained if name not in others)
    return own, tuple(name for name in trained if name in others)


def _terms(model: Model) -> dict[int, list[Value]]:
    found: defaultdict[int, list[Value]] = defaultdict(list)
    for chunk in reversed(model.chunks):
        backward = chunk.variants[model.remat].passes.get(Pass.B)
        for ref in backward.writes if backward else ():
            if ref.kind is Kind.INPUT_GRAD:
                found[chunk.inputs[ref.index]].append(_term(chunk, ref))
    return dict(found)


def _term(chunk: ChunkFacts, ref: Ref) -> Value:
    return Value(Role.GRADIENT, chunk.inputs[ref.index], chunk.index, ref.term)
