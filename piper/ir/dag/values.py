"""The values of a step: the reads and writes of its nodes.

Every microbatch has the same values. So one table lists the model's values, and a value's number is
its index in the table plus the table's length times the microbatch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from operator import itemgetter

from msgspec import Struct

from piper.ir.collectives import Placement
from piper.ir.dag.facts import ChunkFacts, Model
from piper.ir.passes import Kind, Pass, Ref, RematPolicy


class Role(Enum):
    """The role of a value of the model."""

    BATCH = "batch"
    """A tensor of the batch: present when the step starts, on every device that reads it."""
    SEED = "seed"
    """The gradient of the loss, a constant."""
    ACTIVATION = "activation"
    SAVED = "saved"
    SAVED_FOR_BW = "saved_bw"
    """Saved by the forward for the weight backward."""
    BI_SAVED = "bi_saved"
    GRADIENT = "gradient"
    """The gradient of an activation from one chunk that reads it, or one term of that."""
    PARAMETER_GRADIENT = "parameter gradient"
    """The gradients of a chunk's parameters."""
    TIED_GRADIENT = "tied gradient"
    """The gradients of a chunk's tied parameters, which other chunks use too."""

    __hash__ = object.__hash__  # Enum's own is slow, and these are looked up millions of times


class Content(Enum):
    """What a value that lowering added contains, or what a communication moves, in any layout."""

    VALUE = "value"
    """A value of the model, or a partial sum of its gradient."""
    GRADIENTS = "gradients"
    """The summed gradients of a bucket."""
    PARAMETERS = "parameters"
    """The whole parameters of a bucket."""
    SQUARES = "squares"
    """The squared norm of a bucket's gradients, available once the bucket is updated."""
    LOSS = "loss"
    """The sum of the losses of the whole batch, and its divisor."""
    NORM = "norm"
    """The squared norm of all gradients."""
    OUTPUT = "output"
    """The whole-batch mean of a scalar value that is reported beside the loss."""
    LOAD = "load"
    """The number of rows of each expert of a chunk in the whole batch."""

    __hash__ = object.__hash__  # Enum's own is slow, and these are looked up millions of times

    @property
    def of_step(self) -> bool:
        """Whether a step has one such scalar, which it reports."""
        return self in (Content.LOSS, Content.NORM, Content.OUTPUT, Content.LOAD)


class Extra(Struct, frozen=True, gc=False):
    """A value that lowering added."""

    content: Content
    of: int
    """The value that this is a form of, the bucket, the output or the chunk of experts."""
    layout: Placement | None = None
    """Its layout along the group of the collective that makes or reads it. None for a form in the
    layout of its value: received, or added up."""
    parts: int = 1
    """For a form of an activation: the number of devices that shard its rows."""
    rows: int | None = None
    """For experts' rows that arrive by count: the capacity in rows."""
    summed: bool = False
    """For a form of a gradient: whether it is a sum of several terms."""


GIVEN = (Role.BATCH, Role.SEED)
MOVED = (Role.ACTIVATION, Role.GRADIENT)
"""Roles of the values that go from chunk to chunk."""
PARAMETER_GRADIENTS = (Role.PARAMETER_GRADIENT, Role.TIED_GRADIENT)
_BUNDLES = {
    Kind.SAVED: Role.SAVED,
    Kind.SAVED_FOR_BW: Role.SAVED_FOR_BW,
    Kind.BI_SAVED: Role.BI_SAVED,
    Kind.PARAMETER_GRAD: Role.PARAMETER_GRADIENT,
}


class Value(Struct, frozen=True, gc=False):
    """A value of one microbatch. ``of`` is the number of the model's value for BATCH, SEED,
    ACTIVATION and GRADIENT, and of the chunk for the others. ``by`` is the chunk that makes it, or
    -1 for BATCH and SEED. ``term`` distinguishes several terms of a GRADIENT from one chunk."""

    role: Role
    of: int
    by: int
    term: int = 0


_Picked = Callable[[list[int]], tuple[int, ...]]


