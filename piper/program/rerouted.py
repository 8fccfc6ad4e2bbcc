"""The program without one data-parallel replica, from the compiled program alone.

Its computations are those of the program: nothing is traced, and lowering makes and proves its
plans. Any replica may be lost: those of a strategy compute the same, so there is one such program.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper.base.errors import DirectiveError
from piper.ir.dag.facts import Facts
from piper.program.compiled import Step
from piper.program.program import Program
from piper.program.storage import with_plans
from piper.strategies.replicas.lost_replica import without_replica


@dataclass(frozen=True, slots=True)
class ReroutedProgram:
    """A program without one replica."""

    program: Program
    replicas: tuple[tuple[int, ...], ...]
    """The devices of each replica of the whole program, in corresponding order; this one does
    without the last."""


def rerouted(program: Program) -> ReroutedProgram:
    """``program`` without its last replica, or a DirectiveError that says why it has none to
    lose."""
    found = without_replica(program.strategy)
    before, now = found.parts
    training, evaluation = program.steps
    if training.facts.models.keys() != {before}:
        raise DirectiveError(
            "this strategy cannot go on without a replica: some regions split the rows of a "
            "microbatch over other devices than the rest"
        )
    trained = _resized(training, before, now)
    evaluated = _resized(evaluation, before, now)
    if evaluation.facts is training.facts:
        evaluated = replace(evaluated, facts=trained.facts)
    changed = replace(
        program, strategy=found.strategy, training_step=trained, evaluation_step=evaluated
    )
    return ReroutedProgram(with_plans(changed, Program), found.replicas)


def _resized(step: Step, before: int, now: int) -> Step:
    """``step`` as of groups of ``now`` devices: each has as many rows as before, of more, smaller
    microbatches."""
    facts, code = step.facts, step.code
    return Step(
        Facts(facts.whole, {now: facts.models[before]}),
        replace(code, programs={now: code.programs[before]}, values={now: code.values[before]}),
    )
