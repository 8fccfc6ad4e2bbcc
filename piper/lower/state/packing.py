"""Offsets of a bucket's parameters in its flat buffer. The buffer has equal parts, one for each
device that shards a copy; each device updates its own part.

    in_a_row    | a a a b | b b c . |     a part may end within a parameter
    packed      | a a a . | b b b c |     it may not: each device has whole tensors
"""

from __future__ import annotations

from collections.abc import Sequence

Places = tuple[tuple[int, ...], int]
"""The offset of each parameter, and the size of a part."""


def in_a_row(sizes: Sequence[int], parts: int) -> Places:
    """Parameters one after another, with padding at the end."""
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += size
    return tuple(offsets), -(-at // parts)


def packed(sizes: Sequence[int], parts: int) -> Places:
    """Each parameter in the part with least so far, largest first. Parts are padded to the
    largest."""
    ends = [0] * parts
    places: dict[int, tuple[int, int]] = {}
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        part = min(range(parts), key=ends.__getitem__)
        places[i] = (part, ends[part])
        ends[part] += sizes[i]
    share = max(ends)
    return tuple(part * share + at for _, (part, at) in sorted(places.items())), share
