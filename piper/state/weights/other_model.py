"""Text for error messages: how a set of tensors differs from a model's. Lists missing tensors,
extra tensors and other shapes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from piper.base.units import counted

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
        parts.append(
            f"{len(missing)} of the model's {counted(len(model), 'tensor')} "
            f"{'is' if len(missing) == 1 else 'are'} missing: {_listed(named, len(missing))}"
        )
    if extra:
        notes = [f"{name}{note}" for name, note in list(extra.items())[:_SHOWN]]
        verb = "is" if len(extra) == 1 else "are"
        parts.append(
            f"{counted(len(extra), 'tensor')} {verb} not in the model: {_listed(notes, len(extra))}"
        )
    if shapes:
        rows = [
            f"{name}, {list(theirs)} instead of {list(own)}"
            for name, (theirs, own) in list(shapes.items())[:_SHOWN]
        ]
        verb = "has" if len(shapes) == 1 else "have"
        parts.append(
            f"{counted(len(shapes), 'tensor')} {verb} another shape: "
            f"{_listed(rows, len(shapes), '; ')}"
        )
    return ". ".join(parts)


def _nearest(name: str, known: Mapping[str, str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (nearest: {close[0]})" if close else ""


def _listed(shown: Sequence[str], number: int, between: str = ", ") -> str:
    more = f" and {number - len(shown)} more" if number > len(shown) else ""
    return between.join(shown) + more
