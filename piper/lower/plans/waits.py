"""The instructions that an instruction waits for, and which of them it completes.

An instruction waits for those on other streams that make its inputs. Order within a stream is
implied, except for communications: they run beside later instructions of their stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable


class Waits:
    """The instructions issued so far, by program counter."""

    def __init__(self) -> None:
        self._streams: list[str] = []
        self._nodes: list[int] = []
        self._communicates: list[bool] = []
        self._under_way: set[int] = set()
        """Communications that no instruction has waited for yet."""
        self._holding: defaultdict[str, list[int]] = defaultdict(list)
        """By stream, the communications that may still hold their inputs."""

    def of(
        self,
        stream: str,
        made: Iterable[tuple[int, ...]],
        before: Iterable[int],
        in_turn: int | None,
        limit: int,
    ) -> tuple[int, ...]:
        """What the next instruction, on ``stream``, waits for: the last instruction of each other
        stream of those that ``made`` its inputs and those ``before`` it, and the communications
        that bring its inputs, except the node ``in_turn``. At most ``limit`` like it may hold
        their inputs at once; 0 for no limit."""
        streams = self._streams
        last: dict[str, int] = {}
        waits: set[int] = set()
        for pcs in made:
            for pc in pcs:
                other = streams[pc]
                if other != stream and last.get(other, -1) < pc:
                    last[other] = pc
            if self._communicates[pcs[-1]] and self._nodes[pcs[-1]] != in_turn:
                waits.add(pcs[-1])
        for pc in before:
            other = streams[pc]
            if other != stream and last.get(other, -1) < pc:
                last[other] = pc
        if limit:
            row = self._holding[stream]
            row.append(len(streams))
            waits.update(row[:-limit])
            del row[:-limit]
        if not (last or waits):
            return ()
        return tuple(sorted(waits.union(last.values())))

    def issue(
        self, stream: str, node: int, waits: tuple[int, ...], *, communicates: bool
    ) -> tuple[int, ...]:
        """Add the next instruction; returns the communications that it completes."""
        ends = tuple([pc for pc in waits if pc in self._under_way]) if waits else ()
        self._under_way.difference_update(ends)
        if communicates:
            self._under_way.add(len(self._streams))
        self._streams.append(stream)
        self._nodes.append(node)
        self._communicates.append(communicates)
        return ends

    def last_of_each(self, pcs: tuple[int, ...], stream: str, pc: int) -> tuple[int, ...]:
        """``pcs`` and ``pc``, an instruction on ``stream``: the last on each stream."""
        return (*[other for other in pcs if self._streams[other] != stream], pc)
