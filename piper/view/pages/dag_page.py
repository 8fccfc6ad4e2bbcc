"""The DAG after each directive as an interactive page: ``Dag``s go in, one HTML file comes out.

A directive leaves most nodes unchanged, as the same objects. So every distinct node is written
once, and a step is the list of its nodes' numbers, or the changes to the previous step's list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from piper.base.errors import PiperError
from piper.ir.dag.dag import Dag, Node, group_text, how_made, name_of
from piper.ir.dag.facts import Model
from piper.ir.dag.layout_text import layout_lines
from piper.ir.dag.sizes import Sizes
from piper.ir.dag.values import Content, Role, Value
from piper.ir.ops import Collective, Compute, Op
from piper.ir.passes import Pass
from piper.ir.rules import Rest, Sms
from piper.view.pages.inline import Numbered, page

_SCRIPTS = (
    "common.js",
    "dag_data.js",
    "dag_layout.js",
    "dag_draw.js",
    "dag_panel.js",
    "dag.js",
)
_OF_VALUES = (Role.BATCH, Role.ACTIVATION, Role.GRADIENT)


def dag_page(
    title: str,
    steps: Sequence[tuple[str, Dag]],
    *,
    stages: Sequence[str] = ("PP",),
    models: Mapping[int, Model] | None = None,
) -> str:
    """A page with the DAG after each of ``steps``: a label, such as the directive, and the DAG
    after it. All DAGs are of one model, in the order in which they were made.

    ``stages`` are the tags that name a stage. ``models`` are the model's facts by group size
    (``Program.models``). Without them the bytes of values are those of the last DAG's own model.
    """
    if not steps:
        raise PiperError("a page of DAGs needs at least one step: ('build', dag)")
    last = steps[-1][1]
    pool = _Pool()
    data = {
        "title": title,
        "stages": list(stages),
        "microbatch": last.microbatches[0] if last.microbatches else None,
        "steps": _steps(steps, pool),
        "nodes": pool.columns,
        "strings": pool.strings.items,
        "lists": pool.lists.items,
        "values": _values(last, Sizes(last, models or {})),
    }
    return page(title, "dag.html", ("common.css", "dag.css"), _SCRIPTS, data)


class _Pool:
    """Distinct nodes as columns of numbers. Strings and lists are stored once each, and referenced
    by number."""

    def __init__(self) -> None:
        self.strings, self.lists = Numbered(), Numbered()
        self._identities, self._families = Numbered(), Numbered()
        self._known: dict[tuple[int, str], int] = {}
        self.columns: dict[str, list[int]] = {name: [] for name in _COLUMNS}

    def number(self, dag: Dag, place: int) -> int:
        """The number of the node at ``place``; a new node is added."""
        node = dag.nodes[place]
        key = id(node), dag.history[node.made_by]
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self._known)
            for name, item in zip(_COLUMNS, self._items(dag, place, node), strict=True):
                self.columns[name].append(item)
        return number

    def _items(self, dag: Dag, place: int, node: Node) -> tuple[int, ...]:
        text, row = self.strings.number, self.lists.number
        tags = tuple(
            item
            for name, tag in node.tags.items()
            for item in (text(name), text(tag.value if isinstance(tag, Pass) else str(tag)))
        )
        same, family = _identity(node, tags)
        history = dag.history
        return (
            self._identities.number(same),
            self._families.number(family),
            text(name_of(dag, place)),
            text(_kind(node.op)),
            row(tags),
            text(group_text(node.devices)),
            text(node.stream),
            row(node.reads),
            row(node.writes),
            row(node.after),
            row(tuple(text(history[entry]) for entry in node.after_by)),
            text(history[node.made_by]),
            text(history[node.ordered_by] if node.ordered_by else ""),
            text(node.sends.stream),
        )


_COLUMNS = (
    "identity",
    "family",
    "name",
    "kind",
    "tags",
    "devices",
    "stream",
    "reads",
    "writes",
    "after",
    "after_by",
    "made_by",
    "ordered_by",
    "sends",
)


def _identity(node: Node, tags: tuple[int, ...]) -> tuple[Any, Any]:
    """Two keys of a node: equal for the same node in two DAGs, whatever its number; and equal for
    all nodes that ``split`` makes of one."""
    match node.op:
        case Compute(chunk=chunk, which=which, microbatch=microbatch):
            return (chunk, which.value, microbatch), (chunk, which.value)
        case op:
            return (op, tags), (op, tags)


def _kind(op: Op) -> str:
    match op:
        case Compute(which=which):
            return which.value
        case Collective(kind=kind):
            return kind.value
        case _:
            return type(op).__name__.lower()


def _steps(steps: Sequence[tuple[str, Dag]], pool: _Pool) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = []
    before: list[int] = []
    earlier = steps[0][1]
    for label, dag in steps:
        nodes = [pool.number(dag, place) for place in range(len(dag.nodes))]
        changed = [i for i, n in enumerate(nodes) if i >= len(before) or before[i] != n]
        step: dict[str, Any] = {"label": label, "notes": _notes(earlier, dag)}
        if len(nodes) == len(before) and len(changed) < len(nodes) // 2:
            step |= {"places": changed, "nodes": [nodes[i] for i in changed]}
        else:
            step |= {"nodes": nodes}
        data.append(step)
        before, earlier = nodes, dag
    return data


def _notes(before: Dag, dag: Dag) -> list[str]:
    """The changes of a step besides nodes: the rules of chunks and of streams."""

    def ruled(
        mine: Mapping[int, Any], theirs: Mapping[int, Any], said: Callable[[Any], str]
    ) -> str:
        new = [rule for chunk, rule in mine.items() if theirs.get(chunk) != rule]
        what = "; ".join(dict.fromkeys(map(said, new)))
        return f"{what}: {len(new)} chunks" if new else ""

    notes = [
        ruled(dag.state, before.state, lambda rule: f"replicated, ZeRO {rule.zero}"),
        ruled(dag.shards, before.shards, lambda rule: f"experts sharded {rule.ways} ways"),
        ruled(dag.remat, before.remat, lambda policy: f"recomputes {policy.value}"),
        *(
            f"stream {name}: priority {rule.priority}, {_sms(rule.sms)}"
            for name, rule in dag.streams.items()
            if before.streams.get(name) != rule
        ),
    ]
    return [note for note in notes if note]


def _sms(sms: Sms | None) -> str:
    """An SM share in words."""
    if sms is None:
        return "all SMs"
    return "the rest of the SMs" if isinstance(sms, Rest) else f"{sms} SMs"


def _values(dag: Dag, sizes: Sizes) -> dict[str, Any]:
    """The values of one microbatch, with a description and the bytes on a device; and the values
    that lowering added, with their making and origin."""
    first = dag.first_extra
    lies: dict[int, str] = {}
    for line in layout_lines(replace(dag, buckets=()), sizes.models):
        lies.setdefault(line.number % dag.table.size, f" ({line.layout})")
    return {
        "texts": [
            _text(dag, value) + lies.get(number, "")
            for number, value in enumerate(dag.table.values)
        ],
        "bytes": [sizes.nbytes(number) for number in range(dag.table.size)],
        "first": first,
        "extra": [
            [
                how_made(dag, number),
                -1 if extra.content.of_step else extra.of,
                int(extra.content is not Content.VALUE),
                sizes.nbytes(number),
            ]
            for number, extra in enumerate(dag.extra, first)
        ],
    }


def _text(dag: Dag, value: Value) -> str:
    """A value in words: by the name of its tensor, or by its chunk."""
    if value.role is Role.SEED:
        return "gradient of the loss"
    if value.role not in _OF_VALUES:
        return f"{value.role.value} of chunk {value.of}"
    name = dag.model.values[value.of].name
    if value.role is not Role.GRADIENT:
        return name
    term = f", term {value.term}" if value.term else ""
    return f"gradient of {name} by chunk {value.by}{term}"
