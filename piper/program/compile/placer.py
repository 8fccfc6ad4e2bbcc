"""Applies strategies to captured models: makes their DAGs, facts and code, as one device of each
group size sees them. Results are cached for later strategies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from piper.base.errors import DirectiveError
from piper.capture.captured_facts import Known, facts_of
from piper.capture.chunk.donation import consume_inputs
from piper.capture.chunk.expert_regions import sorted_rows
from piper.capture.chunk.joint import Joint
from piper.capture.chunk.split_passes import Passes
from piper.capture.code.executables import Executables
from piper.capture.experts.batch_rows import Rows, rows_of
from piper.capture.experts.share import trace_share, with_rows
from piper.capture.model import Captured
from piper.capture.shard.local_chunks import Sharding
from piper.ir.dag.build import build
from piper.ir.dag.dag import Dag
from piper.ir.dag.facts import Facts, Model
from piper.program.compile.shardings import shardings_of
from piper.program.compile.wiring import (
    refuse_different,
    refuse_other_rows,
    refuse_other_share,
    with_sorted_shares,
)
from piper.strategies.directives.tensor_parallel import refuse_other_ways
from piper.strategies.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Placed:
    """A model under a strategy."""

    dag: Dag
    facts: Facts
    code: Executables


class Placer:
    """Applies strategies to one model."""

    def __init__(self, passes: Passes) -> None:
        self._known = Known(passes)
        self._shares: dict[tuple[int, int, int, int | None], Joint] = {}
        self._rows: dict[tuple[int, int], Mapping[int, Rows]] = {}
        self._segmented: list[tuple[Captured, Mapping[int, tuple[Sharding, ...]], Captured]] = []
        self._resized: list[tuple[Captured, Mapping[int, int], int, Captured]] = []

    def facts_of(self, captured: Captured) -> Model:
        """The model's facts under every recomputation policy."""
        return facts_of(captured, captured.remat, known=self._known)

    def placed(
        self, strategy: Strategy, captured: Mapping[int, Captured], experts: Iterable[int] = ()
    ) -> Placed:
        """A model under ``strategy``. ``captured`` holds it as one device of each group size sees
        it. Groups of the sizes in ``experts`` run only regions of experts."""
        known = self._known
        policies = strategy.policies(next(iter(captured.values())).remat)
        facts = {n: facts_of(c, c.remat, None, known, policies) for n, c in captured.items()}
        refuse_different(facts, {n: c.example.size // c.microbatches for n, c in captured.items()})
        whole = facts[next(iter(captured))]
        dag = strategy.apply(build(whole))
        if any(rule.ways > 1 for rules in dag.tensor.values() for rule in rules):
            captured = {n: self._sharded(c, dag) for n, c in captured.items()}
            facts = {n: facts_of(c, c.remat, None, known, policies) for n, c in captured.items()}
            whole = facts[next(iter(captured))]
            dag = strategy.apply(build(whole))
            refuse_other_ways(dag)
        resized = {n: self._of_experts(captured, dag, n) for n in experts}
        rows = self._rows_of(captured, next(iter(resized.values()), None))
        captured = {**captured, **resized}
        for n, resized_model in resized.items():
            facts[n] = facts_of(resized_model, resized_model.remat, None, known, policies)
        joints = {n: self._joints(c, dag) for n, c in captured.items()}
        models = {n: facts_of(c, c.remat, joints[n], known, policies) for n, c in captured.items()}
        if any(dag.model.chunks[chunk].sorted_rows for chunk in dag.shards):
            facts = {n: with_sorted_shares(facts[n], models[n]) for n in captured}
            models = {n: with_sorted_shares(models[n], facts[n]) for n in captured}
            whole = facts[next(iter(captured))]
            dag = strategy.apply(build(whole))
        for n in captured:
            refuse_other_share(facts[n], models[n])
        models = _with_rows(models, rows)
        programs = {
            n: consume_inputs(
                c.cut, [known.passes.of(x, dag.policy(i)) for i, x in enumerate(joints[n])]
            )
            for n, c in captured.items()
        }
        return Placed(dag, Facts(whole, models), Executables.of(captured, programs))

    def _sharded(self, captured: Captured, dag: Dag) -> Captured:
        """The model as one device sees it under tensor parallelism."""
        shardings = shardings_of(captured, dag)
        for kept, of, known in self._segmented:
            if kept is captured and of == shardings:
                return known
        self._segmented.append(
            (captured, shardings, captured.sharded(shardings, self._known.passes))
        )
        return self._segmented[-1][2]

    def _of_experts(self, captured: Mapping[int, Captured], dag: Dag, parts: int) -> Captured:
        """The model as one of ``parts`` devices that run only experts sees it."""
        of, first = next(iter(captured.items()))
        chunks = {node.compute.chunk for node in dag.nodes if node.parts == parts}
        dims = {chunk: dag.shards[chunk].dim for chunk in sorted(chunks)}
        for kept, known, size, resized in self._resized:
            if (kept is first) and (known, size) == (dims, parts):
                return resized
        resized = with_rows(first, dims, parts, of, self._known.passes)
        self._resized.append((first, dims, parts, resized))
        return resized

    def _rows_of(
        self, captured: Mapping[int, Captured], experts: Captured | None = None
    ) -> Mapping[int, Rows]:
        """The rows of every value, from comparing two sizes of the model. If ``captured`` has only
        one size, the second is ``experts``, the model resized for groups of experts."""
        most, fewest = captured[min(captured)], captured[max(captured)]
        other = fewest if fewest is not most else experts
        key = (id(most), id(other))
        if key not in self._rows:
            size = most.example.size // most.microbatches
            # a single row would show nothing, so the larger size is analyzed
            self._rows[key] = rows_of(most.cut, size, None if other is None else other.cut)
        return self._rows[key]

    def placed_for_evaluation(
        self, strategy: Strategy, captured: Mapping[int, Captured], experts: Iterable[int] = ()
    ) -> Placed:
        """``placed`` for evaluation mode, which also checks the rows of outputs."""
        try:
            placed = self.placed(strategy, captured, experts)
        except DirectiveError as error:
            raise DirectiveError(
                f"{error}. In evaluation mode (model.eval()) the model has other regions than in "
                "training mode: a strategy must fit both"
            ) from None
        most = captured[min(captured)]
        refuse_other_rows(most, self._rows_of({min(captured): most}))
        return placed

    def _joints(self, captured: Captured, dag: Dag) -> tuple[Joint, ...]:
        """The joint graph of each chunk; for sharded experts, that of a device's share."""
        joints = []
        for chunk, joint in zip(captured.chunks, captured.joints, strict=True):
            rule = dag.shards.get(chunk.index)
            if rule is not None and rule.ways > 1:
                by_expert = sorted_rows(chunk.body)
                rows = rule.room(by_expert.rows) if by_expert else None
                key = (id(joint), rule.ways, rule.dim, rows)
                if key not in self._shares:
                    self._shares[key] = trace_share(
                        chunk, joint, rule.ways, rule.dim, rows, captured.compiler
                    )
                joint = self._shares[key]
            joints.append(joint)
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
