"""The kinds of collectives, and what each member sends by every algorithm that suits one.

With n members and S bytes, which are what goes into a reduction, or comes out of a gather:

                                  sends               in rounds
    all_reduce                    2 (n - 1) / n S     2 (n - 1)      a ring, for many bytes
                              or  2 S                 2 log2(n)      a tree, for few
    reduce_scatter, all_gather    (n - 1) / n S       log2(n)        halving
    all_to_all                    (n - 1) / n S       1              each to each
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import TypeVar

_Number = TypeVar("_Number", float, Fraction)


class CollectiveKind(Enum):
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to do a collective."""

    rounds: Callable[[int], int]
    """By the number of members: messages that follow one another."""
    shares: int = 0
    """How many times a member sends (n - 1) / n of the bytes: all parts but its own."""
    wholes: int = 0
    """How many times it sends all bytes."""
    direct: bool = False
    """Whether each sends to each over the link between them, and not around in a ring."""

    def sent(self, nbytes: int, share: _Number) -> _Number:
        """Bytes that a member sends, if ``share`` is (n - 1) / n of ``nbytes``."""
        return self.shares * share + self.wholes * nbytes


def _halvings(members: int) -> int:
    return math.ceil(math.log2(members))


_RING = Algorithm(lambda n: 2 * (n - 1), shares=2)
_TREE = Algorithm(lambda n: 2 * _halvings(n), wholes=2)
_HALVING = Algorithm(_halvings, shares=1)

ALGORITHMS: Mapping[CollectiveKind, tuple[Algorithm, ...]] = {
    CollectiveKind.ALL_REDUCE: (_RING, _TREE),
    CollectiveKind.REDUCE_SCATTER: (_HALVING,),
    CollectiveKind.ALL_GATHER: (_HALVING,),
    CollectiveKind.ALL_TO_ALL: (Algorithm(lambda n: 1, shares=1, direct=True),),
}
