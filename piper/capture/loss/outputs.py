"""The results of a step beside its loss: tensors selected from the model's output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from piper.base.errors import CaptureError
from piper.base.units import class_text

Outputs = Callable[..., Any]
"""A function of the loss's arguments: the model's output and the targets."""


@dataclass(frozen=True, slots=True)
class NamedOutputs:
    """The tensors that ``choose`` names. Scalars: a step reports their mean. Tensors whose
    dimension 0 is the ``rows`` of a microbatch: an evaluation returns them."""

    choose: Outputs
    rows: int | None
    """Rows of a microbatch; None if only scalars are wanted."""

    def __call__(self, output: Any, *targets: Any) -> dict[str, Tensor]:
        chosen = self.choose(output, *targets)
        named = isinstance(chosen, Mapping) and all(isinstance(name, str) for name in chosen)
        if not named or not all(isinstance(x, Tensor) for x in chosen.values()):
            raise CaptureError(
                f"outputs= returns {_said(chosen)}: it must return a dict of tensors by name, "
                "such as {'logits': output.logits}"
            )
        if self.rows is not None:
            for name, x in chosen.items():
                if x.dim() and x.shape[0] != self.rows:
                    raise CaptureError(
                        f"the output {name!r} has shape {list(x.shape)}, and a microbatch on one "
                        f"device has {self.rows} rows: the first dimension of an output must be "
                        "the rows of the batch, or it must be a single number"
                    )
        # copies: an output may be an input, or share memory with a tensor still in use
        wanted = {name: x for name, x in chosen.items() if self.rows is not None or not x.dim()}
        return {name: x.detach().clone() for name, x in wanted.items()}


def _said(chosen: Any) -> str:
    if not isinstance(chosen, Mapping):
        return "a tensor" if isinstance(chosen, Tensor) else class_text(chosen)
    others = {name: x for name, x in chosen.items() if not isinstance(x, Tensor)}
    name, x = next(iter(others.items()), next(iter(chosen.items())))
    return f"{class_text(x)} under the name {name!r}"
