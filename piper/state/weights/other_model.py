"""How tensors differ from a model's: which it lacks, which are of no use to it, which have another
shape. For messages."""

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
    """A sentence for each kind; empty if there is nothing to say. ``missing`` are names of
    ``model``, ``extra`` those that it has not, each with a note, ``shapes`` theirs and the
    model's."""
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
