"""Allocates the slots of a plan: one for each value, and buffers in which gradients accumulate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from piper.ir.dag.ragged import Bools, Ints, Ragged
from piper.ir.plan.instructions import Slot
from piper.lower.plans.accumulation import Accumulation
from piper.lower.plans.plan_context import PlanContext


class SlotAllocation:
    """The slots of a plan, in the order of their allocation."""

    def __init__(
        self, shared: PlanContext, distinct: Sequence[Slot], accumulation: Accumulation
    ) -> None:
        self._buffer = shared.buffer
        self._accumulation = accumulation
        self._distinct = list(distinct)
        self.kinds = np.empty(0, np.int64)
        """For each slot, a number that only equal ones share."""
        self.of = np.full(shared.numbered, -1)
        """The slot of each value and buffer."""
        self.allocates: defaultdict[int, list[int]] = defaultdict(list)
        """By instruction, the slots of gradients that it allocates before it writes them."""
        self.buffers: dict[int, int] = {}
        """By buffer, the instruction that allocates it."""
        self.later: list[tuple[int, int]] = []
        """Later instructions that write the first gradients of a sum into a buffer, each with the
        one that allocates the buffer."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple([self._distinct[kind] for kind in self.kinds.tolist()])

    def new(self, value: int, kind: Slot) -> int:
        """A new slot for a value."""
        slot = self.of[value] = len(self.kinds)
        self.kinds = np.append(self.kinds, self._number(kind))
        return slot

    def _number(self, kind: Slot) -> int:
        self._distinct.append(kind)
        return len(self._distinct) - 1

    def allocate(self, writes: Ragged, kinds: Ints, fresh: Bools, last_read: Ints) -> Ints:
        """Allocate slots of ``kinds`` for the written values that are ``fresh``; returns these
        slots, and -1 for other values. For the first gradients of a sum, whose kind is -1, also
        allocate the memory in which they accumulate."""
        first, kinds = len(self.kinds), kinds.copy()
        times = np.bincount(writes.items, minlength=len(self.of))
        before: Ints = first + np.cumsum(fresh) - fresh
        more = np.zeros(len(fresh), np.int64)
        buffers: dict[int, Slot] = {}
        """By slot."""
        for at in np.flatnonzero(fresh & (kinds < 0)).tolist():
            value, pc = int(writes.items[at]), int(writes.row_of[at])
            slot, lies_in = int(before[at]) + len(buffers), []
            for made in self._accumulation.buffers(value):
                buffer = self._buffer(made)
                if buffer not in self.buffers:
                    self.buffers[buffer] = pc
                    self.of[buffer] = slot
                    self.allocates[pc].append(slot)
                    buffers[slot] = self._accumulation.buffer(made)
                    slot, more[at] = slot + 1, more[at] + 1
                elif self.buffers[buffer] < pc:
                    self.later.append((pc, self.buffers[buffer]))
                lies_in.append(int(self.of[buffer]))
            alone = bool(times[value] > 1 and last_read[value] >= 0 and not lies_in)
            kinds[at] = self._number(self._accumulation.slot(value, tuple(lies_in), alone=alone))
            if alone:
                self.allocates[pc].append(slot)
        slots: Ints = np.where(fresh, first - 1 + np.cumsum(fresh + more), -1)
        self.of[writes.items[fresh][::-1]] = slots[fresh][::-1]  # the first is the one that is read
        self.kinds = np.append(self.kinds, np.empty(int(fresh.sum()) + len(buffers), np.int64))
        self.kinds[slots[fresh]] = kinds[fresh]
        for slot, buffer_slot in buffers.items():
            self.kinds[slot] = self._number(buffer_slot)
        return slots

    def reuse(self, made: Ints, inputs: Ints) -> None:
        """Give values the slots of the inputs that they overwrite, which may overwrite others."""
        while (self.of[made] != self.of[inputs]).any():
            self.of[made] = self.of[inputs]
