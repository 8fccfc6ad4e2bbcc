"""Assigns each op of the exported graph to a chunk.

A chunk is a maximal run of ops with one stack of regions. Ops outside any region join the chunk
that feeds them, or the chunk of their first user. An op that depends on no parameter, no input and
no random draw is constant and belongs to no chunk.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from piper.capture.graphs import computed_from, has_tensor, is_random, operations
from piper.capture.regions import Region, tags_of
from piper.capture.trace.exported import Exported


def constants_of(exported: Exported) -> set[fx.Node]:
    """Ops that depend on no parameter, input or random draw; results are never constant."""
    fixed = {n for n, name in exported.buffers.items() if name not in exported.updates}
    returned = (exported.loss, exported.count, *exported.outputs)
    results = {*returned, *exported.updates.values()}
    ops = (x for x in operations(exported.graph) if x not in results and not is_random(x))
    return set(computed_from(ops, fixed))


def assign(
    exported: Exported, constants: set[fx.Node], closed: frozenset[Region]
) -> tuple[dict[fx.Node, int], list[tuple[Region, ...]]]:
    """The chunk of every op that is not constant, and the region stack of every chunk. Ops outside
    a region in ``closed`` do not join it."""
    ops = [n for n in operations(exported.graph) if n not in constants]
    changing = {node for node, name in exported.buffers.items() if name in exported.updates}
    in_model = [n for n in ops if tags_of(n.meta)[:1] not in ((), (exported.loss_region,))]
    homes: dict[fx.Node, int] = {}
    tags: list[tuple[Region, ...]] = []
    waiting: dict[fx.Node, int] = {}

    def joined(home: int) -> int:
        """The chunk ``home``; if it is closed, the last chunk, which is then outside any region."""
        if not closed.intersection(tags[home]):
            return home
        if tags[-1]:
            tags.append(())
        return len(tags) - 1

    for node in ops:
        stack = tags_of(node.meta)
        feeders = [homes[arg] for arg in node.all_input_nodes if arg in homes]
        if node.target is operator.getitem:
            if feeders:
                homes[node] = feeders[0]  # else assigned with its op, below
        elif stack:
            if not tags or tags[-1] != stack:
                tags.append(stack)
            homes[node] = len(tags) - 1
        elif feeders:
            homes[node] = joined(max(feeders))
        elif not in_model or closed:
            if not tags:
                tags.append(())  # the first chunk is in no region
            homes[node] = joined(len(tags) - 1) if in_model else 0
        elif changing.isdisjoint(node.all_input_nodes):
            waiting[node] = max(0, len(tags) - 1)
        else:
            homes[node] = max(0, len(tags) - 1)  # the buffer it reads may soon be overwritten
    for node, nearest in reversed(waiting.items()):
        # reads only the batch and parameters: joins its first user
        users = [u for user in node.users for u in (user.users if not has_tensor(node) else [user])]
        homes[node] = min((homes[user] for user in users if user in homes), default=nearest)
    for node in ops:
        if node.target is operator.getitem:
            homes[node] = homes[node.all_input_nodes[0]]
    return homes, tags


def update_after_last_read(exported: Exported, homes: dict[fx.Node, int]) -> None:
    """Move a buffer's update to the last chunk that reads its old content, if that chunk runs after
    the one that computes the new content."""
    for placeholder, name in exported.buffers.items():
        new = exported.updates.get(name)
        if new is None:
            continue
        last = max((homes[user] for user in placeholder.users if user in homes), default=0)
        if last > homes[new]:
            with exported.graph.inserting_before(exported.graph.output_node()):
                late = exported.graph.call_function(torch.ops.aten.clone.default, (new,))
            late.meta["val"] = new.meta["val"]
            homes[late] = last
            exported.updates[name] = late
