"""What a step reports beside its loss: tensors that are chosen from what the model returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from piper.base.errors import CaptureError

Outputs = Callable[..., Any]
"""A function of what the loss is given, the model's output and the targets."""


@dataclass(frozen=True, slots=True)
class NamedOutputs:
    """The tensors that ``choose`` names: numbers, of which a step reports the mean, and tensors
    whose first dimension are the ``rows`` of a microbatch, which an evaluation returns."""

    choose: Outputs
    rows: int | None
    """How many rows a microbatch has; None if only numbers are wanted."""

    def __call__(self, output: Any, *targets: Any) -> dict[str, Tensor]:
        found = self.choose(output, *targets)
        named = isinstance(found, Mapping) and all(isinstance(name, str) for name in found)
        if not named or not all(isinstance(x, Tensor) for x in found.values()):
            raise CaptureError(
                f"outputs= returns {_said(found)}: it must return a dict of tensors by name, "
                "such as {'logits': output.logits}"
            )
        if self.rows is not None:
            for name, x in found.items():
                if x.dim() and x.shape[0] != self.rows:
                    raise CaptureError(
                        f"the output {name!r} has shape {list(x.shape)}, and a microbatch on one "
                        f"device has {self.rows} rows: the first dimension of an output must be "
                        "the rows of the batch, or it must be a single number"
                    )
        # copies: an output may be an input, or share its memory with what is still computed on
        wanted = {name: x for name, x in found.items() if self.rows is not None or not x.dim()}
        return {name: x.detach().clone() for name, x in wanted.items()}


def _said(found: Any) -> str:
    if not isinstance(found, Mapping):
        return "a tensor" if isinstance(found, Tensor) else f"a {type(found).__name__}"
    others = {name: x for name, x in found.items() if not isinstance(x, Tensor)}
    name, x = next(iter(others.items()), next(iter(found.items())))
    return f"a {type(x).__name__} under the name {name!r}"