class ValueTable:
    """All values that the passes of a model may read or write, and the reads and writes of each."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.values: list[Value] = []
        self._numbers: dict[Value, int] = {}
        self._makers = {v: chunk.index for chunk in model.chunks for v in chunk.outputs}
        self.terms = _terms(model)
        """The terms of each value's gradient, in the order of addition: the order of one unsplit
        backward."""
        self.ties = tied_chunks(model)
        """For each chunk with tied parameters, a number that it shares with the other users of
        these parameters."""
        self.parameters = [parameters_of(model, chunk, self.ties) for chunk in model.chunks]
        """The trained parameters of each chunk: its own, and its tied ones."""
        self._wired: dict[tuple[int, Pass, RematPolicy], tuple[_Picked, _Picked]] = {}
        for chunk in model.chunks:
            for policy, variant in chunk.variants.items():
                for which in variant.passes:
                    self._wired[chunk.index, which, policy] = self._wire(chunk, which, policy)
        self.size = len(self.values)
        self.roles = [value.role for value in self.values]
        self._numbered: dict[int, list[int]] = {}

    def number(self, value: Value, microbatch: int) -> int:
        """The number of a value for one microbatch."""
        return microbatch * self.size + self._numbers[value]

    def numbers(self, microbatch: int) -> list[int]:
        """The numbers of all values for one microbatch: the same objects each time, because a step
        has millions."""
        if microbatch not in self._numbered:
            first = microbatch * self.size
            self._numbered[microbatch] = [*range(first, first + self.size)]
        return self._numbered[microbatch]

    def value(self, number: int) -> tuple[Value, int]:
        """The value with that number, and its microbatch."""
        microbatch, index = divmod(number, self.size)
        return self.values[index], microbatch

    def wire(
        self, chunk: int, which: Pass, policy: RematPolicy, microbatch: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The numbers of the values that a pass reads and writes."""
        numbers = self.numbers(microbatch)
        reads, writes = self._wired[chunk, which, policy]
        return reads(numbers), writes(numbers)

    def _wire(self, chunk: ChunkFacts, which: Pass, policy: RematPolicy) -> tuple[_Picked, _Picked]:
        facts = chunk.variants[policy].passes[which]
        reads = [self._number(v) for ref in facts.reads for v in self._read(chunk, ref)]
        writes = [self._number(v) for ref in facts.writes for v in self._written(chunk, ref)]
        return picked(tuple(dict.fromkeys(reads))), picked(tuple(dict.fromkeys(writes)))

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
                own, tied = self.parameters[chunk.index]
                if own:
                    yield Value(Role.PARAMETER_GRADIENT, chunk.index, chunk.index)
                if tied:
                    yield Value(Role.TIED_GRADIENT, chunk.index, chunk.index)
            case _:
                yield Value(_BUNDLES[ref.kind], chunk.index, chunk.index)

    def _activation(self, value: int) -> Value:
        maker = self._makers.get(value, -1)
        return Value(Role.BATCH if maker < 0 else Role.ACTIVATION, value, maker)


def picked(places: tuple[int, ...]) -> _Picked:
    """A function that takes the items at these places of a list."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda items: tuple([items[place] for place in places])


def tied_chunks(model: Model) -> dict[int, int]:
    """The chunks whose tied parameters all have the same set of users, each with the number of that
    set. Other tied gradients are summed by the reduction."""
    users: defaultdict[str, set[int]] = defaultdict(set)
    for chunk in model.chunks:
        for name in chunk.parameters:
            if model.parameters[name].trained and name not in chunk.detached:
                users[name].add(chunk.index)
    tied = {name: frozenset(chunks) for name, chunks in users.items() if len(chunks) > 1}
    numbers = {chunks: i for i, chunks in enumerate(dict.fromkeys(tied.values()))}
    ties: dict[int, int] = {}
    for chunks, number in numbers.items():
        sets = {
            tied[name]
            for i in chunks
            for name in model.chunks[i].parameters
            if name in tied and name not in model.chunks[i].detached
        }
        if sets == {chunks}:
            ties |= dict.fromkeys(chunks, number)
    return ties


def parameters_of(
    model: Model, chunk: ChunkFacts, ties: Mapping[int, int]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The trained parameters of a chunk: its own, and its tied ones."""
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
    terms: defaultdict[int, list[Value]] = defaultdict(list)
    for chunk in reversed(model.chunks):
        backward = chunk.variants[model.remat].passes.get(Pass.B)
        for ref in backward.writes if backward else ():
            if ref.kind is Kind.INPUT_GRAD:
                terms[chunk.inputs[ref.index]].append(_term(chunk, ref))
    return dict(terms)


def _term(chunk: ChunkFacts, ref: Ref) -> Value:
    return Value(Role.GRADIENT, chunk.inputs[ref.index], chunk.index, ref.term)
