"""``piper profile``: runs a few steps and measures every instruction. ``piper measure``: measures
this machine as a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, track

from piper.cli.options import (
    AsJson,
    ClusterOption,
    DeviceName,
    JobSettings,
    LaunchOptions,
    MeshSpec,
    On,
    Script,
    StrategyFile,
    Timeline,
    Trace,
    cluster_of,
)
from piper.cli.output import Output
from piper.launch.launchers import Where


def profile(
    script: Script,
    strategy: StrategyFile = None,
    mesh: MeshSpec = None,
    settings: JobSettings = None,
    on: On = Where.VIRTUAL,
    options: LaunchOptions = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before the measurement.")] = 1,
    kernels: Annotated[
        bool, typer.Option(help="Also record the kernels of the last step.")
    ] = False,
    timeline: Timeline = None,
    trace: Trace = None,
    costs: Annotated[
        Path | None,
        typer.Option("--costs", help="Write the measured costs, for `piper simulate --profile`."),
    ] = None,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Train a few steps and measure every instruction of every device.

    With --cluster, the timeline shows the simulated step beside the measured one.

    Example: piper profile train.py --strategy s.json --on processes --timeline t.html
    """
    from piper.cli.print_tables import facts_table
    from piper.cli.scripts import job_in, launch_options, strategy_of
    from piper.launch.launch import launch

    output = Output(as_json)
    with output.guarded():
        chosen = strategy_of(strategy, mesh)
        where = cluster_of(cluster) if cluster else None
        program = job_in(script, settings).compile(chosen, cluster=where)
        trainer = launch(program, on=on.value, **launch_options(options))
        with trainer:
            quiet = not (output.err.is_terminal and output.speaks)
            for _ in track(range(warmup), "warming up", console=output.err, disable=quiet):
                trainer.profile()
            with output.doing(f"measuring {steps} steps"):
                measured = trainer.profile(steps=steps, kernels=kernels)
        output.say(facts_table(measured.facts, "measured"), *str(measured).splitlines()[1:])
        output.give({"kind": "profile", **measured.to_json()})
        if not output.speaks:
            return
        beside = program.simulate(where, measured.recorded) if where else None
        if timeline is not None:
            measured.show(timeline, beside=beside)
            output.wrote("timeline", timeline)
        if trace is not None:
            measured.trace(trace, beside=beside)
            output.wrote("trace", trace)
        if costs is not None:
            measured.recorded.save(costs)
            output.wrote("costs", costs)


def measure(
    out: Annotated[Path, typer.Option("--out", "-o", help="The TOML file to write.")] = Path(
        "cluster.toml"
    ),
    device: DeviceName = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Devices of the machine; by default its GPUs, or 2 on a CPU."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine: products by shape and dtype, memory, launches, links.

    Example: piper measure -o mine.toml; piper simulate train.py --cluster mine.toml
    """
    from piper.base.reading import torch_name
    from piper.cost.measure.this_machine import measure_machine

    output = Output(as_json)
    shown = output.err.is_terminal and not as_json
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with (
        output.guarded(),
        Progress(*columns, console=output.err, disable=not shown, transient=True) as bar,
    ):
        task = bar.add_task("starting", total=1.0)
        cluster = measure_machine(
            device, devices, lambda what, done: bar.update(task, description=what, completed=done)
        )
        out.write_text(cluster.to_toml())
        one, link = cluster.device(0), cluster.machines[0].inside
        best = {torch_name(dtype): one.fastest(dtype) for dtype in one.efficiency}
        output.say(
            str(cluster),
            *(f"  {name}: up to {rate / 1e12:,.2f} TFLOPS" for name, rate in best.items()),
            f"  memory {one.bandwidth / 1e9:,.0f} GB/s, kernels {one.overhead * 1e6:.1f} us",
            f"  link {link.bandwidth / 1e9:,.2f} GB/s, {link.latency * 1e6:.0f} us",
        )
        output.give({"kind": "cluster", "path": str(out), "flops": best})
        output.wrote("cluster", out)
