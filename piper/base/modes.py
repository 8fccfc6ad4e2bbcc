"""What a step computes depends on no mode of whoever calls it: workers in processes of their own
have none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_KINDS = ("cpu", "cuda", "mps", "xpu")


def autocast_kinds() -> list[str]:
    """The kinds of devices for which autocast is on."""
    return [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, ``dtype`` is torch's default, in all threads: torch has no other one."""
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
def without_modes(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Inside, neither ``torch.autocast`` nor ``torch.inference_mode`` is on, the default device is
    the CPU, and the default dtype is ``dtype``, if given. The first would compute in another
    precision than was captured, the second make state that no later step may change."""
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
