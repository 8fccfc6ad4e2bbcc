"""Warnings about the labels of the example batch of a model that computes its own loss.

A library's model trains without complaint on labels that are shifted twice, or that count padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from piper.base.errors import warn

_IGNORED = -100


def warn_of_labels(model: nn.Module, inputs: object) -> None:
    """Warn of labels that a model of transformers would shift a second time, and of labels at
    positions that the attention mask calls padding."""
    if not isinstance(inputs, Mapping):
        return
    ids, labels, mask = (_rows(inputs.get(x)) for x in ("input_ids", "labels", "attention_mask"))
    if labels is None or getattr(model, "loss_type", None) != "ForCausalLM":
        return
    counted = labels != _IGNORED
    if ids is not None and ids.shape == labels.shape and _are_shifted(ids, labels, counted):
        warn(
            "inputs['labels'] are inputs['input_ids'] shifted by one, and "
            f"{type(model).__name__} shifts labels itself: each token would learn the token after "
            "the next; give labels that are not shifted, labels=input_ids"
        )
    config = getattr(model, "config", None)
    pad, ends = (getattr(config, f"{name}_token_id", None) for name in ("pad", "eos"))
    where, padded = "inputs['attention_mask'] is 0", None if mask is None else mask == 0
    if padded is None and ids is not None and pad is not None and pad != ends:
        where, padded = f"inputs['input_ids'] is the padding, {pad}", ids == pad
    if padded is None or padded.shape != labels.shape:
        return
    count = int((padded & counted)[:, 1:].sum())  # the model leaves out the first label
    if count:
        warn(
            f"inputs['labels'] has {count} labels where {where}, and the loss counts these: set "
            f"them to {_IGNORED}, which it ignores, labels.masked_fill(padding, {_IGNORED})"
        )


def _rows(x: Any) -> Tensor | None:
    """``x`` if it is a tensor of rows of tokens that has values."""
    known = isinstance(x, Tensor) and not (x.is_meta or isinstance(x, FakeTensor))
    return x if known and x.dim() == 2 else None


def _are_shifted(ids: Tensor, labels: Tensor, counted: Tensor) -> bool:
    """Whether each label is the token after that of its place, and not also that of its place."""
    next_ones = (labels[:, :-1] == ids[:, 1:])[counted[:, :-1]]
    own = (labels == ids)[counted]
    return bool(next_ones.numel() and next_ones.all() and not own.all())
