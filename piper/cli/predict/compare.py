"""``piper compare``: compares two strategies, or two results, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from piper.base.errors import PiperError
from piper.base.units import bytes_text, seconds_text
from piper.cli.options import AsJson, ClusterOption, CostsOption, Timeline, cluster_of
from piper.cli.output import Output

if TYPE_CHECKING:
    from piper.cost.recorded import Recorded
    from piper.cost.simulate.simulation import Simulation

_FIGURES = {
    "seconds": ("step", seconds_text),
    "tokens_per_second": ("tokens/s", lambda x: f"{x:,.0f}"),
    "mfu": ("MFU", lambda x: f"{x:.1%}"),
    "bubble": ("bubble", lambda x: f"{x:.1%}"),
    "exposed_communication_seconds": ("exposed communication", seconds_text),
    "peak_bytes": ("peak memory", bytes_text),
}

File = Annotated[
    Path,
    typer.Argument(
        help="A strategy, or the output of `simulate --json` or `profile --json`.",
        show_default=False,
    ),
]


def compare(
    first: File,
    second: File,
    script: Annotated[
        Path | None,
        typer.Option("--script", help="The script with the job, to compare strategies."),
    ] = None,
    cluster: ClusterOption = None,
    profile: CostsOption = None,
    timeline: Timeline = None,
    as_json: AsJson = False,
) -> None:
    """Compare two strategies on a cluster, or two saved results.

    Example: piper compare a.json b.json --script train.py --cluster 8xH100 --timeline both.html
    """
    from piper.base.paths import write_file
    from piper.cli.print_tables import comparison_table
    from piper.cost.recorded import Recorded
    from piper.view.pages.timeline_page import timeline_page

    output = Output(as_json)
    with output.guarded():
        recorded = Recorded.load(profile) if profile else None
        results: list[tuple[dict[str, Any], Simulation | None]] = []
        for path in (first, second):
            results.append(_result(path, script, cluster, recorded))
        (a, simulated_a), (b, simulated_b) = results
        rows = []
        for key, (name, shown) in _FIGURES.items():
            if key in a and key in b:
                ratio = b[key] / a[key] if a[key] else None
                rows.append((name, shown(a[key]), shown(b[key]), ratio))
        output.say(comparison_table([first.name, second.name], rows))
        ratios = {k: b[k] / a[k] for k in _FIGURES if a.get(k) and k in b}
        output.give({"first": a, "second": b, "second_over_first": ratios})
        if timeline is not None:
            if simulated_a is None or simulated_b is None:
                raise PiperError(
                    "a timeline needs the strategies themselves: results have figures only"
                )
            page = timeline_page(simulated_a.run(first.stem), simulated_b.run(second.stem))
            write_file(timeline, page)
            output.wrote("timeline", timeline)


def _result(
    path: Path, script: Path | None, cluster: str | None, recorded: Recorded | None
) -> tuple[dict[str, Any], Simulation | None]:
    """The figures of a file, and their simulation if the file is a strategy."""
    from piper.base.reading import MalformedError, file_bytes, parsed
    from piper.cli.scripts import program_of
    from piper.strategies.strategy import Strategy

    try:
        data = parsed(file_bytes(path))
    except (OSError, MalformedError) as error:
        raise PiperError(f"{path} cannot be read: {error}") from error
    if isinstance(data, dict) and data.get("kind") in ("simulation", "profile"):
        return data, None
    if script is None or cluster is None:
        raise PiperError(
            f"{path} is a strategy: say with --script what to train and with --cluster where"
        )
    where = cluster_of(cluster)
    strategy = Strategy.load(path)
    simulation = program_of(script, strategy, cluster=where).simulate(where, recorded)
    return {"kind": "simulation", **simulation.to_json()}, simulation
