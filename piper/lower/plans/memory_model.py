"""The memory of a plan over time: persistent state, slots from when they are written until they are
freed, and the temporary memory of each instruction.

An instruction first completes communications, one after another. Then it allocates slots, runs, and
frees slots. So a plan is a list of changes of memory, each with its time.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from piper.ir.dag.dag import Dag
from piper.ir.dag.ragged import Ints
from piper.ir.dag.sizes import Sizes
from piper.ir.plan.columns import Columns
from piper.ir.plan.instructions import MemoryKind, Verb
from piper.ir.plan.memory import Memory, OverTime
from piper.ir.plan.plan import Plan
from piper.ir.rules import OptimizerCost

_KINDS = tuple(MemoryKind)
_INDEX = {kind: i for i, kind in enumerate(_KINDS)}


def memory_of(dag: Dag, plan: Plan, sizes: Sizes, optimizer: OptimizerCost) -> Memory:
    """An upper bound on the memory of ``plan``."""
    mine = plan.devices[0]
    buckets = [
        i for i, bucket in enumerate(dag.buckets) if mine in chain.from_iterable(bucket.groups)
    ]
    x = Columns.of(plan.instructions)
    at_peak = {
        MemoryKind.PARAMETERS: sum(sizes.state(i) for i in buckets),
        MemoryKind.OPTIMIZER: sum(_optimizer(dag, sizes, i, optimizer) for i in buckets),
        MemoryKind.BUFFERS: _buffers(dag, x),
    }
    changes = _Changes(plan, x)
    always = sum(at_peak.values())
    running = always + changes.total(changes.running) + x.workspace
    ended = x.at_end[x.ends.items]
    ending = always + changes.total(changes.ending) + ended
    most = running.copy()
    np.maximum.at(most, x.ends.row_of[ended > 0], ending[ended > 0])

    before = np.array([_FIRST + 1])
    times = np.concatenate((before, changes.ending[ended > 0], changes.running))
    order = np.argsort(times)
    busy = np.concatenate((always + changes.total(before), ending[ended > 0], running))[order]
    extra = np.concatenate(([0], ended[ended > 0], x.workspace))[order]
    pcs = np.concatenate(([-1], x.ends.row_of[ended > 0], np.arange(len(x))))[order]
    first = int(np.argmax(busy))
    at_peak = dict.fromkeys(MemoryKind, 0) | at_peak | {MemoryKind.WORKSPACE: int(extra[first])}
    for kind, nbytes in changes.by_kind(times[order][first]).items():
        at_peak[kind] += nbytes
    return Memory(
        plan.devices,
        at_peak[MemoryKind.PARAMETERS],
        at_peak[MemoryKind.OPTIMIZER],
        int(busy[first]),
        int(pcs[first]),
        at_peak,
        OverTime(most, always + changes.total(changes.after)),
    )


_FIRST, _NEVER = -2, np.iinfo(np.int64).max
"""The times at which a step's first slots are filled, and of what does not happen."""
_PASSES = frozenset((Verb.COMPUTE,))


class _Changes:
    """The changes of memory during a plan. Times are numbers; an instruction has several."""

    def __init__(self, plan: Plan, x: Columns) -> None:
        count = len(x)
        steps = int(x.ends.lengths.max(initial=0)) + 3
        pcs = np.arange(count) * steps
        nth = np.arange(len(x.ends.items)) - x.ends.starts[x.ends.row_of]
        completed = 2 * (pcs[x.ends.row_of] + nth)
        self.ending = completed - 1
        """When each completed communication is about to free what it holds."""
        allocated = 2 * (pcs + steps - 3)
        self.running = 2 * (pcs + steps - 2)
        """When each instruction runs."""
        freed = 2 * (pcs + steps - 1)
        self.after = freed + 1

        born = np.full(len(plan.slots), _NEVER)
        born[x.writes.items[::-1]] = allocated[x.writes.row_of[::-1]]
        born[x.allocates.items] = np.minimum(born[x.allocates.items], allocated[x.allocates.row_of])
        born[list(plan.first_slots)] = _FIRST
        died, left = np.full((2, len(plan.slots)), _NEVER)
        died[x.frees.items], left[x.frees.items] = freed[x.frees.row_of], x.frees.row_of
        ends, done = np.full((2, count), _NEVER)
        ends[x.ends.items], done[x.ends.items] = x.ends.row_of, completed
        holder = np.full(len(plan.slots), -1)
        order = np.lexsort((-x.holds.row_of, ends[x.holds.row_of]))
        holder[x.holds.items[order]] = x.holds.row_of[order]  # the one that ends last
        late = (holder >= 0) & (ends[holder] > left)
        died[late] = done[holder[late]]

        kinds = np.array([_INDEX[slot.holder] for slot in plan.slots], np.int64)
        own = np.array([slot.own for slot in plan.slots], np.int64)
        communication = np.full(count, _KINDS.index(MemoryKind.COMMUNICATION))
        times = np.concatenate((born, died, allocated, done))
        order = np.argsort(times)
        self._times = times[order]
        self._nbytes = np.concatenate((own, -own, x.beside, -x.beside))[order]
        self._kinds = np.concatenate((kinds, kinds, communication, communication))[order]
        self._totals = np.concatenate(([0], np.cumsum(self._nbytes)))

    def total(self, times: Ints) -> Ints:
        """The bytes in use at each of ``times``."""
        total: Ints = self._totals[np.searchsorted(self._times, times)]
        return total

    def by_kind(self, time: int) -> dict[MemoryKind, int]:
        """The bytes in use at a time, by kind."""
        past = self._times < time
        return {
            kind: int(self._nbytes[past & (self._kinds == i)].sum())
            for i, kind in enumerate(_KINDS)
        }


def _optimizer(dag: Dag, sizes: Sizes, bucket: int, cost: OptimizerCost) -> int:
    held = dag.buckets[bucket]
    scalars = cost.scalars * len(held.parameters) if held.trained else 0
    return sizes.optimizer(bucket, cost.state) + scalars


def _buffers(dag: Dag, x: Columns) -> int:
    """Bytes of the buffers and constants that the passes of a plan read."""
    chunks = np.unique(dag.operations.chunks[x.nodes[x.among(_PASSES)]]).tolist()
    names = {name for chunk in chunks for name in dag.model.chunks[chunk].buffers}
    return sum(dag.model.buffers.get(name, 0) for name in names)
