"""The instructions that an instruction waits for, and which of them it completes.

An instruction waits for those on other streams that make its inputs. Order within a stream is
implied, except for communications: they run beside later instructions of their stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from piper.lower.plans.shares import NodeShare

Held = tuple[int, tuple[int, ...]]
"""The slot of a value, and the last instruction of each stream that wrote it."""


class Waits:
    """The instructions issued so far, by program counter."""

    def __init__(self) -> None:
        self._streams: list[str] = []
        self._nodes: list[int] = []
        self._at: dict[int, int] = {}
        """The last instruction of each node."""
        self._under_way: set[int] = set()
        """Communications that no instruction has waited for yet."""
        self._communications: set[int] = set()
        self._holding: defaultdict[str, list[int]] = defaultdict(list)
        """By stream, the communications that may still hold their inputs."""

    def issue(
        self,
        number: int,
        share: NodeShare,
        inputs: Iterable[Held],
        before: Iterable[int],
        after: Iterable[int],
        in_turn: int | None,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Add the next instruction. Returns the instructions that it waits for, and those of them
        that it completes. It waits for the last instruction on each other stream of those that
        wrote its ``inputs``, those ``before`` it and those of nodes ``after`` which it runs, and
        for communications that bring its inputs, except the node ``in_turn``."""
        streams, stream, pc = self._streams, share.stream, len(self._streams)
        last: dict[str, int] = {}
        waits: list[int] = []
        for _, makers in inputs:
            for maker in makers:
                other = streams[maker]
                if other != stream and last.get(other, -1) < maker:
                    last[other] = maker
            brought = bool(makers) and makers[-1] in self._communications
            if brought and self._nodes[makers[-1]] != in_turn:
                waits.append(makers[-1])
        for maker in (*before, *[self._at[node] for node in after if node in self._at]):
            other = streams[maker]
            if other != stream and last.get(other, -1) < maker:
                last[other] = maker
        if share.limit:
            row = self._holding[stream]
            row.append(pc)
            waits += row[: -share.limit]
            del row[: -share.limit]
        ends: tuple[int, ...] = ()
        waited: tuple[int, ...] = ()
        if last or waits:
            waited = tuple(sorted({*waits, *last.values()}))
            ends = tuple([other for other in waited if other in self._under_way])
            self._under_way.difference_update(ends)
        if share.communicates:
            self._under_way.add(pc)
            self._communications.add(pc)
        streams.append(stream)
        self._nodes.append(number)
        self._at[number] = pc
        return waited, ends

    def last_of_each(self, pcs: tuple[int, ...], stream: str) -> tuple[int, ...]:
        """``pcs`` and the instruction issued last, on ``stream``: the last on each stream."""
        kept = [other for other in pcs if self._streams[other] != stream]
        return (*kept, len(self._streams) - 1)
