"""A counter in host memory that CUDA streams increment.

A watchdog of a GPU must not call the driver. A thread that waits in the driver because a stream's
queue is full can block all other threads there, even from destroying an event.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

_RANGE = 2**32


class Signal:
    """Counts the points that streams have reached."""

    def __init__(self) -> None:
        self._memory = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._count = ctypes.c_uint32.from_address(self._memory.data_ptr())
        self.sent = 0

    def send(self, stream: torch.cuda.Stream) -> int:
        """Increment the counter when ``stream`` reaches this point. Returns its value then."""
        self.sent += 1
        address, number = self._memory.data_ptr(), self.sent % _RANGE
        code = _write_value()(stream.cuda_stream, address, number, 0)
        if code:
            raise RuntimeError(f"cuStreamWriteValue32 failed with code {code}")
        return self.sent

    @property
    def reached(self) -> int:
        """The counter's current value."""
        return self.sent - (self.sent - self._count.value) % _RANGE


@cache
def _write_value() -> Any:
    """The driver function that enqueues a 32-bit write on a stream."""
    write = ctypes.CDLL("libcuda.so.1").cuStreamWriteValue32_v2
    write.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    write.restype = ctypes.c_int
    return write
