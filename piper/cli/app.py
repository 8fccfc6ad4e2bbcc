"""The typer application with all commands."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from piper.cli.check import check, verify
from piper.cli.demo.command import demo
from piper.cli.live.status import status
from piper.cli.predict.compare import compare
from piper.cli.predict.simulate import simulate
from piper.cli.predict.tune import tune
from piper.cli.profile import measure, profile
from piper.cli.show import cache, show
from piper.cli.train import TrainCommand, train

app = typer.Typer(
    name="piper",
    help="Distributed PyTorch training from a plain model and a short strategy.",
    epilog="A script defines `def job() -> piper.Job`. Exit codes: 0 done, 1 refused, 2 wrong "
    "usage, 3 a run failed, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(version("piper-train"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    return


app.command(no_args_is_help=True, cls=TrainCommand)(train)
for command in (check, verify, show, simulate, tune, profile, compare):
    app.command(no_args_is_help=True)(command)
app.command()(demo)
app.command()(cache)
app.command()(measure)
app.command()(status)


def main() -> None:
    """The entry point of the program ``piper``."""
    app()
