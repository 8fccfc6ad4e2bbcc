"""Makes the step on one part of a batch (a microbatch, a replica) one of the whole batch: sums and
weighted means are taken over the whole batch, and operations that mix rows are found."""

from __future__ import annotations

from dataclasses import replace

from piper.capture.batch import Batch
from piper.capture.experts.part_rules import part_rules
from piper.capture.graphs import ancestors, returned
from piper.capture.loss.row_mixing import RowWalk
from piper.capture.loss.whole_means import WholeMeans
from piper.capture.loss.whole_sums import take_whole_sums
from piper.capture.trace.exported import Exported


def of_whole_batch(exported: Exported, batch: Batch, parts: int) -> Exported:
    """The step with weighted means (over targets that are not ignored) taken over the whole batch,
    and a note of the first operation that mixes rows."""
    graph = exported.graph
    given = zip(exported.inputs, batch.tensors, strict=True)
    rows = {node for node, x in given if batch.has_rows(x)}
    size = max((node.meta["val"].shape[0] for node in rows), default=1)
    before, loss = returned(graph), exported.loss
    sums = (loss, exported.count) if exported.count else ()
    scope = ancestors((loss, *exported.outputs), ()) - ancestors(sums, ())
    walk = RowWalk(graph, exported.inputs, rows, part_rules(size))
    means = WholeMeans(graph, walk, parts, exported.inputs, scope)
    for fold in exported.folds:
        fold.mirrored(graph, lambda node: (walk.states.get(node), means.counted.get(node)))
    now = dict(zip(before, returned(graph), strict=True))
    inputs, totals = means.finished(now[loss])
    mixing = walk.states[now[loss]].mixing
    if exported.count is None and parts > 1 and rows:
        take_whole_sums(graph, now[loss], means, parts, size)
        now = dict(zip(before, returned(graph), strict=True))
    return replace(
        exported,
        inputs=exported.inputs | inputs,
        loss=now[loss],
        count=exported.count and now[exported.count],
        outputs=tuple(now[node] for node in exported.outputs),
        updates={name: now[node] for name, node in exported.updates.items()},
        totals=totals,
        mixing=mixing,
    )
