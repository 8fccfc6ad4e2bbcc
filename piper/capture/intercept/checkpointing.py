"""``torch.utils.checkpoint`` becomes a plain call of its function while a model is traced.

``remat`` decides for each chunk what is saved and what is recomputed, so the call has no effect of
its own. Its line is recorded, so that a warning can name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from piper.base.errors import CaptureError
from piper.capture.blame import calling_line


@contextmanager
def plain_checkpoints() -> Iterator[list[str]]:
    """Call checkpointed functions directly. Yields a list that collects the calling lines."""
    lines: list[str] = []

    def around(*args: Any, **kwargs: Any) -> Iterator[None]:
        lines.append(calling_line())
        yield

    def reentrant(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        lines.append(calling_line())
        result = function(*args)
        if _any_needs_gradient(pytree.tree_leaves(result)) and not _any_needs_gradient(args):
            raise CaptureError(
                f"torch.utils.checkpoint is called with use_reentrant=True at {calling_line()}, "
                "and none of its inputs needs a gradient: torch would train no parameter inside; "
                "say use_reentrant=False"
            )
        return result

    module: Any = checkpoint
    before = module._checkpoint_without_reentrant_generator
    module._checkpoint_without_reentrant_generator = around
    module.CheckpointFunction.apply = staticmethod(reentrant)
    try:
        yield lines
    finally:
        del module.CheckpointFunction.apply
        module._checkpoint_without_reentrant_generator = before


def _any_needs_gradient(values: Iterable[object]) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in values)
