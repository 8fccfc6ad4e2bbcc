"""The precision of a step, and modes of the process. Torch's modes of the caller are turned off, so
that a step computes the same in the caller's process as in worker processes, which have none of
these modes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum

import torch


class Precision(Enum):
    """The precision that a step computes in."""

    FP32 = "fp32"
    """The model's own precision."""
    BF16 = "bf16"
    """bf16, with fp32 weights for the optimizer."""

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that parameters and inputs are cast to; None keeps their own."""
        return torch.bfloat16 if self is Precision.BF16 else None


_KINDS = ("cpu", "cuda", "mps", "xpu")


def autocast_kinds() -> list[str]:
    """The device types for which autocast is on."""
    return [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets torch's default dtype inside, for all threads: torch has no per-thread default."""
    before = torch.get_default_dtype()
    if before is dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def without_collection() -> Iterator[None]:
    """Disables garbage collection: compilation makes millions of small objects and few cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def without_modes(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Inside, ``torch.autocast`` and ``torch.inference_mode`` are off, the default device is the
    CPU, and the default dtype is ``dtype``, if given. Autocast would compute in another precision
    than the captured one. Inference mode would create state that later steps cannot change."""
    with ExitStack() as contexts:
        if dtype is not None:
            contexts.enter_context(default_dtype(dtype))
        for kind in autocast_kinds():
            contexts.enter_context(torch.autocast(kind, enabled=False))
        if torch.is_inference_mode_enabled():
            contexts.enter_context(torch.inference_mode(False))
        if torch.get_default_device().type != "cpu":
            contexts.enter_context(torch.device("cpu"))
        yield
