"""How fast devices are relative to each other, from the times of equal tasks on them.

A time is the cost of its task divided by the speed of its device. Two devices are compared if a
chain of tasks connects them: one stage has several replicas, or several stages have equal layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Mapping

from piper.base.errors import PiperError
from piper.ir.grouped import grouped

_ROUNDS = 200


def device_speeds(times: Iterable[tuple[int, Hashable, float]]) -> dict[int, float]:
    """The speed of each device, of which the fastest has 1, from devices, tasks and seconds."""
    medians = {
        key: statistics.median(seconds)
        for key, seconds in grouped(((d, task), s) for d, task, s in times if s > 0).items()
    }
    by_device = grouped((device, (task, s)) for (device, task), s in medians.items())
    by_task = grouped((task, (device, s)) for (device, task), s in medians.items())
    _refuse_strangers(by_device, by_task)
    speeds = dict.fromkeys(by_device, 1.0)
    for _ in range(_ROUNDS):
        costs = {
            task: statistics.mean(s * speeds[device] for device, s in row)
            for task, row in by_task.items()
        }
        speeds = {
            device: sum(costs[task] for task, _ in row) / sum(s for _, s in row)
            for device, row in by_device.items()
        }
        fastest = max(speeds.values())
        speeds = {device: speed / fastest for device, speed in speeds.items()}
    return dict(sorted(speeds.items()))


def _refuse_strangers(
    by_device: Mapping[int, Iterable[tuple[Hashable, float]]],
    by_task: Mapping[Hashable, Iterable[tuple[int, float]]],
) -> None:
    """Refuse devices that no chain of equal tasks connects."""
    first, *others = by_device
    reached, left = {first}, [first]
    while left:
        for task, _ in by_device[left.pop()]:
            more = {device for device, _ in by_task[task]} - reached
            reached |= more
            left += more
    strangers = [device for device in others if device not in reached]
    if strangers:
        raise PiperError(
            f"devices {first} and {strangers[0]} ran no equal passes, so their speeds cannot be "
            "compared: profile a strategy in which they replicate each other, or have equal layers"
        )
