"""Makes the step on one part of a batch (a microbatch, a replica) one of the whole batch: sums and
weighted means are taken over the whole batch, and operations that mix rows are found."""

from __future__ import annotations

from dataclasses import replace

from piper.capture.batch import Batch
from piper.capture.experts.part_rules import part_rules
from piper.capture.graphs import returned
from piper.capture.loss.row_mixing import RowWalk
from piper.capture.loss.whole_means import MeanEnds, take_whole_means
from piper.capture.loss.whole_sums import take_whole_sums
from piper.capture.trace.exported import Exported


def of_whole_batch(exported: Exported, batch: Batch, parts: int) -> Exported:
    """The step with weighted means (over targets that are not ignored) taken over the whole batch,
    and a note of the first operation that mixes rows."""
    graph, folds = exported.graph, exported.folds
    given = zip(exported.inputs, batch.tensors, strict=True)
    rows = {node for node, x in given if batch.has_rows(x)}
    rules = part_rules(max((node.meta["val"].shape[0] for node in rows), default=1))
    before = returned(graph)
    if exported.count is None:
        take_whole_sums(graph, exported.inputs, rows, exported.loss, parts, rules, folds)
    now = dict(zip(before, returned(graph), strict=True))
    loss, outputs = now[exported.loss], tuple(now[node] for node in exported.outputs)
    ends = MeanEnds(
        inputs=exported.inputs,
        rows=rows,
        loss=loss,
        results=outputs if exported.count else (loss, *outputs),
        kept=(loss, exported.count) if exported.count else (),
    )
    inputs, totals = take_whole_means(graph, ends, parts, rules, folds)
    now = dict(zip(before, returned(graph), strict=True))
    loss = now[exported.loss]
    return replace(
        exported,
        inputs=exported.inputs | inputs,
        loss=loss,
        count=exported.count and now[exported.count],
        outputs=tuple(now[node] for node in exported.outputs),
        updates={name: now[node] for name, node in exported.updates.items()},
        totals=totals,
        mixing=RowWalk(graph, exported.inputs, rows, loss, rules, folds).states[loss].mixing,
    )
