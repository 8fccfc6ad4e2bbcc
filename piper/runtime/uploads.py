"""Host-to-device copies of batches."""

from __future__ import annotations

import torch
from torch import Tensor


class Uploads:
    """Copies CPU tensors to one device. The host waits for these copies, since the caller may reuse
    the memory. It waits for nothing else: the copies run on their own stream."""

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._stream = torch.cuda.Stream(where) if where.type == "cuda" else None

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        """``tensors`` on the device, ready for the current stream."""
        if self._stream is None or not any(x.device.type == "cpu" for x in tensors):
            return tensors
        reader = torch.cuda.current_stream(self._where)
        with torch.cuda.stream(self._stream):
            moved = [
                x.to(self._where, non_blocking=True) if x.device.type == "cpu" else x
                for x in tensors
            ]
        reader.wait_stream(self._stream)
        for x, given in zip(moved, tensors, strict=True):
            if given.device.type == "cpu":
                x.record_stream(reader)
        self._stream.synchronize()
        return moved
