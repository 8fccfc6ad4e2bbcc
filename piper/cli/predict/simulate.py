"""``piper simulate``: simulates a step on a cluster that need not exist."""

from __future__ import annotations

from piper.cli.options import (
    AsJson,
    ClusterName,
    CostsOption,
    JobSettings,
    MeshSpec,
    StrategyFile,
    TargetArgument,
    Timeline,
    Trace,
    cluster_of,
)
from piper.cli.output import Output


def simulate(
    target: TargetArgument,
    cluster: ClusterName,
    strategy: StrategyFile = None,
    mesh: MeshSpec = None,
    settings: JobSettings = None,
    profile: CostsOption = None,
    timeline: Timeline = None,
    trace: Trace = None,
    as_json: AsJson = False,
) -> None:
    """Predict a step on a cluster: time, bubbles, exposed communication, memory.

    Example: piper simulate train.py --strategy s.json --cluster cluster.toml --timeline t.html
    """
    from piper.cli.print_tables import facts_table
    from piper.cli.scripts import program_of, strategy_of
    from piper.cost.recorded import Recorded

    output = Output(as_json)
    with output.guarded():
        where = cluster_of(cluster)
        recorded = Recorded.load(profile) if profile else None
        chosen = strategy_of(strategy, mesh)
        program = program_of(target, chosen, settings, cluster=where)
        with output.doing("simulating"):
            simulation = program.simulate(where, recorded)
        output.say(facts_table(simulation.facts, str(where)), *str(simulation).splitlines()[1:])
        output.give({"kind": "simulation", **simulation.to_json()})
        if timeline is not None:
            simulation.show(timeline)
            output.wrote("timeline", timeline)
        if trace is not None:
            simulation.trace(trace)
            output.wrote("trace", trace)
