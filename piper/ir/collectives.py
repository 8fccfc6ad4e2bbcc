"""The kinds of collectives, and the bytes and rounds of each algorithm.

n is the number of members. S is the bytes that enter a reduction or leave a gather.

                                  a member sends      in rounds
    all_reduce                    2 (n - 1) / n S     2 (n - 1)      a ring, for many bytes
                              or  2 S                 2 log2(n)      a tree, for few bytes
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
    """One algorithm of a collective."""

    rounds: Callable[[int], int]
    """The number of sequential messages, given the number of members."""
    shares: int = 0
    """How many times a member sends (n - 1) / n of the bytes: all parts except its own."""
    wholes: int = 0
    """How many times a member sends all bytes."""
    direct: bool = False
    """Whether members send directly to each other, not around a ring."""

    def sent(self, nbytes: int, share: _Number) -> _Number:
        """Bytes that a member sends; ``share`` is (n - 1) / n of ``nbytes``."""
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
