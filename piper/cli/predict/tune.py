"""``piper tune``: searches for the fastest strategy of a job on a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from piper.cli.options import (
    AsJson,
    ClusterName,
    JobSettings,
    LaunchOptions,
    On,
    Script,
    cluster_of,
)
from piper.cli.output import Output
from piper.launch.launchers import Where


def tune(
    script: Script,
    cluster: ClusterName,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Devices to use; default: all of the cluster."),
    ] = None,
    settings: JobSettings = None,
    seconds: Annotated[float, typer.Option(min=0, help="Seconds of the search.")] = 30.0,
    regions: Annotated[
        str | None,
        typer.Option(
            help="The regions that stages are made of; default: layer.", show_default=False
        ),
    ] = None,
    measure: Annotated[
        int, typer.Option(min=0, help="Train a few steps with so many of the best.")
    ] = 0,
    on: On = Where.PROCESSES,
    options: LaunchOptions = None,
    most: Annotated[int, typer.Option("--top", min=1, help="Rows of the table.")] = 10,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the best strategy to this JSON file, for --strategy."),
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Write a page with all candidates.")] = None,
    as_json: AsJson = False,
) -> None:
    """Search for the fastest strategy that fits, and say why it is.

    --on and --launch are for --measure, which needs the devices.

    Example: piper tune train.py --cluster 4x8xH100 --out best.json --page tuned.html
    """
    from piper.base.paths import write_file
    from piper.cli.scripts import job_in, launch_options
    from piper.launch.tuning import tune as tuned_for

    output = Output(as_json)
    with output.guarded():
        where = cluster_of(cluster)
        tuned = tuned_for(
            job_in(script, settings).capture(),
            where,
            devices=devices,
            seconds=seconds,
            regions=regions,
            measure=measure,
            on=on.value,
            options=launch_options(options),
        )
        strategy = tuned.strategy
        output.say(tuned.table(most), f"best: {tuned.best.candidate.code}", tuned.why, tuned.proven)
        output.give(tuned.to_json())
        if out is not None:
            write_file(out, json.dumps(strategy.to_json(), indent=2) + "\n")
            output.wrote("strategy", out)
        if page is not None:
            tuned.show(page)
            output.wrote("page", page)
