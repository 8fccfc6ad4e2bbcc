"""The instructions of a plan as columns: one array for each field that is a number or slots.

A step has hundreds of thousands of instructions. Passes over all plans read columns. The
instructions themselves are made from them when somebody asks for these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np

from piper.ir.dag.ragged import Bools, Ints, Ragged
from piper.ir.plan.instructions import Instruction, Verb

VERBS = tuple(Verb)


@dataclass(frozen=True)
class Columns:
    """The fields of ``Instruction``, each for all instructions of a plan."""

    verbs: Ints
    """Indices in ``VERBS``."""
    nodes: Ints
    reads: Ragged
    writes: Ragged
    adds: Ragged
    allocates: Ragged
    frees: Ragged
    waits: Ragged
    ends: Ragged
    holds: Ragged
    workspace: Ints
    beside: Ints
    at_end: Ints

    @staticmethod
    def of(instructions: Sequence[Instruction]) -> Columns:
        if isinstance(instructions, PlannedInstructions):
            return instructions.columns
        rows, count = instructions, len(instructions)
        numbers = {verb: i for i, verb in enumerate(VERBS)}
        return Columns(
            np.fromiter((numbers[x.verb] for x in rows), np.int64, count),
            np.fromiter((x.node for x in rows), np.int64, count),
            Ragged.of([x.reads for x in rows]),
            Ragged.of([x.writes for x in rows]),
            Ragged.of([x.adds for x in rows]),
            Ragged.of([x.allocates for x in rows]),
            Ragged.of([x.frees for x in rows]),
            Ragged.of([x.waits for x in rows]),
            Ragged.of([x.ends for x in rows]),
            Ragged.of([x.holds for x in rows]),
            np.fromiter((x.workspace for x in rows), np.int64, count),
            np.fromiter((x.beside for x in rows), np.int64, count),
            np.fromiter((x.at_end for x in rows), np.int64, count),
        )

    def __len__(self) -> int:
        return len(self.nodes)

    def among(self, verbs: frozenset[Verb]) -> Bools:
        """Which instructions have one of ``verbs``."""
        return np.isin(self.verbs, [i for i, verb in enumerate(VERBS) if verb in verbs])


class PlannedInstructions(Sequence[Instruction]):
    """The instructions of ``columns``. ``make`` makes them when one is first asked for."""

    def __init__(self, columns: Columns, make: Callable[[], tuple[Instruction, ...]]) -> None:
        self.columns = columns
        self._make = make

    @cached_property
    def _made(self) -> tuple[Instruction, ...]:
        return self._make()

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, at: int) -> Instruction: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Instruction, ...]: ...
    def __getitem__(self, at: int | slice) -> Instruction | tuple[Instruction, ...]:
        return self._made[at]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self._made)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple | PlannedInstructions):
            return NotImplemented
        return self._made == tuple(other)

    def __hash__(self) -> int:
        return hash(self._made)

    def __repr__(self) -> str:
        return repr(self._made)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self._made,)
