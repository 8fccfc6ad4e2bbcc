"""Unplaced nodes after the last placed region, usually the loss, join the devices of that region.

    PP[0] @0 ─▶ PP[1] @1 ─▶ loss[0]          PP[0] @0 ─▶ PP[1] @1 ─▶ loss[0] @1

A node that shares a tag name with placed nodes does not join: its ``place`` was forgotten.
"""

from __future__ import annotations

from msgspec import structs

from piper.ir.dag.dag import PASS, Dag, Node


def join_last(dag: Dag) -> Dag:
    """``dag``, with the nodes after the last placed region of their microbatch placed."""
    if all(node.devices for node in dag.nodes):
        return dag
    last: dict[int, Node] = {}
    names: set[str] = set()
    for node in dag.nodes:
        if node.devices:
            op = node.compute
            names |= node.tags.keys()
            if op.microbatch not in last or op.chunk > last[op.microbatch].compute.chunk:
                last[op.microbatch] = node
    names -= {PASS, dag.microbatches[0] if dag.microbatches else PASS}
    changed = {}
    for number, node in enumerate(dag.nodes):
        before = last.get(node.compute.microbatch)
        if node.devices or before is None or not names.isdisjoint(node.tags):
            continue
        if node.compute.chunk > before.compute.chunk:
            changed[number] = structs.replace(
                node, devices=before.devices, sends=before.sends, made_by=before.sends.made_by
            )
    return dag.with_nodes(changed) if changed else dag
