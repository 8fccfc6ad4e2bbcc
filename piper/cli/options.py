"""Arguments and options shared by several commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from piper.launch.launchers import Where

if TYPE_CHECKING:
    from piper.cost.cluster import Cluster

TargetArgument = Annotated[
    Path,
    typer.Argument(
        metavar="TARGET",
        help="A script that defines `job`, or the folder of a saved program.",
        show_default=False,
    ),
]
Script = Annotated[
    Path,
    typer.Argument(metavar="SCRIPT", help="A script that defines `job`.", show_default=False),
]
StrategyFile = Annotated[
    Path | None,
    typer.Option("--strategy", "-s", help="A strategy as a JSON file.", show_default=False),
]
MeshSpec = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        "-m",
        help="Arguments of piper.strategies.mesh, such as pp=2,dp=2,schedule=dualpipev.",
        show_default=False,
    ),
]
JobSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting of the job: a parameter of `job` that has a default, such as lr=1e-4 or "
        "model.layers=8. With a script, --help lists them.",
        show_default=False,
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option("--device", help="cpu or cuda; overrides the job's device.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
On = Annotated[
    Where,
    typer.Option("--on", help="The launcher, which starts the devices."),
]
LaunchOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--launch",
        metavar="NAME=VALUE",
        help="An option of the launcher, such as restarts=3 or timeout=5min.",
        show_default=False,
    ),
]
Limit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        help="Memory of a device, such as 80GiB; refuse a program that needs more.",
        show_default=False,
    ),
]
_CLUSTER = typer.Option(
    "--cluster",
    "-c",
    help="A TOML file, or DEVICESxKIND such as 8xH100, or MACHINESxDEVICESxKIND: 4x8xH100.",
    show_default=False,
)
ClusterName = Annotated[str, _CLUSTER]
ClusterOption = Annotated[str | None, _CLUSTER]
CostsOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        "-p",
        help="Costs from `piper profile --costs`; the cluster's figures apply to the rest.",
        show_default=False,
    ),
]
Timeline = Annotated[
    Path | None,
    typer.Option("--timeline", help="Write a page with the timeline.", show_default=False),
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", help="Write a trace for Perfetto.", show_default=False),
]


def cluster_of(text: str) -> Cluster:
    """A cluster from a TOML file or a short form such as 4x8xH100."""
    from piper.cost.cluster import Cluster

    short = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z][\w-]*)", text)
    if short is not None and not Path(text).exists():
        return Cluster.of(short[3], int(short[2]), int(short[1] or 1))
    return Cluster.load(text)
