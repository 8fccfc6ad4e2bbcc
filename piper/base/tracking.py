"""How many bytes of tensors are alive, counted while a device runs.

Every tensor that an operation makes passes torch's dispatcher; here it is counted until its storage
is gone. What compiled kernels take for themselves, and what the threads of a way to communicate
take, does not pass there and is not seen.
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
    """What it keeps between steps."""
    peak: int
    """The most that was alive at one time, state included."""
    at: str
    """The instruction during which it was."""


class Tracker(TorchDispatchMode):
    """Counts what is made while it is active. ``pc`` says where its device is in a plan."""

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
                self._note(x, counts=False)  # somebody else's, if it is not known
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._note(x, counts=True)
        return out

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Take in tensors that were made before, each storage once."""
        for tensor in tensors:
            self._note(tensor, counts=True)

    def over(self, run: Generator[Item, None, Result]) -> Generator[Item, None, Result]:
        """``run``, with what it makes counted, and not what others make in between."""
        while True:
            with self:
                try:
                    item = next(run)
                except StopIteration as end:
                    return end.value
            yield item

    def _note(self, tensor: Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)  # the object lives as long as the memory that it stands for
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
