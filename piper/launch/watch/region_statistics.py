"""Statistics of a step's gradients and activations by region, from the sums of all devices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from piper.ir.dag.facts import ChunkFacts
from piper.ir.grouped import grouped
from piper.program.program import Program
from piper.runtime.activation_sums import ActivationSums
from piper.state.device.element_sums import ElementSums

_Key = TypeVar("_Key", str, int)


@dataclass(frozen=True, slots=True)
class GradientStatistics:
    """The gradients of a region's parameters, over the whole batch and before clipping."""

    norm: float
    largest: float
    """The largest absolute value of an element."""
    zeros: float
    """The share of elements that are 0."""


@dataclass(frozen=True, slots=True)
class ActivationStatistics:
    """The activations that leave a region in the forward, over the whole batch."""

    mean: float
    rms: float
    """The root of the mean square."""
    largest: float
    """The largest absolute value of an element."""
    zeros: float
    """The share of elements that are 0."""


def gradients_by_region(
    program: Program, devices: Mapping[int, Mapping[str, ElementSums]]
) -> dict[str, GradientStatistics]:
    """The statistics of each region, in the order of the model. A parameter of several regions
    counts for the first."""
    sums = _over_devices(devices)
    regions: defaultdict[str, ElementSums] = defaultdict(ElementSums)
    for chunk in program.training_step.facts.whole.chunks:
        for one in (sums.pop(name) for name in chunk.parameters if name in sums):
            regions[_region(chunk)] += one
    return {
        region: GradientStatistics(math.sqrt(x.squares), x.largest, x.zeros / x.elements)
        for region, x in regions.items()
    }


def activations_by_region(
    program: Program, devices: Mapping[int, ActivationSums]
) -> dict[str, ActivationStatistics]:
    """The statistics of each region, in the order of the model; none of a region whose only results
    are the loss and the outputs."""
    made = _over_devices({device: one.made for device, one in devices.items()})
    read = _over_devices({device: one.read for device, one in devices.items()})
    facts = program.training_step.facts
    model = facts.whole
    padded = {v for chunk in model.chunks if chunk.sorted_rows is not None for v in chunk.outputs}
    """Experts make rows that nobody reads, after those routed to them."""
    known = {**read, **{value: own for value, own in made.items() if value not in padded}}
    readers = grouped((value, chunk) for chunk in model.chunks for value in chunk.inputs)

    def sums(value: int) -> ElementSums | None:
        """Those of a value or, if only redistributions make and read it, of what they give."""
        layouts = [place for one in facts.models.values() for place in one.values[value].placements]
        if all(place.dim is not None for place in layouts) and value in known:
            return known[value]
        moved = [x.outputs[0] for x in readers[value] if x.moving is not None]
        return next((own for own in map(sums, moved) if own is not None), None)

    regions: dict[str, list[tuple[int, ElementSums]]] = {}
    for chunk in model.chunks:
        for value in chunk.outputs:
            outside = any(not chunk.tags.items() <= x.tags.items() for x in readers.get(value, ()))
            if outside and (own := sums(value)) is not None:
                weight = math.prod(model.values[value].shape)
                regions.setdefault(_region(chunk), []).append((weight, own))
    return {region: _weighted(values) for region, values in regions.items()}


def _over_devices(devices: Mapping[int, Mapping[_Key, ElementSums]]) -> dict[_Key, ElementSums]:
    sums: defaultdict[_Key, ElementSums] = defaultdict(ElementSums)
    for own in devices.values():
        for key, one in own.items():
            sums[key] += one
    return dict(sums)


def _region(chunk: ChunkFacts) -> str:
    return " ".join(f"{name}[{index}]" for name, index in chunk.tags.items())


def _weighted(values: list[tuple[int, ElementSums]]) -> ActivationStatistics:
    """Several devices may have computed the same elements, all of a value equally often: means over
    all of them are the means over the value. Values weigh by their size."""
    size = sum(weight for weight, _ in values)
    return ActivationStatistics(
        sum(weight * x.total / x.elements for weight, x in values) / size,
        math.sqrt(sum(weight * x.squares / x.elements for weight, x in values) / size),
        max(x.largest for _, x in values),
        sum(weight * x.zeros / x.elements for weight, x in values) / size,
    )
