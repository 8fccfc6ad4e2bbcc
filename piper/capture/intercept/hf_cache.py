"""The key-value cache of ``transformers`` while a model is traced.

A step begins with an empty cache. The library joins keys and values to empty tensors, which copies
them: here the first update keeps and returns the tensors that it is given, so that a step with a
cache has the operations of one without. Writing into these tensors later is refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from piper.base.errors import CaptureError

_LIBRARY = "transformers.cache_utils"
_ENTRIES = ("DynamicLayer", "DynamicSlidingWindowLayer")
_Method = Callable[..., tuple[Tensor, Tensor]]


@contextmanager
def first_updates_without_copies() -> Iterator[None]:
    """Inside, the first update of a cache's entry copies nothing."""
    held: list[tuple[Tensor, int]] = []
    with ExitStack() as contexts:
        for kind in _kinds():
            contexts.callback(setattr, kind, "update", kind.update)
            kind.update = _without_copies(kind.update, held)
        yield
    if any(x._version != version for x, version in held):
        raise CaptureError(
            "the model writes into keys or values that it has given to its key-value cache: "
            "turn the cache off (use_cache=False)"
        )


def _kinds() -> list[Any]:
    """The library's classes of entries, if it is imported."""
    library = sys.modules.get(_LIBRARY)
    return [kind for name in _ENTRIES if (kind := getattr(library, name, None)) is not None]


def _without_copies(plain: _Method, held: list[tuple[Tensor, int]]) -> _Method:
    @functools.wraps(plain)
    def update(
        entry: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not _is_empty(entry):
            return plain(entry, keys, values, *args, **kwargs)
        held.extend((x, x._version) for x in (keys, values))
        entry.dtype, entry.device, entry.is_initialized = keys.dtype, keys.device, True
        entry.keys, entry.values = keys, values
        if hasattr(entry, "sliding_window"):
            entry.cumulative_length += keys.shape[-2]
            entry.keys, entry.values = (
                x[:, :, 1 - entry.sliding_window :, :] for x in (keys, values)
            )
        return keys, values

    return update


def _is_empty(entry: Any) -> bool:
    return not entry.is_initialized and not getattr(entry, "record_past", False)


def is_cache(x: Any) -> bool:
    """Whether ``x`` is the library's usual cache, whose entries are written once for each layer."""
    library = sys.modules.get(_LIBRARY)
    return type(x) is getattr(library, "DynamicCache", None) and not x.offloading


def is_unwritten(cache: Any, number: int) -> bool:
    """Whether entry ``number`` of ``cache`` exists and is empty."""
    if not 0 <= number < len(cache.layers):
        return False
    entry = cache.layers[number]
    return type(entry) in _kinds() and _is_empty(entry)
