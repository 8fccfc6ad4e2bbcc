"""The figures of a simulated step, without the step itself."""

from __future__ import annotations

from dataclasses import dataclass

from piper.base.units import bytes_text, seconds_text
from piper.cost.simulate.simulation import Simulation
from piper.ir.plan.columns import VERBS, Columns
from piper.ir.plan.instructions import Verb


@dataclass(frozen=True, slots=True)
class Estimate:
    """The time and memory of a step. ``compute``, ``update``, ``exposed`` and ``waiting`` are means
    over all devices, and their sum is ``seconds``."""

    seconds: float
    peak: int
    """The highest peak memory of a device, in bytes."""
    mfu: float
    """Model FLOPs utilization."""
    compute: float
    """Seconds of forwards and backwards."""
    update: float
    """Seconds of optimizer updates without other computation."""
    exposed: float
    """Seconds of exposed communication."""
    waiting: float
    """Seconds in which a device neither computes nor communicates: the pipeline's bubble."""
    fits: bool
    """Whether every device has enough memory."""
    fullest: str
    """The memory of the devices that have the least left."""

    @staticmethod
    def of(simulation: Simulation) -> Estimate:
        """The figures of ``simulation``."""
        step, cluster = simulation.step, simulation.cluster
        rows = list(zip(simulation.classes, simulation.spans, simulation.busy, strict=True))
        count = sum(len(one.devices) for one, _, _ in rows)
        update = computing = exposed = 0.0
        for one, spans, busy in rows:
            verbs = Columns.of(step.plans[one.plan].instructions).verbs.tolist()
            times = zip(verbs, spans.start, spans.end, strict=True)
            updating = sum(b - a for verb, a, b in times if VERBS[verb] is Verb.UPDATE)
            share = len(one.devices) / count
            update += min(updating, busy.computing) * share
            computing += busy.computing * share
            exposed += busy.exposed * share
        left = [
            (cluster.device(one.devices[0]).memory - step.memory[one.plan].peak, one)
            for one, _, _ in rows
        ]
        room, fullest = min(left, key=lambda entry: entry[0])
        return Estimate(
            seconds=simulation.seconds,
            peak=simulation.peak,
            mfu=simulation.mfu,
            compute=computing - update,
            update=update,
            exposed=exposed,
            waiting=max(0.0, simulation.seconds - computing - exposed),
            fits=room >= 0,
            fullest=str(step.memory[fullest.plan]),
        )

    def __str__(self) -> str:
        shares = ", ".join(
            f"{name} {part / self.seconds:.1%}"
            for name, part in (
                ("compute", self.compute),
                ("update", self.update),
                ("exposed communication", self.exposed),
                ("bubble", self.waiting),
            )
        )
        full = "" if self.fits else " (too much)"
        return (
            f"step {seconds_text(self.seconds)}  MFU {self.mfu:.1%}  "
            f"peak memory {bytes_text(self.peak)}{full}  {shares}"
        )
