"""Converts between the slices of devices and whole tensors under the model's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from piper.state.checkpoint.slices import Slice
from piper.state.device.device_state import DeviceState
from piper.state.weights.first_tensors import FirstTensor


def export(state: DeviceState, only: frozenset[str] | None = None) -> list[Slice]:
    """The parameters and buffers of ``state``, limited to the names in ``only`` if it is given, in
    host memory of their own. Of equal copies of parameters, only the first contributes."""
    slices = state.model_slices(lambda x: () if x.copy else x.fragments, state.buffers)
    slices = [one for one in slices if only is None or one.name in only]
    return [replace(one, at=one.tensor.detach().to("cpu", copy=True)) for one in slices]


def assembled(slices: Iterable[Slice]) -> dict[str, Tensor]:
    """Whole tensors from slices, by name. The last of equal slices counts."""
    tensors: dict[str, Tensor] = {}
    for one in slices:
        if one.name not in tensors:
            tensors[one.name] = torch.empty(one.shape, dtype=one.dtype)
        one.box.of(tensors[one.name]).copy_(one.tensor)
    return tensors


def restore(state: DeviceState, tensors: Mapping[str, Tensor]) -> None:
    """Load parameters and buffers from whole tensors. Names not in ``tensors`` stay unchanged."""
    for held in state.held.values():
        names = [name for name in held.layout.bucket.parameters if name in tensors]
        held.fill(lambda name: FirstTensor.in_memory(name, tensors[name].detach()), names)
    for name, buffer in state.buffers.items():
        if name in tensors:
            buffer.copy_(tensors[name])
