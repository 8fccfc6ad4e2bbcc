"""The passes of a chunk, and references to the tensors that they read and write."""

from __future__ import annotations

from enum import Enum

from piper.base.codec import ArrayRecord, Count


class Pass(Enum):
    """A pass of a chunk; one function computes it."""

    F = "F"
    """forward"""
    B = "B"
    """backward, whole"""
    BI = "BI"
    """backward for the inputs: the previous chunk waits for it"""
    BW = "BW"
    """backward for the weights: the rest, at any later time"""

    __hash__ = object.__hash__  # Enum's own is slow, and these are looked up millions of times


class Kind(Enum):
    """The role of a tensor in its chunk."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    OUTPUT = "output"
    UPDATE = "update"
    """The new content of a buffer."""
    SAVED = "saved"
    """Saved by the forward for B or BI; neither an input nor an output."""
    SAVED_FOR_BW = "saved_bw"
    """Saved by the forward for the weight backward (B or BW), which may run much later."""
    BI_SAVED = "bi_saved"
    """An intermediate of BI, saved for the weight backward, BW."""
    OUTPUT_GRAD = "output_grad"
    INPUT_GRAD = "input_grad"
    PARAMETER_GRAD = "parameter_grad"

    __hash__ = object.__hash__


SAVED = (Kind.SAVED, Kind.SAVED_FOR_BW)
"""Kinds that the forward makes only for the backward."""


BUNDLES = (*SAVED, Kind.BI_SAVED, Kind.PARAMETER_GRAD)
"""Kinds whose tensors are together one value in a plan."""


class Ref(ArrayRecord, frozen=True):
    """The ``index``-th tensor of a kind."""

    kind: Kind
    index: Count
    term: Count = 0
    """For the gradient of an input that later chunks read too: the number of the term. The chunk
    makes one term per use."""

    def __str__(self) -> str:
        return f"{self.kind.value}{self.index}" + (f"+{self.term}" if self.term else "")


class RematPolicy(Enum):
    """How much of the forward the backward recomputes (activation checkpointing)."""

    NONE = "none"
    """Nothing: save every tensor that the backward reads."""
    MIN_CUT = "min-cut"
    """Cheap operations: save the fewest bytes, and recompute no matrix product."""
    ALL = "all"
    """Everything: save only the chunk's inputs."""

    __hash__ = object.__hash__  # Enum's own is slow


_STATE = (Kind.PARAMETER, Kind.BUFFER, Kind.UPDATE)


def bundled(refs: tuple[Ref, ...]) -> tuple[Ref, ...]:
    """``refs`` without state, and with one reference per bundle: one per slot of a plan."""
    kept = (Ref(r.kind, 0) if r.kind in BUNDLES else r for r in refs if r.kind not in _STATE)
    return tuple(dict.fromkeys(kept))
