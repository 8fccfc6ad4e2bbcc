"""Applies strategies to captured models: makes their DAGs, facts and code, as one device of each
group size sees them. Results are cached for later strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from piper.base.errors import DirectiveError
from piper.capture.captured_facts import Known, facts_of
from piper.capture.chunk.donation import consume_inputs
from piper.capture.chunk.expert_regions import sorted_rows
from piper.capture.chunk.joint import Joint
from piper.capture.chunk.split_passes import Passes
from piper.capture.code.chunk_program import ChunkProgram
from piper.capture.code.executables import ChunkSignature, Executables
from piper.capture.experts.batch_rows import Rows, rows_of
from piper.capture.experts.share import trace_share, with_rows
from piper.capture.model import Captured
from piper.capture.shard.local_chunks import Sharding
from piper.ir.dag.build import build, of_segments
from piper.ir.dag.dag import Dag
from piper.ir.dag.facts import Facts, Model
from piper.ir.passes import RematPolicy
from piper.ir.rules import ShardRule
from piper.program.compile.derived_plans import DerivedPlans
from piper.program.compile.shardings import shardings_of
from piper.program.compile.wiring import (
    refuse_different,
    refuse_other_rows,
    refuse_other_share,
    with_sorted_shares,
)
from piper.strategies.strategy import Strategy


@dataclass(frozen=True)
class Placed:
    """A model under a strategy."""

    dag: Dag
    facts: Facts
    made: Callable[[], Executables]
    """Makes ``code``."""

    @cached_property
    def code(self) -> Executables:
        """Made when it is first asked for: an estimate needs none."""
        return self.made()


class Placer:
    """Applies strategies to one model."""

    def __init__(self, passes: Passes) -> None:
        self.known = Known(passes)
        self._shares: dict[tuple[Joint, int, int, int | None], Joint] = {}
        self._rows: dict[tuple[Captured, Captured | None], Mapping[int, Rows]] = {}
        self._segmented: list[tuple[Captured, Mapping[int, tuple[Sharding, ...]], Captured]] = []
        self._plans = DerivedPlans()
        self._resized: list[tuple[Captured, Sequence[int], int, Captured]] = []
        self._facts_of: dict[
            tuple[Captured, tuple[Joint, ...] | None, tuple[RematPolicy, ...]], Model
        ] = {}

    def facts_of(self, captured: Captured) -> Model:
        """The model's facts under every recomputation policy."""
        return facts_of(captured, captured.remat, known=self.known)

    def with_plans(self, strategy: Strategy, captured: Captured) -> Strategy:
        """``strategy``, with a derived plan for tensor parallelism if the model declares none."""
        return self._plans.added(strategy, captured, lambda: build(self.facts_of(captured)))

    def placed(
        self,
        strategy: Strategy,
        captured: Mapping[int, Captured],
        experts: Iterable[int] = (),
        training: Placed | None = None,
    ) -> Placed:
        """A model under ``strategy``. ``captured`` holds it as one device of each group size sees
        it. Groups of the sizes in ``experts`` run only regions of experts. In evaluation mode, the
        regions of each stage are those of ``training``, so that parameters stay where they are."""
        of, first = next(iter(captured.items()))
        policies = strategy.policies(first.remat)
        facts = {n: self._facts(c, policies) for n, c in captured.items()}
        refuse_different(facts, {n: c.example.size // c.microbatches for n, c in captured.items()})
        stages = training.dag.stages if training else {}
        layout = strategy.layout(build(replace(facts[of], stages=stages)))
        if any(rule.ways > 1 for rules in layout.tensor.values() for rule in rules):
            captured = {n: self._sharded(c, layout) for n, c in captured.items()}
            facts = {n: self._facts(c, policies) for n, c in captured.items()}
            first = captured[of]
        origin = first.cut.origin or range(len(first.chunks))
        shards = {i: layout.shards[at] for i, at in enumerate(origin) if at in layout.shards}
        resized = {}
        for n in experts:
            alone = {node.compute.chunk for node in layout.nodes if node.parts == n}
            chunks = [i for i, at in enumerate(origin) if at in alone]
            resized[n] = self._of_experts(first, chunks, n, of)
        rows = self._rows_of(captured, next(iter(resized.values()), None))
        captured = {**captured, **resized}
        facts |= {n: self._facts(c, policies) for n, c in resized.items()}
        joints = {n: self._joints(c, shards) for n, c in captured.items()}
        models = facts
        if shards:
            models = {n: self._facts(c, policies, joints[n]) for n, c in captured.items()}
        by_expert = any(facts[of].chunks[chunk].sorted_rows for chunk in shards)
        if by_expert:
            facts = {n: with_sorted_shares(facts[n], models[n]) for n in captured}
            models = {n: with_sorted_shares(models[n], facts[n]) for n in captured}
        for n in captured:
            refuse_other_share(facts[n], models[n])
        if first.cut.origin or by_expert:
            whole = layout.model  # segments have the operations of one device alone
            cut = replace(facts[of], stages=layout.stages, flops=whole.flops)
            layout = of_segments(layout, cut, origin)
        dag = strategy.ordered(layout)
        passes = self.known.passes

        def made() -> Executables:
            programs = {
                n: consume_inputs(
                    c.cut, [passes.of(x, dag.policy(i)) for i, x in enumerate(joints[n])]
                )
                for n, c in captured.items()
            }
            return _executables(captured, programs)

        return Placed(dag, Facts(dag.model, _with_rows(models, rows)), made)

    def _facts(
        self,
        captured: Captured,
        policies: Iterable[RematPolicy],
        joints: Sequence[Joint] | None = None,
    ) -> Model:
        key = captured, None if joints is None else tuple(joints), tuple(policies)
        if key not in self._facts_of:
            self._facts_of[key] = facts_of(captured, captured.remat, joints, self.known, key[2])
        return self._facts_of[key]

    def _sharded(self, captured: Captured, dag: Dag) -> Captured:
        """The model as one device sees it under tensor parallelism."""
        shardings = shardings_of(captured, dag)
        for kept, of, known in self._segmented:
            if kept is captured and of == shardings:
                return known
        self._segmented.append(
            (captured, shardings, captured.sharded(shardings, self.known.passes))
        )
        return self._segmented[-1][2]

    def _of_experts(
        self, captured: Captured, experts: Sequence[int], parts: int, of: int
    ) -> Captured:
        """``captured``, as one of ``of`` devices sees it, as one of ``parts`` devices that run only
        the chunks in ``experts`` sees it."""
        for kept, known, size, resized in self._resized:
            if (kept is captured) and (known, size) == (experts, parts):
                return resized
        resized = with_rows(captured, experts, parts, of, self.known.passes)
        self._resized.append((captured, experts, parts, resized))
        return resized

    def _rows_of(
        self, captured: Mapping[int, Captured], experts: Captured | None = None
    ) -> Mapping[int, Rows]:
        """The rows of every value, from comparing two sizes of the model. If ``captured`` has only
        one size, the second is ``experts``, the model resized for groups of experts."""
        most, fewest = captured[min(captured)], captured[max(captured)]
        other = fewest if fewest is not most else experts
        key = most, other
        if key not in self._rows:
            size = most.example.size // most.microbatches
            # a single row would show nothing, so the larger size is analyzed
            self._rows[key] = rows_of(most.cut, size, None if other is None else other.cut)
        return self._rows[key]

    def placed_for_evaluation(
        self,
        strategy: Strategy,
        captured: Mapping[int, Captured],
        experts: Iterable[int],
        training: Placed,
    ) -> Placed:
        """``placed`` for evaluation mode, which also checks the rows of outputs."""
        try:
            placed = self.placed(strategy, captured, experts, training)
        except DirectiveError as error:
            raise DirectiveError(
                f"{error}. In evaluation mode (model.eval()) the model has other regions than in "
                "training mode: a strategy must fit both"
            ) from None
        most = captured[min(captured)]
        refuse_other_rows(most, self._rows_of({min(captured): most}))
        return placed

    def _joints(self, captured: Captured, shards: Mapping[int, ShardRule]) -> tuple[Joint, ...]:
        """The joint graph of each chunk; for sharded experts, that of a device's share."""
        joints = list(captured.joints)
        for i, rule in shards.items():
            if rule.ways > 1:
                by_expert = sorted_rows(captured.chunks[i].body)
                rows = rule.room(by_expert.rows) if by_expert else None
                key = joints[i], rule.ways, rule.dim, rows
                if key not in self._shares:
                    self._shares[key] = trace_share(
                        captured.chunks[i], joints[i], rule.ways, rule.dim, rows, captured.compiler
                    )
                joints[i] = self._shares[key]
        return tuple(joints)


def _with_rows(models: Mapping[int, Model], rows: Mapping[int, Rows]) -> dict[int, Model]:
    """``models`` with the row dimension and row order of every value."""
    return {
        n: replace(
            model,
            values=tuple(
                replace(facts, rows=value_rows.dim, order=value_rows.order)
                for value, facts in enumerate(model.values)
                for value_rows in [rows.get(value, Rows())]  # missing if no chunk reads the value
            ),
        )
        for n, model in models.items()
    }


def _executables(
    captured: Mapping[int, Captured], programs: Mapping[int, tuple[ChunkProgram, ...]]
) -> Executables:
    """``programs`` with all else that a worker needs of the captured model."""
    first = next(iter(captured.values()))
    return Executables(
        pieces=tuple(
            ChunkSignature(c.name, c.parameters, c.buffers, c.updates, c.inputs, c.outputs, c.draws)
            for c in first.chunks
        ),
        programs=programs,
        values={n: tuple(v.spec for v in c.cut.values) for n, c in captured.items()},
        loss=first.cut.loss,
        count=first.cut.count,
        outputs=first.outputs,
        constants=first.constants,
        parameters=first.parameters,
        mixes=None if first.mixing is None else first.mixing.of_rows,
        totals=captured[max(captured)].totals,
    )
