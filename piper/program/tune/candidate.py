"""A candidate: the choices that make a strategy, as data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from piper.strategies.directives import remat
from piper.strategies.mesh_strategy import FOLDED, LOOPED, mesh
from piper.strategies.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Candidate:
    """The arguments of ``mesh`` under the same names, and what is recomputed."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    schedule: str = "1f1b"
    virtual: int | None = None
    microbatches: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    bucket_mb: float = 25.0
    layout: str = "pipeline-outer"
    by: tuple[int, ...] | None = None
    """The number of regions in each stage; balanced by FLOPs if None."""
    regions: str = "layer"
    recomputed: int = 0
    """How many of the first regions recompute their activations: under most schedules the first
    stages hold those of the most microbatches."""

    @property
    def devices(self) -> int:
        return self.pp * self.dp * self.tp * self.cp

    @property
    def per_rank(self) -> int:
        """Stages of a pipeline rank."""
        return 2 if self.schedule in FOLDED else self.virtual or 1

    @property
    def stages(self) -> int:
        return self.pp * self.per_rank

    @property
    def parts(self) -> int:
        """The number of parts of the batch that devices compute one at a time."""
        return self.dp * self.microbatches

    @property
    def traced(self) -> tuple[int, ...]:
        """What the traced regions depend on."""
        return self.parts, self.tp, self.cp, self.ep, self.sequence_parallel

    @property
    def way(self) -> tuple[int | str, ...]:
        """How it uses the devices: neighbours in the search have the same."""
        return (*self.traced, self.pp, self.zero, self.schedule)

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``mesh`` that are not its defaults."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "recomputed"}
        usual = {f.name: f.default for f in fields(self)} | {"microbatches": None}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in given.items()
            if value != usual[name] and not (self.pp == 1 and name == "schedule")
        }

    @property
    def strategy(self) -> Strategy:
        made = mesh(**self.arguments())
        return Strategy([*made, self._remat()]) if self.recomputed else made

    def _remat(self) -> Any:
        return remat({self.regions: range(self.recomputed)}, "all")

    @property
    def code(self) -> str:
        """The strategy as Python code."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments().items())
        made = f"piper.strategies.mesh({given})"
        return f"{made} + [piper.{self._remat()}]" if self.recomputed else made

    def __str__(self) -> str:
        sizes = [(name, getattr(self, name)) for name in ("pp", "dp", "tp", "cp", "ep")]
        parts = [f"{name} {size}" for name, size in sizes if size > 1] or ["1 device"]
        if self.pp > 1:
            looped = self.schedule in LOOPED
            parts.append(f"{self.schedule}{f' x{self.per_rank}' if looped else ''}")
        parts.append(f"mb {self.microbatches}")
        parts += [f"zero {self.zero}"] if self.zero else []
        parts += ["sp"] if self.sequence_parallel else []
        parts += [f"remat {self.recomputed}"] if self.recomputed else []
        parts += [f"bucket {self.bucket_mb:g} MB"] if self.bucket_mb != 25.0 else []
        parts += [self.layout] if self.layout != "pipeline-outer" else []
        parts += [f"by {','.join(map(str, self.by))}"] if self.by else []
        return ", ".join(parts)
