"""The scalars of a step reach every device: the loss, what it is divided by, the gradients' norm,
how many rows each expert has, and what else is reported.

F loss MB[0] ─▶ ┌ all_reduce ┐ ─loss─▶ ...          update ─▶ ┌ all_reduce ┐ ─norm─▶
F loss MB[1] ─▶ └            ┘                      update ─▶ └            ┘

An update waits for the loss if it must divide by it, and for the norm if gradients are clipped;
then the norm is taken before the updates and not after them.
"""

from __future__ import annotations

from dataclasses import replace

from piper.ir.collectives import CollectiveKind
from piper.ir.dag.dag import Dag
from piper.ir.dag.values import ExtraRole, Role
from piper.ir.ops import Collective, Group, Update
from piper.lower.rewriter import Rewriter

STREAM = "scalars"


def add_scalar_reductions(dag: Dag, *, clip: bool) -> Dag:
    """``dag`` with the sums of its scalars over all devices."""
    out = Rewriter(dag)
    groups = {id(node.devices): node.devices for node in dag.nodes}
    everyone = tuple(sorted({device for group in groups.values() for device in group}))
    loss = _all_reduce(out, ExtraRole.LOSS, everyone, _losses(dag))
    updates = [i for i, node in enumerate(dag.nodes) if isinstance(node.op, Update)]
    needed = [loss] if dag.model.count is not None else []
    if clip and updates:
        gradients = [value for i in updates for value in dag.nodes[i].reads]
        norm = _all_reduce(out, ExtraRole.NORM, everyone, list(dict.fromkeys(gradients)))
        needed.append(norm)
    for i in updates:
        node = dag.nodes[i]
        out.nodes[i] = replace(node, reads=(*node.reads, *needed))
    if not clip and updates:
        done = [value for i in updates for value in dag.nodes[i].writes]
        _all_reduce(out, ExtraRole.NORM, everyone, done)
    for output in dag.model.outputs:
        if not dag.model.values[output].shape:
            _all_reduce(out, ExtraRole.OUTPUT, everyone, _of_each(dag, [output]), of=output)
    for chunk, counts in _counts(dag).items():
        _all_reduce(out, ExtraRole.LOAD, everyone, counts, of=chunk)
    return out.dag()


def _counts(dag: Dag) -> dict[int, list[int]]:
    """For each chunk of experts on sorted rows, the counts of all microbatches."""
    wanted = {
        chunk.inputs[chunk.sorted_rows.counts]: chunk.index
        for chunk in dag.model.chunks
        if chunk.sorted_rows is not None
    }
    found: dict[int, list[int]] = {chunk: [] for chunk in wanted.values()}
    for number in sorted(dag.producers) if wanted else ():
        if number < dag.first_extra:
            value, _ = dag.table.value(number)
            if value.role is Role.ACTIVATION and value.of in wanted:
                found[wanted[value.of]].append(number)
    return found


def _losses(dag: Dag) -> list[int]:
    """The losses of all microbatches, then what each is divided by."""
    return _of_each(dag, [dag.model.loss] + ([] if dag.model.count is None else [dag.model.count]))


def _of_each(dag: Dag, wanted: list[int]) -> list[int]:
    """The values of all microbatches that are ``wanted``, one after another."""
    found: dict[int, list[int]] = {value: [] for value in wanted}
    for number in sorted(dag.producers):
        if number < dag.first_extra:
            value, _ = dag.table.value(number)
            if value.role is Role.ACTIVATION and value.of in found:
                found[value.of].append(number)
    return [number for value in wanted for number in found[value]]


def _all_reduce(
    out: Rewriter, role: ExtraRole, everyone: Group, reads: list[int], of: int = 0
) -> int:
    op = Collective(CollectiveKind.ALL_REDUCE, (everyone,))
    made = out.value(role, of)
    return out.add(op, made, devices=everyone, stream=STREAM, reads=reads, made_by=0)
