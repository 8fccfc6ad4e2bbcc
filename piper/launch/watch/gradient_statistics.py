"""Statistics of the gradients of a step by region, from the sums of all devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from piper.program.program import Program
from piper.state.device.gradient_size import GradientSums


@dataclass(frozen=True, slots=True)
class GradientStatistics:
    """The gradients of a region's parameters, over the whole batch and before clipping."""

    norm: float
    largest: float
    """The largest absolute value of an element."""
    zeros: float
    """The share of elements that are 0."""


def statistics_of(
    program: Program, devices: Mapping[int, Mapping[str, GradientSums]]
) -> dict[str, GradientStatistics]:
    """The statistics of each region, in the order of the model. A parameter of several regions
    counts for the first."""
    sums: dict[str, GradientSums] = {}
    for own in devices.values():
        for name, one in own.items():
            sums[name] = sums[name] + one if name in sums else one
    regions: dict[str, GradientSums] = {}
    for chunk in program.training_step.facts.whole.chunks:
        region = " ".join(f"{name}[{index}]" for name, index in chunk.tags.items())
        for one in (sums.pop(name) for name in chunk.parameters if name in sums):
            regions[region] = regions[region] + one if region in regions else one
    return {
        region: GradientStatistics(math.sqrt(x.squares), x.largest, x.zeros / x.elements)
        for region, x in regions.items()
    }
