"""``piper show``: prints the schedule as a grid or the program as text; writes timeline and DAG
pages. ``piper cache``: the programs compiled before."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from piper.base.units import bytes_text, counted, waiting_text
from piper.cli.options import (
    AsJson,
    ClusterOption,
    JobSettings,
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
    settings: JobSettings = None,
    timeline: Timeline = None,
    dag: Annotated[
        Path | None,
        typer.Option("--dag", help="Write a page with the DAG after each directive."),
    ] = None,
    text: Annotated[bool, typer.Option(help="Print the DAG and all plans.")] = False,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Show a program: its schedule as a grid, or as pages for a browser.

    Times come from the cost model; the default cluster is H100s in one machine.

    Example: piper show train.py --strategy s.json --timeline timeline.html --dag dag.html
    """
    from piper.cli.scripts import program_of, strategy_of
    from piper.cost.cluster import Cluster

    output = Output(as_json)
    with output.guarded():
        chosen = strategy_of(strategy, mesh)
        program = program_of(target, chosen, settings)
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


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove the programs.")] = False,
    days: Annotated[
        float, typer.Option("--days", min=0, help="Only programs not used for so many days.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Show the programs that were compiled before, or remove them.

    Example: piper cache --clear --days 30
    """
    from piper.program.cache.entries import Entries

    output = Output(as_json)
    with output.guarded():
        entries, now = Entries.of_user(), time.time()
        unused = [] if entries is None else [e for e in entries if now - e.used >= days * 86400]
        rows, table = [], Table("program", "compiled", "last used", "size")
        for entry in unused:
            about, age = entry.about, now - entry.used
            what = ("cannot be read", "") if about is None else (about.what, about.compiled)
            table.add_row(*what, f"{waiting_text(age)} ago", bytes_text(entry.nbytes))
            rows.append({"program": what[0], "bytes": entry.nbytes, "seconds_unused": age})
            if clear:
                entry.remove()
        removed = clear and bool(unused)
        where = "the cache is off" if entries is None else f"{entries.folder}: "
        if entries is not None:
            total = bytes_text(sum(entry.nbytes for entry in unused))
            where += f"{counted(len(unused), 'program')}, {total}{' removed' * removed}"
        output.say(*([table] if unused else []), where)
        output.give({"entries": rows, "removed": removed})
