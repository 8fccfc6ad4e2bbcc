"""Refuses different parameters that share memory: an update of one would change the other, but only
if both are on the same device. One parameter under two names (a tie) is allowed."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from piper.base.errors import CaptureError


def refuse_shared_memory(model: nn.Module, names: dict[str, str]) -> None:
    """Refuse a trained parameter that shares an element with another parameter or a buffer.
    ``names`` maps paths to the user's paths."""
    by_storage: defaultdict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        real = not tensor.is_meta and not isinstance(tensor, FakeTensor)  # others have no memory
        if real and tensor.layout is torch.strided and tensor.numel():
            by_storage[tensor.untyped_storage().data_ptr()].append((path, tensor))
    for sharing in by_storage.values():
        for (one, a), (two, b) in combinations(sharing, 2):
            if (a.requires_grad or b.requires_grad) and _overlap(a, b):
                first, second = (names[path].removeprefix("model.") for path in (one, two))
                raise CaptureError(
                    f"{first} and {second} are two tensors in one memory, so that training one "
                    f"would change the other: make them one parameter (assign the same "
                    f"nn.Parameter to both), or give {second} a copy of its own with clone()"
                )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors in the same storage share an element."""
    (low, high), (start, end) = _range(a), _range(b)
    if high <= start or end <= low:
        return False
    if a.dtype != b.dtype:
        return True
    first, size = min(low, start), a.element_size()
    marks = torch.zeros((max(high, end) - first) // size, dtype=torch.bool)
    places = [((at - first) // size, x) for at, x in ((low, a), (start, b))]
    (here, x), (there, y) = places
    marks.as_strided(x.shape, x.stride(), here).fill_(True)
    return bool(marks.as_strided(y.shape, y.stride(), there).any())


def _range(x: Tensor) -> tuple[int, int]:
    """The byte range in its storage: start of the first element, end of the last."""
    last = sum((int(n) - 1) * int(by) for n, by in zip(x.shape, x.stride(), strict=True))
    start = int(x.storage_offset()) * x.element_size()
    return start, start + (last + 1) * x.element_size()
