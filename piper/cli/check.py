"""``piper check`` and ``piper verify``: whether a strategy is right for a job. ``check`` compiles
and reports memory and communication, ``verify`` trains a few steps beside plain PyTorch."""

from __future__ import annotations

from typing import Annotated

import typer

from piper.base.units import bytes_text, counted, nbytes_of
from piper.cli.options import (
    AsJson,
    JobSettings,
    Limit,
    MeshSpec,
    Script,
    StrategyFile,
    TargetArgument,
)
from piper.cli.output import REFUSED, Output


def check(
    target: TargetArgument,
    strategy: StrategyFile = None,
    mesh: MeshSpec = None,
    settings: JobSettings = None,
    memory_limit: Limit = None,
    as_json: AsJson = False,
) -> None:
    """Compile a job under a strategy and report its memory and communication. Runs nothing.

    Exits with 0 if the strategy is valid, or with 1 and the reason if it is refused.

    Example: piper check train.py --mesh pp=4,dp=2,schedule=1f1b,microbatches=8,zero=1 \
--memory-limit 80GiB
    """
    from piper.cli.print_tables import memory_json, memory_table
    from piper.cli.scripts import program_of, strategy_of

    output = Output(as_json)
    with output.guarded():
        chosen = strategy_of(strategy, mesh)
        limit = None if memory_limit is None else nbytes_of("--memory-limit", memory_limit)
        program = program_of(target, chosen, settings, memory_limit=limit)
        traffic = program.traffic
        output.say(
            f"{counted(len(program.devices), 'device')}, "
            f"{counted(program.microbatches, 'microbatch')}, "
            f"{counted(len(program.dag.nodes), 'node')}, "
            f"{counted(len(program.plans), 'distinct plan')}: verified",
            memory_table(program.memory),
            *(str(sent) for sent in traffic if sent.flows),
        )
        if limit is not None:
            most = max(memory.peak for memory in program.memory)
            output.say(f"fits {bytes_text(limit)}: {most / limit:.1%} of it at most")
        output.give(
            {
                "devices": list(program.devices),
                "microbatches": program.microbatches,
                "nodes": len(program.dag.nodes),
                "plans": len(program.plans),
                "memory_limit": limit,
                "memory": memory_json(program.memory),
                "traffic": [
                    {
                        "devices": list(sent.devices),
                        "bytes": sent.nbytes,
                        "flows": [
                            {
                                "kind": flow.kind,
                                "stream": flow.stream,
                                "count": flow.count,
                                "bytes": flow.nbytes,
                            }
                            for flow in sent.flows
                        ],
                    }
                    for sent in traffic
                ],
            }
        )


def verify(
    script: Script,
    strategy: StrategyFile = None,
    mesh: MeshSpec = None,
    settings: JobSettings = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to train.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Compare a few training steps under a strategy with plain PyTorch on one device.

    Exits with 0 if losses, gradient norms and parameters are equal up to reduction order, or
    with 1 and the first module and pass that differ.

    Example: piper verify train.py --mesh pp=2,dp=2,zero=2
    """
    from piper.cli.scripts import job_in, strategy_of
    from piper.launch.verify import verify as verified

    output = Output(as_json)
    with output.guarded():
        chosen = strategy_of(strategy, mesh)
        job = job_in(script, settings)
        batches = job.batches() if callable(job.batches) else job.batches
        with output.doing("training"):
            report = verified(job.compile(chosen), steps=steps, batches=batches)
        output.say(str(report))
        output.give({"kind": "verification", **report.to_json()})
    if not report.equal:
        raise typer.Exit(REFUSED)
