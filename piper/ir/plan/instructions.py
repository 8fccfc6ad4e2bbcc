"""The instructions of a plan, and the slots that they read and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from msgspec import Struct

from piper.ir.dag.values import Content
from piper.ir.ops import Group, Op


class Verb(Enum):
    COMPUTE = "compute"
    SEND = "send"
    RECV = "recv"
    COLLECTIVE = "collective"
    UPDATE = "update"
    ADD = "add"
    SELECT = "select"
    COPY = "copy"

    __hash__ = object.__hash__  # Enum's own is slow


COMMUNICATING = frozenset((Verb.SEND, Verb.RECV, Verb.COLLECTIVE))


BESIDE = COMMUNICATING | {Verb.COPY}
"""Verbs that run concurrently with later computations, until an instruction waits for them."""


class MemoryKind(Enum):
    """What memory is used for."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    BUFFERS = "buffers"
    """Buffers of the model, and constants of its code."""
    GRADIENTS = "gradients"
    """Gradients of parameters, whole or reduced."""
    SAVED = "saved activations"
    """Saved by a forward for its backward, and by BI for BW."""
    ACTIVATIONS = "activations"
    """Values between chunks, and their gradients."""
    BATCH = "batch"
    COMMUNICATION = "communication"
    """Received, dispatched, combined or gathered values."""
    WORKSPACE = "workspace"
    """Temporary memory of one instruction."""

    __hash__ = object.__hash__  # Enum's own is slow


def plain_stream(name: str) -> str:
    """A stream's name in directives: a plan has separate streams to send and to receive."""
    return name.removesuffix("/send").removesuffix("/recv")


class RowShards(NamedTuple):
    """The devices that shard the rows of a microbatch; ``copies`` adjacent ones have the same."""

    devices: Group = ()
    copies: int = 1

    @property
    def parts(self) -> int:
        return len(self.devices) // self.copies

    def part(self, device: int) -> int:
        """Which of the parts a device has."""
        return self.devices.index(device) // self.copies

    def sharing(self, device: int) -> Group:
        """The devices that together have all rows once, including ``device``."""
        return self.devices[self.devices.index(device) % self.copies :: self.copies]


NO_ROWS = RowShards()


class Given(NamedTuple):
    """A slot that holds a tensor of the batch when the step begins."""

    slot: int
    value: int
    """The number of the model's value."""
    microbatch: int
    rows: RowShards


class Returned(NamedTuple):
    """A slot that holds rows of an output when the step has ended; the caller owns it."""

    slot: int
    value: int
    """The number of the model's value."""
    microbatch: int
    rows: RowShards


class Seed(NamedTuple):
    """A slot that holds the gradient of one device's loss for one microbatch when the step
    begins: one divided by ``parts``."""

    slot: int
    value: int
    """The number of the loss among the model's values."""
    group: int
    """The number of devices that shard its rows."""
    parts: int


@dataclass(frozen=True, slots=True)
class Slot:
    """The content of a slot, and its memory."""

    holder: MemoryKind
    """The kind that its memory counts as."""
    nbytes: int
    """Bytes of its content."""
    own: int
    """Bytes allocated and freed with the slot: fewer than ``nbytes`` if part of the content is in
    other slots, more if there are gaps."""
    bucket: int | None = None
    """The bucket whose parameters, or whose gradients in the bucket's layout, it holds."""
    names: tuple[str, ...] = ()
    """The parameters whose gradients it holds; the rest of a bucket's layout is zero."""
    dtypes: tuple[torch.dtype, ...] = ()
    """The dtype that each of these gradients is cast to and summed in."""
    lies_in: tuple[int, ...] = ()
    """Bucket slots into which its gradients are written and accumulated, by parameter name."""


class Instruction(Struct, frozen=True, gc=False):
    """One instruction of a device. A slot in both ``reads`` and ``writes`` is changed in place. A
    slot in ``allocates`` or ``adds`` exists before it is written; any other written slot is new."""

    verb: Verb
    node: int
    name: str
    stream: str
    op: Op
    """The operation and its devices."""
    content: Content | None = None
    """What a communication moves."""
    of: int = 0
    """The model's value, the bucket or the chunk of a communication, an update or a copy."""
    rows: RowShards = NO_ROWS
    """The devices that shard the rows of a computation."""
    reads: tuple[int, ...] = ()
    """A pass reads the arguments of its program, in this order; then gathered parameters, and
    gradients to which it adds its own, by parameter name."""
    writes: tuple[int, ...] = ()
    adds: tuple[int, ...] = ()
    """The slots of ``writes`` to whose content the result is added."""
    allocates: tuple[int, ...] = ()
    """Slots allocated before it runs: it writes gradients into them, and later ones are added."""
    frees: tuple[int, ...] = ()
    """Slots without later users; freed once this and all earlier users finish."""
    waits: tuple[int, ...] = ()
    """Program counters of instructions that must finish first. On other streams: any, since order
    within a stream is implied. On its own stream: communications that bring its inputs, or that
    hold memory which must be freed first."""
    ends: tuple[int, ...] = ()
    """The communications and copies of ``waits`` that no earlier instruction has waited for: this
    one completes them. The end of the step completes those that no instruction waits for."""
    buckets: tuple[int, ...] = ()
    """The buckets that the optimizer updates, or whose gradient norm is taken."""
    axes: tuple[tuple[str, int, int], ...] = ()
    """Of the axes on which a computation depends: name, stride, ways. A device's rank along an axis
    is its place in ``rows``, divided by the stride, modulo the ways."""
    weights: tuple[float, ...] = ()
    """The weight of each loss, or other scalar, in the sum. The reads after the losses are
    counts."""
    workspace: int = 0
    """Bytes that it needs while it runs, besides its slots."""
    beside: int = 0
    """Bytes that a communication holds until it ends, besides its slots."""
    at_end: int = 0
    """Bytes that a communication needs in addition when it ends."""
    holds: tuple[int, ...] = ()
    """Slots whose memory a communication holds until it ends, also if they are freed before."""
    early: int | None = None
    """The computation before which a receive of a small message may be issued already, by a
    transport that receives messages in any order. The others follow the plan's order."""

    @property
    def reported(self) -> bool:
        """Whether it is an all-reduce of a scalar that the step reports."""
        return self.content is not None and self.content.of_step

    def issued_at(self, pc: int) -> tuple[int, bool]:
        """Sorts instructions, given their program counters, in the order in which a transport that
        receives in any order issues them."""
        return (pc, True) if self.early is None else (self.early, False)


class PlanParts(NamedTuple):
    """The fields of a ``Plan``."""

    devices: Group
    instructions: Sequence[Instruction]
    given: tuple[Given, ...]
    seeds: tuple[Seed, ...]
    slots: tuple[Slot, ...]
    returned: tuple[Returned, ...]
