"""What a step computes depends on no mode of the thread that calls it: workers in processes of
their own have none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_KINDS = ("cpu", "cuda", "mps", "xpu")


def autocast_kinds() -> list[str]:
    """The kinds of devices for which autocast is on."""
    return [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]


@contextmanager
def without_modes() -> Iterator[None]:
    """Inside, neither ``torch.autocast`` nor ``torch.inference_mode`` is on, and the default device
    is the CPU. The first would compute in another precision than was captured, the second make
    state that no later step may change."""
    with ExitStack() as contexts:
        for kind in autocast_kinds():
            contexts.enter_context(torch.autocast(kind, enabled=False))
        if torch.is_inference_mode_enabled():
            contexts.enter_context(torch.inference_mode(False))
        if torch.get_default_device().type != "cpu":
            contexts.enter_context(torch.device("cpu"))
        yield
