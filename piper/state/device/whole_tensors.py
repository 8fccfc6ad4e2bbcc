"""Converts between the parameter fragments of devices and whole tensors under the model's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from piper.ir.rules import Bucket
from piper.ir.tensors import TensorSpec
from piper.state.device.bucket_layout import BucketLayout
from piper.state.device.device_state import DeviceState, HeldBucket
from piper.state.device.pieces import whole_shard


@dataclass(frozen=True, slots=True)
class Portion:
    """A contiguous range of elements of one parameter's shard."""

    name: str
    part: int
    """Index of the shard along the bucket's axis, such as the share of the experts."""
    offset: int
    data: Tensor


@dataclass(frozen=True, slots=True)
class Portions:
    """One device's contribution to the whole tensors."""

    parameters: list[Portion]
    buffers: dict[str, Tensor]


def export(state: DeviceState, only: frozenset[str] | None = None) -> Portions:
    """The contribution of ``state``, limited to the names in ``only`` if it is given. Of equal
    copies of parameters, only the first contributes."""
    parameters: list[Portion] = []
    for held in state.held.values():
        layout = held.layout
        if layout.copy > 0:
            continue
        for fragment in layout.fragments:
            if only is None or fragment.name in only:
                data = held.updated[fragment.start : fragment.stop]
                parameters.append(Portion(fragment.name, layout.part, fragment.offset, data.cpu()))
    buffers = {
        name: x.cpu().clone() for name, x in state.buffers.items() if only is None or name in only
    }
    return Portions(parameters, buffers)


def assemble(
    specs: Mapping[str, TensorSpec], buckets: Iterable[Bucket], portions: Iterable[Portion]
) -> dict[str, Tensor]:
    """Whole tensors from portions, in the shapes of their parameters."""
    layouts = {name: b for b in buckets for name in b.parameters}
    rows: dict[tuple[str, int], Tensor] = {}
    for portion in portions:
        bucket = layouts[portion.name]
        size = bucket.sizes[bucket.parameters.index(portion.name)]
        key = (portion.name, portion.part)
        if key not in rows:
            rows[key] = torch.empty(size, dtype=portion.data.dtype)
        rows[key][portion.offset : portion.offset + portion.data.numel()] = portion.data
    tensors: dict[str, Tensor] = {}
    for (name, part), row in rows.items():
        bucket = layouts[name]
        layout = BucketLayout(bucket, {n: specs[n] for n in bucket.parameters}, 0, part)
        if name not in tensors:
            tensors[name] = torch.empty(specs[name].shape, dtype=row.dtype)
        shard = layout.shaped(row, name)
        for piece in whole_shard(layout, name):
            piece.whole.of(tensors[name]).copy_(piece.shard.of(shard))
    return tensors


def restore(state: DeviceState, tensors: Mapping[str, Tensor]) -> None:
    """Load parameters and buffers from whole tensors. Names not in ``tensors`` stay unchanged."""
    for held in state.held.values():
        names = [n for n in held.layout.bucket.parameters if n in tensors]
        if names:
            _restore_bucket(held, {n: tensors[n] for n in names}, state.where)
    for name, buffer in state.buffers.items():
        if name in tensors:
            buffer.copy_(tensors[name])


def _restore_bucket(held: HeldBucket, tensors: Mapping[str, Tensor], where: torch.device) -> None:
    layout = held.layout
    whole = torch.zeros(layout.padded, dtype=layout.bucket.gradient, device=where)
    low, high = layout.mine
    if layout.scattered or held.is_copy:
        whole[low:high].copy_(held.updated)
    else:
        whole.copy_(held.flat)
    for name, tensor in tensors.items():
        shard = layout.view(whole, name)
        for piece in whole_shard(layout, name):
            piece.shard.of(shard).copy_(piece.whole.of(tensor))
    if layout.scattered or held.is_copy:
        held.updated.copy_(whole[low:high])
    if layout.scattered:
        held.publish()
    else:
        for name in tensors:
            layout.view(held.flat, name).copy_(layout.view(whole, name))
