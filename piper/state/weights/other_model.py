"""Text for error messages: how a set of tensors differs from a model's. Lists missing tensors,
extra tensors and other shapes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from piper.base.units import counted, listed

_SHOWN = 5
AnyShape = Sequence[int]


def differences(
    model: Mapping[str, AnyShape],
    missing: Sequence[str],
    extra: Mapping[str, str],
    shapes: Mapping[str, tuple[AnyShape, AnyShape]],
) -> str:
    """One sentence for each kind of difference; empty if there is none. ``missing`` are names of
    ``model``. ``extra`` maps names that the model lacks to a note. ``shapes`` maps names to the
    shape given and the model's shape."""
    parts = []
    if missing:
        named = [name + _nearest(name, extra) for name in missing[:_SHOWN]]
        number = counted(len(model), "tensor")
        parts.append(
            f"{len(missing)} of the model's {number} {'is' if len(missing) == 1 else 'are'} "
            f"missing: {listed(named, len(missing))}"
        )
    if extra:
        notes = [f"{name}{note}" for name, note in list(extra.items())[:_SHOWN]]
        parts.append(
            f"{_several(extra, 'is', 'are')} not in the model: {listed(notes, len(extra))}"
        )
    if shapes:
        rows = [
            f"{name}, {list(theirs)} instead of {list(own)}"
            for name, (theirs, own) in list(shapes.items())[:_SHOWN]
        ]
        parts.append(
            f"{_several(shapes, 'has', 'have')} another shape: {listed(rows, len(shapes), '; ')}"
        )
    return ". ".join(parts)


def _several(tensors: Mapping[str, Any], one: str, more: str) -> str:
    return f"{counted(len(tensors), 'tensor')} {one if len(tensors) == 1 else more}"


def _nearest(name: str, known: Mapping[str, str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (nearest: {close[0]})" if close else ""
