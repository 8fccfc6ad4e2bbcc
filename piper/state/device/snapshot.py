"""What a device gives to a checkpoint, as it was when the save began, on its way to host memory.

Parameters and the optimizer's state change in the update of their bucket and nowhere else: they are
copied bucket by bucket, by the COPY instructions of the next step, and what is left at the end of
it then. Buffers, which forwards change, are copied at once; numbers are in the holding already.

On a CPU a thread copies while the device waits for others, a piece at a time, and what is left of a
bucket when its update comes is copied then: beside a computation, a copy would slow it by as much
as it takes. On a GPU copies run on a stream of their own, into pinned memory.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import replace

import torch
from torch import Tensor

from piper.base.handles import Handle
from piper.state.device.holding import Holding

_PIECE = 2**20
"""Bytes that are copied before it is looked again whether the device still waits."""


class Snapshot:
    """Copies of the slices of one holding. This is the CPU's."""

    def __init__(self, holding: Holding) -> None:
        """``holding`` refers to the state itself."""
        self._holding: Holding | None = holding
        self._copies: list[Tensor | None] = [None] * len(holding.slices)
        self._left: dict[int | None, list[int]] = {}
        """By bucket, the slices whose turn has not come; those of None change otherwise."""
        for i, bucket in enumerate(holding.buckets):
            self._left.setdefault(bucket, []).append(i)
        self._all_begun = threading.Event()
        self._start()
        now = self.copy(None)
        if now is not None:
            now.wait()

    def copy(self, bucket: int | None) -> Handle | None:
        """Begin to copy what is saved of a bucket; the handle says when that is over, if the host
        has a part in it."""
        for i in self._left.pop(bucket, ()):
            self._copies[i] = self._begin(bucket, self._held(i))
        return self._handle(bucket)

    def copy_rest(self) -> None:
        """Begin to copy all that is left: whoever writes it sees it through."""
        for bucket in list(self._left):
            self.copy(bucket)
        self._all_begun.set()
        self._waiting.set()

    def finish(self) -> None:
        """Copy all that is left; the state may change when this returns."""
        self.copy_rest()
        self._wait()

    def abandon(self) -> None:
        """What is not being copied yet never will be."""
        if self._left:
            self._holding = None
            self._queue.clear()
        self._all_begun.set()
        self._waiting.set()

    def result(self) -> Holding | None:
        """The copies, when all of them are there; None if some never will be. For the thread that
        writes them."""
        self._all_begun.wait()
        holding = self._holding
        if holding is None:
            return None
        self._wait()
        if self._error is not None:
            raise self._error
        copies = [copy for copy in self._copies if copy is not None]
        pairs = zip(holding.slices, copies, strict=True)
        self._holding, self._copies = None, []
        return replace(holding, slices=[replace(held, tensor=copy) for held, copy in pairs])

    def _held(self, i: int) -> Tensor:
        assert self._holding is not None
        tensor = self._holding.slices[i].tensor
        assert isinstance(tensor, Tensor)
        return tensor.detach()

    # how it is done on a CPU

    def _start(self) -> None:
        self._queue: deque[tuple[int | None, Tensor, Tensor]] = deque()
        """Pieces, each with where it goes and the bucket that it is of."""
        self._open: Counter[int | None] = Counter()
        """By bucket, how many of them."""
        self._lock = threading.Lock()
        self._error: Exception | None = None
        """Why a copy failed: the save has failed then, and training goes on."""
        self._waiting = threading.Event()
        """Whether the device has nothing else to do."""
        self._thread: threading.Thread | None = None

    def _begin(self, bucket: int | None, tensor: Tensor) -> Tensor:
        room = torch.empty(tensor.shape, dtype=tensor.dtype)
        pieces = [(room, tensor)]
        if tensor.is_contiguous():
            size = max(1, _PIECE // tensor.dtype.itemsize)
            rows = room.view(-1).split(size), tensor.view(-1).split(size)
            pieces = list(zip(*rows, strict=True))
        with self._lock:
            self._queue += [(bucket, into, piece) for into, piece in pieces]
            self._open[bucket] += len(pieces)
        return room

    def _handle(self, bucket: int | None) -> Handle | None:
        return _Copying(self, bucket) if self._open[bucket] else None

    def wait_begins(self) -> None:
        """The device has nothing to do: copy what has begun, as long as that lasts."""
        if self._queue:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="piper copy", daemon=True)
                self._thread.start()
            self._waiting.set()

    def wait_ends(self) -> None:
        """The device goes on."""
        self._waiting.clear()

    def _run(self) -> None:
        """Copy in the moments in which the device waits, until it is seen to otherwise."""
        while not self._all_begun.is_set():
            self._waiting.wait()
            if not self._advance():
                self._waiting.clear()

    def _advance(self) -> bool:
        """Copy one piece; whether there was one."""
        with self._lock:
            if not self._queue:
                return False
            bucket, into, piece = self._queue.popleft()
            try:
                copy_piece(into, piece)
            except Exception as error:  # noqa: BLE001 - whatever it is, whoever saves is told
                self._error = error
                self._queue.clear()
                self._open.clear()
                return False
            self._open[bucket] -= 1
            return True

    def drain(self, bucket: int | None) -> None:
        """Copy all that has begun of a bucket, and what comes before it."""
        while self._open[bucket] and self._advance():
            pass

    def _wait(self) -> None:
        while self._advance():
            pass


def copy_piece(into: Tensor, piece: Tensor) -> None:
    into.copy_(piece)


class _Copying:
    """What is left to copy of a bucket. It needs no other device: whoever waits for it does it."""

    span = None

    def __init__(self, snapshot: Snapshot, bucket: int | None) -> None:
        self._snapshot = snapshot
        self._bucket = bucket

    def done(self) -> bool:
        self.wait()
        return True

    def wait(self) -> None:
        self._snapshot.drain(self._bucket)

    def join(self) -> None:
        pass


class CudaSnapshot(Snapshot):
    """The same from a GPU: the host waits for nothing, except where the state is about to change
    outside of a step."""

    def __init__(self, holding: Holding, where: torch.device) -> None:
        self._where = where
        super().__init__(holding)

    def _start(self) -> None:
        super()._start()
        self._side: torch.cuda.Stream | None = None
        self._events: dict[int | None, torch.cuda.Event] = {}
        """By bucket, what tells when it is copied."""

    def copy(self, bucket: int | None) -> Handle | None:
        """The same in the order of the current stream, also where another one copies already."""
        with torch.cuda.device(self._where):
            if bucket in self._events:
                torch.cuda.current_stream().wait_event(self._events[bucket])
                return None
            super().copy(bucket)
            event = torch.cuda.Event()
            event.record()
            self._events[bucket] = event
        return None

    def _begin(self, bucket: int | None, tensor: Tensor) -> Tensor:
        room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return room.copy_(tensor, non_blocking=True)

    def copy_rest(self) -> None:
        self._side = self._side or torch.cuda.Stream(self._where)
        self._side.wait_stream(torch.cuda.current_stream(self._where))
        with torch.cuda.stream(self._side):
            super().copy_rest()

    def _wait(self) -> None:
        for event in list(self._events.values()):  # a bucket without slices may come meanwhile
            event.synchronize()


def snapshot_of(holding: Holding, where: torch.device) -> Snapshot:
    """A snapshot of what a device that computes on ``where`` holds."""
    return CudaSnapshot(holding, where) if where.type == "cuda" else Snapshot(holding)
