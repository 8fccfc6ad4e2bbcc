"""A key-value cache of ``transformers`` among the arguments of equal modules.

Each module writes into an entry of its own, which is empty before, and nobody reads the entry
after. While a module is traced, a ``StandIn`` is its cache: it answers one update, under the number
of the module, and refuses everything else. An ``Unread`` then takes the place of the entry in the
real cache, so that reading it ends the attempt.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from piper.capture.intercept.hf_cache import is_unwritten
from piper.capture.repeats.equal_modules import NotEqual, Unread, refuse_use

_NAME = "the key-value cache"


class StandIn(Unread):
    """Stands for a cache in one call of a module."""

    def __init__(self, cache: Any, reads: list[str]) -> None:
        super().__init__(_NAME, reads)
        object.__setattr__(self, "_kind", type(cache))
        object.__setattr__(self, "_written", [])

    def __getattribute__(self, name: str) -> Any:
        if name == "update":
            return functools.partial(_update, self)
        return object.__getattribute__(self, "_kind") if name == "__class__" else refuse_use(self)

    __len__ = refuse_use


def _update(
    cache: StandIn, key_states: Tensor, value_states: Tensor, layer_idx: Any, *args: Any, **how: Any
) -> tuple[Tensor, Tensor]:
    written = object.__getattribute__(cache, "_written")
    if written or type(layer_idx) is not Unread:
        refuse_use(cache)
    written += [key_states, value_states, object.__getattribute__(layer_idx, "_name")]
    return key_states, value_states


def written_in(cache: StandIn) -> tuple[Tensor, Tensor, str] | None:
    """The keys and values of the update, if there was one, and the name of the number."""
    return tuple(object.__getattribute__(cache, "_written")) or None


def close(cache: Any, number: int, reads: list[str]) -> None:
    """Note that a module wrote into its entry of ``cache``."""
    if not is_unwritten(cache, number):
        raise NotEqual(f"{_NAME} is not empty")
    cache.layers[number] = Unread(_NAME, reads)
