"""How much communication overlapping hides: experts on processes with a network as slow as their
compute.

Runs in its own network namespace, whose loopback is slowed until the all-to-alls of a step take as
long as all its computation. These run there side by side, with the same model and microbatches:

    1F1B; DualPipeV without its pairs; DualPipeV; with the weights'
    backwards of its pairs apart; the same, ordered by a profile    on two workers
    with --emulate the same of DualPipe too                         on four

With ``--emulate`` computations are sleeps of known length, so that four workers fit on few cores.
The strategies take turns, so that a noisy machine affects all of them. Beside the step times stands
the exposed share of the all-to-alls, as predicted by the plan and as measured. It is given for all
of them, and for those in pairs, since at the start and end of a step there is nothing to pair with.

    python bench/overlap.py [--emulate] [--json FILE]
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import emulated
import slow_link
import torch
import typer
from options import File
from report import Case, Comparison
from torch import Tensor, nn
from turns import Found

import piper
from piper.ir.collectives import Move
from piper.ir.dag.dag import Dag
from piper.ir.dag.filters import Filter
from piper.ir.dag.sizes import Sizes
from piper.ir.ops import Collective, Compute
from piper.launch.watch.step_profile import Profile
from piper.models import MoEConfig, MoETransformer, lm_loss
from piper.strategies import Schedule, dualpipe, dualpipev, mesh, one_f_one_b
from piper.strategies.directives.order import Order
from piper.view.busy import Exposure, Span, all_to_all

VOCAB, SEQ, DIM = 256, 128, 128
WAYS = 2
"""The number of workers over which the experts are sharded."""
SLEEP = 0.02


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def main(
    emulate: Annotated[bool, typer.Option(help="Four workers that sleep for compute.")] = False,
    layers: Annotated[int, typer.Option(help="Layers of the model, at least 4.")] = 4,
    rows: Annotated[int, typer.Option(help="Sequences of a microbatch on each worker.")] = 8,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.")] = 8,
    dropless: Annotated[bool, typer.Option(help="Rows sorted by expert, none dropped.")] = False,
    rounds: Annotated[int, typer.Option(help="How often each strategy is timed.")] = 7,
    file: File = None,
) -> None:
    """Compare schedules over a slow network."""
    if not slow_link.is_inside():
        sys.exit(slow_link.again_inside())
    slow_link.bring_up()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ranks = 2 if emulate else 1
    model, loss, x = (
        _sleepers(layers, WAYS * rows * microbatches)
        if emulate
        else _experts(layers, WAYS * rows * microbatches, None if dropless else 1.25)
    )
    schedules = {"1F1B": one_f_one_b(ranks, microbatches)}
    for name, make in {"DualPipeV": dualpipev, "DualPipe": dualpipe}.items():
        if make is dualpipev or emulate:
            schedules[f"{name} without pairs"] = make(ranks, microbatches).without_pairs()
            schedules[name] = make(ranks, microbatches)
            schedules[f"{name} with weights apart"] = make(ranks, microbatches).with_weights_apart()

    def compiled(schedule: Schedule, costs: piper.Costs | None = None) -> piper.Program:
        strategy = mesh(pp=ranks, dp=WAYS, ep=WAYS, schedule=schedule)
        what = {"inputs": (x,), "targets": (x,), "loss": loss, "optimizer": sgd}
        return piper.compile(model, strategy, costs=costs, **what)

    costs = _slow_down(compiled(schedules["1F1B"]), x)
    programs = {name: compiled(schedule, costs) for name, schedule in schedules.items()}
    for name in [name for name in schedules if name.endswith("weights apart")]:
        known = replace(costs, recorded=_profile(programs[name], x).recorded)
        programs[f"{name}, by a profile"] = compiled(schedules[name], known)
    with contextlib.ExitStack() as stack:
        trainers = {
            name: stack.enter_context(piper.launch(program, on="processes", threads=1))
            for name, program in programs.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        losses: dict[str, list[Tensor]] = {name: [] for name in trainers}
        for _ in range(rounds + 1):
            for name, trainer in trainers.items():
                result = trainer.step(x, x)
                seconds[name].append(result.seconds)
                losses[name].append(result.loss)
        profiles = {name: trainer.profile(x, x) for name, trainer in trainers.items()}
    found = {
        f"piper {name}": Found([float(x) for x in losses[name]], seconds[name][1:])
        for name in trainers
    }
    rate = f"{8e-6 * costs.bytes_per_second:,.0f} Mbit/s"
    workers = f"{len(programs['1F1B'].devices)} workers, loopback at {rate}"
    notes = [note(name, programs[name], profile) for name, profile in profiles.items()]
    kind = "emulated" if emulate else "real kernels"
    case = Case(f"{microbatches} microbatches, {layers} layers", "piper 1F1B", found)
    comparison = Comparison(f"experts over a slow link, {kind}", workers, [case], notes)
    comparison.conclude(file)


def note(name: str, program: piper.Program, profile: Profile) -> str:
    """The exposed share of the all-to-alls, as text."""
    paired = in_pairs(program)
    text = (
        f"{name}: of its dispatch and combine {program.schedule.all_to_all.share:.0%} is exposed "
        f"as predicted by the plan, {profile.all_to_all.share:.0%} as measured"
    )
    if not paired:
        return text
    predicted = among(paired, program.dag, program.schedule.spans)
    measured = among(paired, program.dag, profile.spans.values())
    return f"{text}; in pairs {predicted:.0%} and {measured:.0%}"


def in_pairs(program: piper.Program) -> set[int]:
    """The collectives of passes that the strategy overlaps with passes of other microbatches."""
    orders = [x for x in program.strategy.directives if isinstance(x, Order)]
    groups = [group for order in orders for group in order.groups]
    pairs = [group for group in groups if len({where["MB"] for where in group}) > 1]
    filters = [Filter.of(where) for pair in pairs for where in pair]
    return {
        number
        for number, node in enumerate(program.dag.nodes)
        if isinstance(node.op, Collective) and any(f.accepts(node.tags) for f in filters)
    }


def among(nodes: set[int], dag: Dag, devices: Iterable[Sequence[Span]]) -> float:
    """The exposed share of these all-to-alls."""
    found = Exposure(0.0, 0.0)
    for spans in devices:
        others = [s for s in spans if s.node in nodes or isinstance(dag.nodes[s.node].op, Compute)]
        found += all_to_all(dag, others)
    return found.share


def _experts(layers: int, rows: int, capacity: float | None) -> tuple[nn.Module, Any, Tensor]:
    sizes = {"dim": DIM, "heads": 4, "mlp_dim": 2 * DIM, "max_seq": SEQ, "layers": layers}
    config = MoEConfig(vocab=VOCAB, experts=4, top_k=2, capacity_factor=capacity, **sizes)
    return MoETransformer(config), lm_loss, torch.randint(VOCAB, (rows, SEQ))


def _sleepers(layers: int, rows: int) -> tuple[nn.Module, Any, Tensor]:
    model = emulated.Sleepers(layers, WAYS, DIM, SLEEP)
    return model, emulated.loss, torch.randn(rows, SEQ, DIM)


def _profile(program: piper.Program, x: Tensor) -> Profile:
    with piper.launch(program, on="processes", threads=1) as trainer:
        trainer.step(x, x)
        return trainer.profile(x, x)


def _slow_down(program: piper.Program, x: Tensor) -> piper.Costs:
    """Slow the loopback until all-to-alls take as long as computation; the speeds of both then."""
    profile = _profile(program, x)
    computing = computing_seconds(program, profile)
    # half of each worker's rows stay local; the other halves of all workers share the loopback
    costs = costs_if(program, computing, computing, WAYS)
    slow_link.slow_down(8 * costs.bytes_per_second)
    return costs


def computing_seconds(program: piper.Program, profile: Profile) -> float:
    """Compute time of a step on a device, averaged over devices."""
    ops = [node.op for node in program.dag.nodes]
    return statistics.mean(
        sum(span.end - span.start for span in spans if isinstance(ops[span.node], Compute))
        for spans in profile.spans.values()
    )


def costs_if(
    program: piper.Program, computing: float, communicating: float, ways: int
) -> piper.Costs:
    """The device speeds that give these seconds of computation and of all-to-alls per step."""
    dag, sizes = program.dag, Sizes(program.dag, program.models)
    ops = [node.op for node in dag.nodes if isinstance(node.op, Compute)]
    flops = sum(sizes.facts(op, ways).flops for op in ops) / len(program.devices) * ways
    sent = sum(
        sizes.moved(node)
        for node in dag.nodes
        if isinstance(node.op, Collective) and node.op.kind is Move.ALL_TO_ALL
    )
    return piper.Costs(flops / computing, sent / communicating)


if __name__ == "__main__":
    typer.run(main)
