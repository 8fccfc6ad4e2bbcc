"""Instructions of a plan, and the slots that they read and write."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from piper.ir.dag.values import ExtraRole
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


COMMUNICATING = (Verb.SEND, Verb.RECV, Verb.COLLECTIVE)


BESIDE = (*COMMUNICATING, Verb.COPY)
"""What goes on beside the computations after it: whoever needs it done takes it to its end."""


class MemoryKind(Enum):
    """What memory is held by."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    BUFFERS = "buffers"
    """Buffers of the model, and constants of its code."""
    GRADIENTS = "gradients"
    """Of parameters, whole or reduced."""
    SAVED = "saved activations"
    """Kept from a forward for its backward, and from BI for BW."""
    ACTIVATIONS = "activations"
    """What flows between chunks, their gradients included."""
    BATCH = "batch"
    COMMUNICATION = "communication"
    """What was received, dispatched, combined or gathered."""
    WORKSPACE = "workspace"
    """What one instruction needs while it runs."""

    __hash__ = object.__hash__  # Enum's own is slow


def plain_stream(name: str) -> str:
    """A stream as directives call it: sending and receiving are two of a plan's."""
    return name.removesuffix("/send").removesuffix("/recv")


class Given(NamedTuple):
    """A slot that holds a tensor of the batch when the step begins."""

    slot: int
    value: int
    """Which of the model's values it is."""
    microbatch: int
    group: Group
    """The devices that share it, each a part of the rows."""


class Returned(NamedTuple):
    """A slot that holds rows of an output when the step has ended: it is the caller's."""

    slot: int
    value: int
    """Which of the model's values it is."""
    microbatch: int
    group: Group
    """The devices that share it, each a part of the rows."""


class Seed(NamedTuple):
    """A slot that holds the gradient of one device's loss of one microbatch when the step
    begins: one divided by ``parts``."""

    slot: int
    value: int
    """Which of the model's values the loss is."""
    group: int
    """Over how many devices its rows are divided."""
    parts: int


@dataclass(frozen=True, slots=True)
class Slot:
    """What a slot holds, and in whose memory."""

    holder: MemoryKind
    """What its memory counts as."""
    nbytes: int
    """Bytes of what it holds."""
    own: int
    """Bytes of memory that come and go with it: fewer than it holds if some lie in other slots,
    more if there are gaps."""
    bucket: int | None = None
    """The bucket whose gradients it holds in the bucket's layout, or whose parameters."""
    names: tuple[str, ...] = ()
    """The parameters whose gradients it holds; what else is in a bucket's layout is zero."""
    dtypes: tuple[torch.dtype, ...] = ()
    """What each of these gradients is cast to and summed in."""
    lies_in: tuple[int, ...] = ()
    """Slots of buckets that its gradients are put into and added up in, those of the same names."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One thing that a device does. A slot that is read and written is changed in place; one that
    is allocated or in ``adds`` is there when it is written, any other is new."""

    verb: Verb
    node: int
    name: str
    stream: str
    op: Op
    """What is done, with whom."""
    role: ExtraRole | None = None
    """What a communication makes, or, for UNCOMBINED, takes."""
    of: int = 0
    """The model's value, or the bucket, that a communication or a copy is about."""
    group: Group = ()
    """The devices among whom the rows of what is computed are divided."""
    reads: tuple[int, ...] = ()
    """A pass reads what its program takes, in this order; then gathered parameters, and gradients
    that it adds its own of the same names to."""
    writes: tuple[int, ...] = ()
    adds: tuple[int, ...] = ()
    """Those of ``writes`` that hold something already, to which the result is added."""
    allocates: tuple[int, ...] = ()
    """Slots whose memory is made before: gradients are put into it, and later ones added."""
    frees: tuple[int, ...] = ()
    """Slots that nobody uses after it: they go when it, and all before it that use them, are
    done."""
    waits: tuple[int, ...] = ()
    """Program counters of instructions that must be done before: of other streams, since order
    within a stream is implied; of its own, communications that bring what it uses or hold what must
    be let go first."""
    ends: tuple[int, ...] = ()
    """Those of ``waits`` that are communications or copies which nobody before has waited for: they
    are taken to their end. What nobody waits for at all is, at the end of the step."""
    buckets: tuple[int, ...] = ()
    """The buckets on which the optimizer steps, or of whose gradients the norm is taken."""
    ranks: tuple[tuple[str, int], ...] = ()
    """The place of the device along axes, where a computation depends on it."""
    weights: tuple[float, ...] = ()
    """By how much each loss, or other number, counts in their sum; what is read after the losses
    are counts."""


class PlanParts(NamedTuple):
    """What a plan consists of: see ``Plan``."""

    devices: Group
    instructions: tuple[Instruction, ...]
    given: tuple[Given, ...]
    seeds: tuple[Seed, ...]
    slots: tuple[Slot, ...]
    returned: tuple[Returned, ...]
