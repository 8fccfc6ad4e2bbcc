"""``piper demo``: trains a small mixture of experts on four devices and, to compare, on one."""

from __future__ import annotations

from typing import Annotated

import typer

from piper.base.arguments import CompilerName
from piper.cli.output import Output
from piper.launch.launchers import Where


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 60,
    layers: Annotated[int, typer.Option(min=2, help="Transformer blocks.")] = 2,
    dim: Annotated[int, typer.Option(min=4, help="Width of the residual stream.")] = 48,
    experts: Annotated[int, typer.Option(min=2, help="Experts in each block.")] = 4,
    microbatches: Annotated[
        int, typer.Option(min=1, help="Microbatches, for gradient accumulation.")
    ] = 4,
    zero: Annotated[int, typer.Option(min=0, max=3, help="ZeRO level of the replicas.")] = 1,
    on: Annotated[
        Where, typer.Option(help="The launcher, which starts the devices.")
    ] = Where.VIRTUAL,
    compiler: Annotated[CompilerName, typer.Option(help="Runs the chunks.")] = CompilerName.EAGER,
    seed: Annotated[int, typer.Option(help="Of the weights and the batches.")] = 0,
    device: Annotated[str, typer.Option(help="Where to train, such as cpu or cuda.")] = "cpu",
) -> None:
    """Train a small mixture-of-experts language model on four devices, beside the same on one.

    It needs no script, no data and no GPU, and takes about a minute on a laptop.

    Example: piper demo --steps 20 --zero 3 --on processes
    """
    from piper.cli.demo.demo import run

    output = Output(as_json=False)
    with output.guarded():
        run(
            output.out,
            steps=steps,
            layers=layers,
            dim=dim,
            experts=experts,
            microbatches=microbatches,
            zero=zero,
            on=on,
            compiler=compiler,
            seed=seed,
            device=device,
        )
