"""Chooses the memory of gradient accumulation.

If a bucket is reduced once per step, its gradients accumulate in one buffer, which is reduced in
place. Other gradients accumulate separately and are copied into one buffer for the reduction.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from piper.ir.dag.dag import Dag
from piper.ir.dag.sizes import Sizes
from piper.ir.dag.values import PARAMETER_GRADIENTS, Content, Role
from piper.ir.plan.instructions import MemoryKind, Slot

LINE = 64
"""Alignment in bytes of gradients that accumulate separately."""


class Accumulation:
    """The gradient accumulation of one plan. The first value of a sum identifies the sum."""

    def __init__(self, dag: Dag, sizes: Sizes) -> None:
        self._dag, self._sizes = dag, sizes
        self._reductions: defaultdict[int, list[int]] = defaultdict(list)
        """For each gradient value, the reductions in whose buffers it is, by the values they
        make."""
        self._names: dict[int, tuple[str, ...]] = {}
        """For each such reduction, the parameters whose gradients are in its buffer."""

    def reduces(self, reads: Sequence[int], made: int) -> bool:
        """Record a reduction, or another sum over devices. True if it reduces gradients that
        accumulate in one buffer."""
        if not reads or self._dag.role(reads[0]) not in PARAMETER_GRADIENTS:
            return False  # a second reduction reads sums
        extra = self._dag.extra[made - self._dag.first_extra]
        if extra.content is not Content.GRADIENTS:
            return False  # a norm
        bucket = self._dag.buckets[extra.of]
        counts = Counter(name for v in reads for name in self.names(v))
        mine = tuple(name for name in bucket.parameters if counts[name])
        if bucket.level > 1 or any(counts[name] > 1 for name in mine):
            return False
        self._names[made] = mine
        for value in reads:
            self._reductions[value].append(made)
        return True

    def buffers(self, value: int) -> list[int]:
        """The reductions whose buffers hold a value."""
        return self._reductions.get(value, [])

    def names(self, value: int) -> tuple[str, ...]:
        """The parameters whose gradients a value holds."""
        template = self._dag.table.value(value)[0]
        own, tied = self._dag.table.parameters[template.of]
        return tied if template.role is Role.TIED_GRADIENT else own

    def buffer(self, made: int) -> Slot:
        """The buffer of a reduction."""
        index, names = self._bucket(made), self._names[made]
        gradient = self._dag.buckets[index].gradient
        nbytes = self._sizes.whole(index) * gradient.itemsize
        dtypes = (gradient,) * len(names)
        return Slot(MemoryKind.GRADIENTS, nbytes, nbytes, index, names, dtypes)

    def slot(self, value: int, lies_in: tuple[int, ...], *, alone: bool) -> Slot:
        """A slot for gradients that are in the slots ``lies_in``, or accumulate ``alone``, in
        their own memory."""
        names = self.names(value)
        nbytes = own = self._sizes.nbytes(value)
        dtypes = tuple(self._dag.model.parameters[name].gradient for name in names)
        for made in self.buffers(value):
            own -= sum(self._nbytes(value, name) for name in names if name in self._names[made])
        if alone:
            own += sum(-self._nbytes(value, name) % LINE for name in names)
        return Slot(MemoryKind.GRADIENTS, nbytes, own, None, names, dtypes, lies_in)

    def _nbytes(self, value: int, name: str) -> int:
        parameter = self._dag.model.parameters[name]
        chunk = self._dag.table.value(value)[0].of
        return self._dag.numel(chunk, name) * parameter.gradient.itemsize

    def _bucket(self, made: int) -> int:
        return self._dag.extra[made - self._dag.first_extra].of
