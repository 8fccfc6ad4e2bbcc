"""Counts the bytes of live tensors while a device runs.

Every tensor that an operation makes passes torch's dispatcher and is counted until its storage is
freed. Workspace of compiled kernels and memory of communication threads do not pass the dispatcher
and are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Item = TypeVar("Item")
Result = TypeVar("Result")


class Alive(NamedTuple):
    """The memory of one device in one step, in bytes."""

    state: int
    """Kept between steps."""
    peak: int
    """Most bytes alive at one time, state included."""
    at: str
    """The instruction at the peak."""


class Tracker(TorchDispatchMode):
    """Counts tensors made while it is active. ``pc`` gives the device's program counter."""

    def __init__(self, pc: Callable[[], int] = lambda: -1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pc = pc
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.now = 0
        """Bytes alive."""
        self.peak = 0
        self.peak_at = -1
        """The program counter at which the peak was reached."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                self._note(x, counts=False)  # made outside the tracker, unless already known
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._note(x, counts=True)
        return out

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors made earlier, each storage once."""
        for tensor in tensors:
            self._note(tensor, counts=True)

    def over(self, run: Generator[Item, None, Result]) -> Generator[Item, None, Result]:
        """``run``, counting the tensors it makes, but not those made between its items."""
        while True:
            with self:
                try:
                    item = next(run)
                except StopIteration as end:
                    return end.value
            yield item

    def _note(self, tensor: Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)  # the storage object lives as long as its memory
        if key in self._known:
            return
        nbytes = storage.nbytes() if counts else 0

        def gone(_: object) -> None:
            del self._known[key]
            self.now -= nbytes

        self._known[key] = weakref.ref(storage, gone)
        self.now += nbytes
        if self.now > self.peak:
            self.peak, self.peak_at = self.now, self._pc()
