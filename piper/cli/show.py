"""``piper show``: prints the schedule as a grid or the program as text; writes timeline and DAG
pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from piper.cli.options import (
    AsJson,
    ClusterOption,
    MeshSpec,
    StrategyFile,
    TargetArgument,
    Timeline,
    cluster_of,
)
from piper.cli.output import Output

_DEVICE = "H100"


def show(
    target: TargetArgument,
    strategy: StrategyFile = None,
    mesh: MeshSpec = None,
    timeline: Timeline = None,
    dag: Annotated[
        Path | None,
        typer.Option("--dag", help="Write a page with the DAG after each directive."),
    ] = None,
    text: Annotated[bool, typer.Option(help="Print the DAG and all plans.")] = False,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Show what a program does: a grid of the schedule, or pages to explore.

    Times are those of the cost model; without --cluster, of H100s in one machine.

    Example: piper show train.py --strategy s.json --timeline timeline.html --dag dag.html
    """
    from piper.cli.scripts import program_of, strategy_of
    from piper.cost.cluster import Cluster

    output = Output(as_json)
    with output.guarded():
        chosen = strategy_of(strategy, mesh)
        program = program_of(target, chosen)
        if text:
            output.say(program.text())
        elif timeline is None and dag is None:
            output.say(program.schedule)
        if timeline is not None:
            devices = max(program.devices) + 1
            where = cluster_of(cluster) if cluster else Cluster.of(_DEVICE, devices)
            with output.doing("simulating"):
                program.simulate(where).show(timeline)
            output.wrote("timeline", timeline)
        if dag is not None:
            with output.doing("drawing the DAG"):
                program.show_dag(dag)
            output.wrote("DAG", dag)
        output.give(
            {
                "strategy": program.strategy.to_json(),
                "text": program.text() if text else None,
                "timeline": None if timeline is None else str(timeline),
                "dag": None if dag is None else str(dag),
                "schedule": [
                    {"devices": list(members), "spans": [list(span) for span in spans]}
                    for members, spans in zip(
                        program.schedule.classes.members, program.schedule.spans, strict=True
                    )
                ],
            }
        )
