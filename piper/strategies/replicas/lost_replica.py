"""The strategy without one data-parallel replica: its rows go to the others.

    dp=3, 2 microbatches     [0 1 2] [3 4 5]        the rows of device r: one number each
    without a replica        0: 0 2 4    1: 1 3 5   or, where they divide, [0 1] [2 3] [4 5]

All computations keep their shapes (see ``replicas.py``): nothing is traced again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from piper.base.errors import DirectiveError
from piper.strategies.replicas.replicas import Replicas
from piper.strategies.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Rerouted:
    """A strategy without one replica."""

    strategy: Strategy
    replicas: tuple[tuple[int, ...], ...]
    """The devices of each replica, in corresponding order. The strategy does without the last; if
    another is lost, the last one's devices take its places."""
    parts: tuple[int, int]
    """Over how many devices the rows of a microbatch are split: before, and now."""


def without_replica(strategy: Strategy) -> Rerouted:
    """``strategy`` without its last replica, or a DirectiveError that says why it has none to
    lose."""
    try:
        found = Replicas.of(strategy)
        count = found.count - 1
        shared = math.gcd(found.microbatches, count)
        groups = count // shared  # each of ``shared`` replicas, which split a part's rows
        total = found.microbatches * found.count // shared
        shares = [(total + groups - 1 - g) // groups for g in range(groups)]
        rerouted = found.dealt(shares, shared)
    except DirectiveError as error:
        raise DirectiveError(f"this strategy cannot go on without a replica: {error}") from None
    each = found.each
    return Rerouted(rerouted, found.devices, (found.count * each, shared * each))
