"""The passes of a chunk, and references to what they read and make."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Pass(Enum):
    """The part of a chunk's step that a function computes."""

    F = "F"
    """forward"""
    B = "B"
    """backward, whole"""
    BI = "BI"
    """backward for the inputs: what the chunk before waits for"""
    BW = "BW"
    """backward for the weights: the rest, at any later time"""

    __hash__ = object.__hash__  # Enum's own is slow, and these are looked up millions of times


class Kind(Enum):
    """What a tensor is to its chunk."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    OUTPUT = "output"
    UPDATE = "update"
    """The new content of a buffer."""
    SAVED = "saved"
    """Kept from the forward for B or BI; neither an input nor an output."""
    SAVED_FOR_BW = "saved_bw"
    """Saved by the forward for the weight backward (B or BW), which may come much later."""
    BI_SAVED = "bi_saved"
    """Computed by BI on the way, and saved for the weight backward, BW."""
    OUTPUT_GRAD = "output_grad"
    INPUT_GRAD = "input_grad"
    PARAMETER_GRAD = "parameter_grad"

    __hash__ = object.__hash__


SAVED = (Kind.SAVED, Kind.SAVED_FOR_BW)
"""What the forward makes for the backward alone."""


BUNDLES = (*SAVED, Kind.BI_SAVED, Kind.PARAMETER_GRAD)
"""What plans know as one value, however many tensors it is."""


@dataclass(frozen=True, slots=True)
class Ref:
    """The ``index``-th tensor of a kind."""

    kind: Kind
    index: int
    term: int = 0
    """Of the gradient of an input that later chunks read too: which of the terms that this chunk
    adds to it, one for each use."""

    def __str__(self) -> str:
        return f"{self.kind.value}{self.index}" + (f"+{self.term}" if self.term else "")


class RematPolicy(Enum):
    """How much of the forward the backward computes again."""

    NONE = "none"
    """Nothing: keep every tensor that the backward reads."""
    MIN_CUT = "min-cut"
    """What is cheap: the fewest bytes kept, with no matrix product computed twice."""
    ALL = "all"
    """Everything: keep the chunk's inputs alone."""

    __hash__ = object.__hash__  # Enum's own is slow


_STATE = (Kind.PARAMETER, Kind.BUFFER, Kind.UPDATE)


def bundled(refs: tuple[Ref, ...]) -> tuple[Ref, ...]:
    """``refs`` without state, and with one reference for each bundle: what slots hold."""
    kept = (Ref(r.kind, 0) if r.kind in BUNDLES else r for r in refs if r.kind not in _STATE)
    return tuple(dict.fromkeys(kept))
