"""Strategies with tensor parallelism, for tests: those of ``piper.strategies.mesh`` on meshes with
an additional axis ``tp``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import piper
from piper.strategies import mesh
from piper.strategies.directives import Directive, place, shard
from piper.strategies.directives.place import Place

DENSE: dict[str, int | str] = {
    "*.w_qkv": "column",
    "*.attention.w_out": "row",
    "*.mlp.w_in": "column",
    "*.mlp.w_gate": "column",
    "*.mlp.w_out": "row",
}
"""The sharded weights of ``piper.models.DenseTransformer``, as in Megatron."""


def tensor_mesh(
    *,
    tp: int,
    dp: int = 1,
    parameters: Mapping[str, int | str] | None,
    sequence: bool = False,
    inner: str = "tp",
    **options: Any,
) -> list[Directive]:
    """``mesh`` whose stages have ``dp * tp`` devices; the axis ``inner`` has adjacent devices."""
    axes = {"dp": dp, "tp": tp} if inner == "tp" else {"tp": tp, "dp": dp}
    directives = list(mesh(dp=dp * tp, **options).directives)
    found = [_meshed(d, axes) if isinstance(d, Place) else d for d in directives]
    last = max(i for i, d in enumerate(found) if d.name in ("place", "replicate"))
    rule = shard({}, axis="tp", parameters=parameters, sequence=sequence)
    return [*found[: last + 1], rule, *found[last + 1 :]]


def _meshed(placed: Place, axes: Mapping[str, int]) -> Place:
    devices = piper.Mesh(placed.devices, **axes)
    made = place(placed.where, devices=devices, batch="dp")
    return replace(made, stream=placed.stream)
