"""Copies a device's part to host memory for a background save, as it was when the save began.

Parameters and optimizer state change only in the update of their bucket. So the COPY instructions
of the next step copy them bucket by bucket; the rest is copied at the end of that step. Buffers
change in forwards and are copied at once. Plain values are already in the part.

On a CPU, a thread copies pieces while the device waits for others. The rest of a bucket is copied
just before its update. A copy that ran beside a computation would slow it down by its own duration.
On a GPU, copies run on their own stream into pinned memory.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import replace

import torch
from torch import Tensor

from piper.base.handles import Handle
from piper.ir.grouped import grouped
from piper.state.checkpoint.index import Part

_PIECE = 2**20
"""Bytes copied between checks whether the device still waits."""


class Snapshot:
    """Copies of the slices of one part. This class is for a CPU."""

    def __init__(self, part: Part) -> None:
        """``part`` refers to the live state."""
        self._part: Part | None = part
        self._copies: list[Tensor | None] = [None] * len(part.slices)
        self._left = grouped((bucket, i) for i, bucket in enumerate(part.buckets))
        """By bucket, the slices whose copy has not begun. None: buffers."""
        self._all_begun = threading.Event()
        self._queue: deque[tuple[int | None, Tensor, Tensor]] = deque()
        """Pieces to copy: bucket, target and source."""
        self._open: Counter[int | None] = Counter()
        """The number of queued pieces by bucket."""
        self._lock = threading.Lock()
        self._error: Exception | None = None
        """Why a copy failed. The save then fails; training continues."""
        self._waiting = threading.Event()
        """Whether the device is idle."""
        self._thread: threading.Thread | None = None
        now = self.copy(None)
        if now is not None:
            now.wait()

    def copy(self, bucket: int | None) -> Handle | None:
        """Begin to copy a bucket's slices. Returns a handle if the host must finish the copy."""
        for i in self._left.pop(bucket, ()):
            self._copies[i] = self._begin(bucket, self._held(i))
        return _Copying(self, bucket) if self._open[bucket] else None

    def copy_rest(self) -> None:
        """Begin all remaining copies. ``result``, in the writing thread, finishes them."""
        for bucket in list(self._left):
            self.copy(bucket)
        self._all_begun.set()
        self._waiting.set()

    def finish(self) -> None:
        """Finish all copies. The state may change once this returns."""
        self.copy_rest()
        self._wait()

    def abandon(self) -> None:
        """Drop the snapshot, unless all its copies have begun."""
        if self._left:
            self._part = None
            self._queue.clear()
        self._all_begun.set()
        self._waiting.set()

    def result(self) -> Part | None:
        """Waits for all copies and returns them; None if the snapshot was dropped. For the writing
        thread."""
        self._all_begun.wait()
        part = self._part
        if part is None:
            return None
        self._wait()
        if self._error is not None:
            raise self._error
        copies = [copy for copy in self._copies if copy is not None]
        pairs = zip(part.slices, copies, strict=True)
        self._part, self._copies = None, []
        return replace(part, slices=[replace(held, at=copy) for held, copy in pairs])

    def _held(self, i: int) -> Tensor:
        assert self._part is not None
        return self._part.slices[i].tensor.detach()

    # copying on a CPU

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

    def wait_begins(self) -> None:
        """The device is idle: the copy thread may run until ``wait_ends``."""
        if self._queue:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="piper copy", daemon=True)
                self._thread.start()
            self._waiting.set()

    def wait_ends(self) -> None:
        """The device continues: the copy thread pauses."""
        self._waiting.clear()

    def _run(self) -> None:
        """Copy while the device waits. Ends once all copies have begun; ``result`` finishes."""
        while not self._all_begun.is_set():
            self._waiting.wait()
            if not self._advance():
                self._waiting.clear()

    def _advance(self) -> bool:
        """Copy one piece. False if there was none, or if the copy failed."""
        with self._lock:
            if not self._queue:
                return False
            bucket, into, piece = self._queue.popleft()
            try:
                copy_piece(into, piece)
            except Exception as error:  # noqa: BLE001 - result raises it
                self._error = error
                self._queue.clear()
                self._open.clear()
                return False
            self._open[bucket] -= 1
            return True

    def drain(self, bucket: int | None) -> None:
        """Copy all queued pieces of a bucket, and the pieces queued before them."""
        while self._open[bucket] and self._advance():
            pass

    def _wait(self) -> None:
        while self._advance():
            pass


def copy_piece(into: Tensor, piece: Tensor) -> None:
    into.copy_(piece)


class _Copying(Handle):
    """A handle for the rest of a bucket's copy. It involves no other device: waiting for it does
    the copy."""

    def __init__(self, snapshot: Snapshot, bucket: int | None) -> None:
        self._snapshot = snapshot
        self._bucket = bucket

    def done(self) -> bool:
        self.wait()
        return True

    def wait(self) -> None:
        self._snapshot.drain(self._bucket)


class CudaSnapshot(Snapshot):
    """A snapshot of GPU state. The host waits for copies only before the state changes outside of a
    step."""

    def __init__(self, part: Part, where: torch.device) -> None:
        self._where = where
        self._side: torch.cuda.Stream | None = None
        self._events: dict[int | None, torch.cuda.Event] = {}
        """By bucket, the event recorded after its copy."""
        super().__init__(part)

    def copy(self, bucket: int | None) -> Handle | None:
        """Copy on the current stream. If another stream already copies the bucket, the current
        stream waits for it."""
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
        for event in list(self._events.values()):  # copy() may add an empty bucket meanwhile
            event.synchronize()


def snapshot_of(part: Part, where: torch.device) -> Snapshot:
    """A snapshot of the ``part`` of a device that computes on ``where``."""
    return CudaSnapshot(part, where) if where.type == "cuda" else Snapshot(part)
