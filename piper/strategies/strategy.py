"""A strategy: a list of directives, applied in order, that can be added, printed, saved and read.

Reads two JSON formats: its own (``to_json``), and that of uw-syfi/piper, with the fields
``filter``, ``device``, ``bucket_size``, ``shard_grads``, ``shard_params``, ``dim_name`` and
``num_microbatches``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piper.base.errors import DirectiveError
from piper.base.reading import MalformedError, check_limits, file_bytes, parsed, shown
from piper.base.units import class_text, wrapped
from piper.ir.dag.dag import Dag
from piper.ir.dag.verify_dag import refuse_scattered, verify
from piper.ir.mesh import Mesh
from piper.ir.passes import RematPolicy
from piper.strategies.directives import (
    Directive,
    order,
    partition,
    place,
    remat,
    replicate,
    shard,
    split,
    stream,
)
from piper.strategies.directives.order import Order, apply_orders
from piper.strategies.join_last import join_last


@dataclass(frozen=True, slots=True)
class Strategy:
    """Directives in the order in which they are applied."""

    directives: tuple[Directive, ...]

    def __init__(self, directives: Iterable[Directive]) -> None:
        if isinstance(directives, Strategy):
            directives = directives.directives
        if not isinstance(directives, Iterable):
            raise DirectiveError(
                f"a strategy is a list of directives, not {class_text(directives)}"
            )
        given = tuple(directives)
        for directive in given:
            if not isinstance(directive, Directive):
                raise DirectiveError(
                    f"a strategy is a list of directives; {directive!r} is a "
                    f"{type(directive).__name__}"
                )
            directive.checked()
        object.__setattr__(self, "directives", given)

    def apply(self, dag: Dag) -> Dag:
        """``dag`` after all directives, verified: ``layout``, then ``ordered``."""
        return self.ordered(self.layout(dag))

    def layout(self, dag: Dag) -> Dag:
        """``dag`` after the directives that lay out regions. Its history has all directives, in the
        order in which they are written."""
        orders = [directive.orders for directive in self.directives]
        if orders != sorted(orders):
            for _ in self.steps(dag):  # refuses an order of what is laid out only after it
                pass
        noted = dag.noted(*map(str, self.directives))
        return self._phase(noted, orders=False, verify=refuse_scattered)

    def ordered(self, layout: Dag) -> Dag:
        """``layout`` after the directives that order its nodes, verified. Nodes after the last
        placed region join it."""
        return join_last(self._phase(layout, orders=True, verify=verify))

    def _phase(self, dag: Dag, *, orders: bool, verify: Callable[[Dag], None]) -> Dag:
        first = len(dag.history) - len(self.directives)
        mine = [(i, d) for i, d in enumerate(self.directives, first) if d.orders is orders]
        after = dag
        try:
            for ordering, row in itertools.groupby(mine, lambda entry: isinstance(entry[1], Order)):
                if ordering:
                    after = apply_orders(after, [(i, d) for i, d in row if isinstance(d, Order)])
                else:
                    for me, directive in row:
                        after = directive.rewritten(after, me)
            verify(after)
        except DirectiveError:
            for me, directive in mine:  # again, to name the failing directive
                dag = directive.rewritten(dag, me, verify)
            raise
        return after

    def policies(self, default: RematPolicy) -> tuple[RematPolicy, ...]:
        """All remat policies in use: the ``default`` and those of the directives. NONE is always
        included, because costs are compared with it."""
        said = {policy for directive in self.directives for policy in directive.policies}
        return tuple(p for p in RematPolicy if p in {RematPolicy.NONE, default, *said})

    def steps(self, dag: Dag) -> Iterator[Dag]:
        """``dag`` after each directive."""
        for directive in self.directives:
            dag = directive.apply(dag)
            yield dag

    def __iter__(self) -> Iterator[Directive]:
        return iter(self.directives)

    def __add__(self, other: Iterable[Directive]) -> Strategy:
        if not isinstance(other, Iterable):
            return NotImplemented
        return Strategy((*self.directives, *other))

    def __str__(self) -> str:
        lines = [wrapped(f"    {directive},", " " * 8) for directive in self.directives]
        return "\n".join(["Strategy([", *lines, "])"])

    def to_json(self) -> list[dict[str, Any]]:
        """The strategy as plain data."""
        return [directive.to_json() for directive in self.directives]

    @staticmethod
    def from_json(data: str | Sequence[Mapping[str, Any]]) -> Strategy:
        """The strategy from ``to_json``, or from the JSON format of uw-syfi/piper."""
        items = data
        try:
            if isinstance(data, str):
                items = parsed(data)
            else:
                check_limits(data)
        except MalformedError as error:
            raise DirectiveError(f"the strategy cannot be read: {error}") from None
        if not isinstance(items, Sequence) or isinstance(items, str):
            raise DirectiveError("a strategy in JSON is a list of objects, each with an 'op'")
        return Strategy(_read(item, place) for place, item in enumerate(items))

    @staticmethod
    def load(path: str | Path) -> Strategy:
        """The strategy in a JSON file."""
        try:
            text = file_bytes(path).decode()
        except (OSError, ValueError, MalformedError) as error:
            raise DirectiveError(f"the strategy {path} cannot be read: {error}") from error
        return Strategy.from_json(text)


def _read(item: Any, at: int) -> Directive:
    op = item.get("op") if isinstance(item, Mapping) else None
    if not isinstance(op, str) or op not in _READERS:
        known = ", ".join(_READERS)
        raise DirectiveError(f"directive {at}: {shown(item)} has no 'op' that is known: {known}")
    fields = {key: value for key, value in item.items() if key != "op"}
    if "filter" in fields:
        fields["where"] = fields.pop("filter")
    if "where" in fields and isinstance(fields["where"], Mapping):
        fields["where"] = _where(fields["where"])
    try:
        if "device" in fields:
            fields["devices"] = _devices(fields)
        return _READERS[op](fields)
    except (TypeError, KeyError, ValueError, AttributeError, DirectiveError) as error:
        raise DirectiveError(f"directive {at}, {op}: {error} in {shown(dict(item), 200)}") from None


def _where(given: Mapping[str, Any]) -> dict[str, Any]:
    """A filter from JSON: null means that the tag must be absent."""
    return {name: "-" if value is None else value for name, value in given.items()}


def _devices(fields: dict[str, Any]) -> Any:
    """The devices from the field ``device``, one or several."""
    given = fields.pop("device")
    if "devices" in fields:
        raise KeyError("both 'device' and 'devices' are given: leave one out")
    return given if isinstance(given, Sequence) else [given]


def _place(fields: dict[str, Any]) -> Directive:
    axes = fields.pop("axes", None)
    if axes is not None:
        fields["devices"] = Mesh(fields["devices"], **axes)
    return place(fields.pop("where"), **fields)


def _replicate(fields: dict[str, Any]) -> Directive:
    grads, params = fields.pop("shard_grads", False), fields.pop("shard_params", False)
    if grads or params:
        fields["zero"] = 3 if params else 2
    if (bucket := fields.pop("bucket_size", None)) is not None:
        fields["bucket_mb"] = bucket
    return replicate(fields.pop("where"), **fields)


def _shard(fields: dict[str, Any]) -> Directive:
    fields.pop("devices", None)  # uw-syfi/piper repeats the region's devices here
    return shard(fields.pop("where"), **fields)


def _split(fields: dict[str, Any]) -> Directive:
    into = fields.pop("dim_name", fields.pop("into", "MB"))
    parts = fields.pop("num_microbatches", fields.pop("parts", None))
    return split(fields.pop("where", {}), into=into, parts=parts, **fields)


def _order(fields: dict[str, Any]) -> Directive:
    groups = fields.pop("filters")
    if fields:
        raise KeyError(f"unknown fields {sorted(fields)}")
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise TypeError("filters must be a list of groups, each a list of filters,")
    return order(*([_where(f) for f in group] for group in groups))


def _partition(fields: dict[str, Any]) -> Directive:
    if isinstance(fields.get("by"), Mapping):
        fields["by"] = {int(region): cost for region, cost in fields["by"].items()}
    return partition(fields.pop("tag"), **fields)


_READERS: dict[str, Callable[[dict[str, Any]], Directive]] = {
    "partition": _partition,
    "split": _split,
    "place": _place,
    "replicate": _replicate,
    "shard": _shard,
    "order": _order,
    "stream": lambda fields: stream(fields.pop("where", None), fields.pop("stream"), **fields),
    "remat": lambda fields: remat(fields.pop("where"), **fields),
}
