"""The instructions that an instruction waits for, and which of them it completes.

An instruction waits for those on other streams that make its inputs. Order within a stream is
implied, except for communications: they run beside later instructions of their stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from piper.ir.dag.ragged import Bools, Ints, Ragged, distinct, first_of_each

Pairs = tuple[Ints, Ints]
"""Program counters, and a number for each."""


@dataclass(frozen=True, slots=True)
class Issued:
    """The instructions of a plan, by program counter."""

    nodes: Ints
    streams: Ints
    communicates: Bools
    limits: Ints
    """How many such communications may be in progress on a stream; 0 for no limit."""
    in_turn: Ints
    """The node that delivers row counts just before, in turn on the same stream; -1 for none."""


def waits_of(
    issued: Issued, reads: Pairs, writes: Pairs, before: Pairs, after: Pairs
) -> tuple[Ragged, Ragged]:
    """The instructions that each instruction waits for, and those of them that it completes. It
    waits for the last instruction on each other stream of those that wrote its inputs, those
    ``before`` it and those of nodes ``after`` which it runs; for communications that bring its
    inputs, except in turn; and for earlier ones, so that no more than the limit are in progress.
    ``reads`` and ``writes`` are pairs with values."""
    streams, count = issued.streams, len(issued.nodes)
    written = np.sort(_packed(writes[1], writes[0], count))
    readers, makers = _last_writers(reads, written, count)
    brought = issued.communicates[makers] & (issued.nodes[makers] != issued.in_turn[readers])
    made = [(readers, makers), before, *_on_several_streams(issued, reads, written)]
    at = np.full(max(issued.nodes.max(initial=0), after[1].max(initial=0)) + 1, -1)
    at[issued.nodes] = np.arange(count)  # of a send and a receive, the latter
    here = at[after[1]] >= 0
    made.append((after[0][here], at[after[1][here]]))
    pcs, earlier = (np.concatenate(side) for side in zip(*made, strict=True))
    other = streams[earlier] != streams[pcs]
    by_stream = pcs[other] * (streams.max(initial=0) + 1) + streams[earlier[other]]
    ordered = np.sort(_packed(by_stream, earlier[other], count))
    last = np.append(np.diff(ordered // (count + 1)) > 0, True)[: len(ordered)]
    pcs = ordered[last] // (count + 1) // (streams.max(initial=0) + 1)
    limited = np.fromiter(_limited(issued), np.int64)
    waits = distinct(
        np.concatenate(
            (
                _packed(pcs, ordered[last] % (count + 1), count),
                _packed(readers[brought], makers[brought], count),
                limited,
            )
        )
    )
    rows = Ragged.grouped(waits // (count + 1), waits % (count + 1), count)
    places = np.flatnonzero(issued.communicates[rows.items])
    first = first_of_each(rows.items[places], count)
    completes = np.zeros(len(rows.items), bool)
    completes[places[first[first >= 0]]] = True
    return rows, rows.only(completes)


def _packed(major: Ints, minor: Ints, count: int) -> Ints:
    """Pairs as numbers that sort like them; the second is at most ``count``."""
    packed: Ints = major * (count + 1) + minor
    return packed


def _last_writers(reads: Pairs, written: Ints, count: int) -> Pairs:
    """The readers of values that were written before, and the last instruction that wrote each."""
    pcs, values = reads
    if not len(written):
        return pcs[:0], pcs[:0]
    last = written[np.searchsorted(written, _packed(values, pcs, count)) - 1]
    found = (last // (count + 1) == values) & (last % (count + 1) < pcs)
    return pcs[found], last[found] % (count + 1)


def _on_several_streams(issued: Issued, reads: Pairs, written: Ints) -> Iterator[Pairs]:
    """The readers of values that several streams write, with the last writer on each stream."""
    count = len(issued.nodes)
    values, streams = written // (count + 1), issued.streams[written % (count + 1)]
    turns = (np.diff(values) == 0) & (np.diff(streams) != 0)
    if turns.any():
        several = np.unique(values[1:][turns])
        shared, pcs = np.isin(values, several), np.isin(reads[1], several)
        for stream in np.unique(streams[shared]):
            mine = written[shared & (streams == stream)]
            yield _last_writers((reads[0][pcs], reads[1][pcs]), mine, count)


def _limited(issued: Issued) -> Iterator[int]:
    """The instructions that wait for earlier communications on their stream to end, packed."""
    count = len(issued.nodes)
    holding: defaultdict[int, list[int]] = defaultdict(list)
    for pc in np.flatnonzero(issued.limits).tolist():
        row, limit = holding[int(issued.streams[pc])], int(issued.limits[pc])
        row.append(pc)
        yield from (pc * (count + 1) + earlier for earlier in row[:-limit])
        del row[:-limit]
