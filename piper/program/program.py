"""A compiled program: the plan of every device, and the DAG, strategy and facts behind it.

``dag``, ``plans``, ``memory`` and ``text()`` can be read and printed. ``save`` and ``load`` use a
folder of JSON files. Python objects (the model's weights, the optimizer, ``init``) are not saved;
pass them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from piper.base.modes import without_modes
from piper.base.paths import path_of, write_file
from piper.base.units import counted
from piper.cost.cluster import Cluster
from piper.cost.simulate.simulation import Simulation, simulate
from piper.cost.tasks import CostModel
from piper.ir.dag.build import build
from piper.ir.dag.layout_text import layouts_text
from piper.ir.dag.sizes import Sizes
from piper.lower.background_copies import saving
from piper.lower.traffic import Traffic, traffic_of
from piper.lower.waste import Waste, waste_of, waste_text
from piper.program import storage
from piper.program.compiled import Compiled
from piper.state.optimizer.factory import OptimizerFactory
from piper.state.optimizer.optimizer_checks import check_factory
from piper.state.optimizer.probe import cost_of
from piper.state.optimizer.scheduler import SchedulerFactory, try_scheduler
from piper.state.weights.source import Source
from piper.view.pages.dag_page import dag_page
from piper.view.timetable import Timetable

_TRAINERS = ("fit", "step", "iterate", "evaluate", "export", "state_dict", "load_state_dict")
"""Methods of a trainer that people look for here."""


@dataclass(frozen=True)
class Program(Compiled):
    """A model compiled under a strategy."""

    tracing: str = field(default_factory=str, repr=False, compare=False)
    """Which modules of the model were traced once for all their equals, or why they were not."""
    again: Callable[..., Program] | None = field(default=None, repr=False, compare=False)
    timings: Mapping[str, float] = field(default_factory=dict, repr=False, compare=False)
    """The seconds of each stage of the compilation; empty for a loaded program."""

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> object:
            hint = f": piper.launch(program) returns a trainer, with {name}" * (name in _TRAINERS)
            raise AttributeError(f"Program has no {name!r}{hint}", name=name, obj=self)

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """The bytes that each rank class sends in one step, in the order of ``plans``."""
        dag = self.dag
        sizes = Sizes(dag, self.models)
        return tuple(traffic_of(dag, plan, sizes) for plan in self.plans)

    @cached_property
    def waste(self) -> tuple[Waste, ...]:
        """Duplicate computation, and gathers caused by missing sharding rules, largest share
        first."""
        return waste_of(self.dag, self.models, max(t.nbytes for t in self.traffic))

    def simulate(self, cluster: Cluster, costs: CostModel | None = None) -> Simulation:
        """Simulates a step on ``cluster``, which need not exist: its time, and the start and end of
        every node. ``costs`` take precedence where they know a duration: measurements of this or
        another strategy (``trainer.profile(...).recorded``), or another cost model."""
        return simulate(self.lowered_step, cluster, costs)

    @cached_property
    def saving(self) -> Program:
        """The program of the step after a background save: its plans also copy the saved state of
        each bucket to the host, before the bucket's update."""
        lowered = saving(replace(self.lowered, plans=self.plans), self.models, self.settings)
        return replace(self.with_plans(lowered.plans), lowered=lowered)

    @property
    def schedule(self) -> Timetable:
        """The start and end of each node in the simulated execution that ordered the plans. It
        prints as a grid of computations."""
        lowered, issued = self.lowered, self.lowered.schedule
        times = issued.order, issued.start, issued.end
        return Timetable(lowered.dag, lowered.classes, *times, tuple(self.stages))

    def show_dag(self, path: str | Path) -> None:
        """Write a self-contained HTML page with the DAG after each directive and after lowering."""
        first = build(self.training_step.facts.whole)
        after = zip(self.strategy.directives, self.strategy.steps(first), strict=True)
        steps = [("build", first), *((str(d), dag) for d, dag in after), ("lowered", self.dag)]
        title = f"DAG for {counted(len(self.devices), 'device')}"
        page = dag_page(title, steps, stages=self.stages, models=self.models)
        write_file(path, page)

    def text(self) -> str:
        """A readable text: the strategy, the DAG, the layouts of its values, the waste, the plans
        and their memory."""
        parts = [str(self.strategy), str(self.dag), self.layouts]
        parts += [waste_text(self.waste)] if self.waste else []
        return "\n\n".join([*parts, *map(str, self.plans), *map(str, self.memory)])

    @property
    def layouts(self) -> str:
        """The layout of every value on its devices, one per line: sharded, replicated or a partial
        sum along each axis of their mesh."""
        return layouts_text(self.dag, self.models)

    def __str__(self) -> str:
        head = (
            f"program for {counted(len(self.devices), 'device')}: "
            f"{counted(len(self.plans), 'distinct plan')}, "
            f"{counted(self.microbatches, 'microbatch')}"
        )
        return "\n".join([head, *(f"  {memory}" for memory in self.memory)])

    def save(self, path: str | Path) -> None:
        """Write the program to the folder ``path``, without weights and callables."""
        storage.save(self, path_of(path))

    @staticmethod
    def load(
        path: str | Path,
        *,
        source: Source | None = None,
        optimizer: OptimizerFactory | None = None,
        scheduler: SchedulerFactory | None = None,
    ) -> Program:
        """The program in the folder ``path``. Weights and callables are given again. The optimizer
        may differ from the one at compilation: plans are made for the one given here."""
        folder = path_of(path)
        return Program.of_files(storage.files_in(folder), folder, source, optimizer, scheduler)

    @staticmethod
    def of_files(
        files: Mapping[str, bytes],
        folder: Path,
        source: Source | None,
        optimizer: OptimizerFactory | None,
        scheduler: SchedulerFactory | None,
    ) -> Program:
        """The program of ``files``, which were read from ``folder``."""
        program = storage.load(files, folder, source, optimizer, scheduler, Program)
        if optimizer is None:
            return program
        with without_modes(program.training.default_dtype):
            try_scheduler(optimizer, scheduler, program.trained)
            cost = cost_of(optimizer, program.trained, program.device)
            if cost != program.settings.optimizer:
                settings = replace(program.settings, optimizer=cost)
                program = storage.with_plans(replace(program, settings=settings), Program)
            check_factory(optimizer, cost, program.dag, program.trained, program.device)
        return program
