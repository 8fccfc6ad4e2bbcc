"""The base class of directives: data that rewrites a DAG.

A directive is a frozen dataclass; its fields are the user's arguments. ``rewrite`` is a pure
function from DAG to DAG. ``apply`` adds the directive to the DAG's history and names the directive
in every error. A strategy runs ``check`` of its directives when it is constructed.

Most directives lay out regions: where they run, and how the batch, their state and their
parameters are sharded. The others order the nodes of the DAG that follows from the layout.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from piper.base.errors import DirectiveError
from piper.base.units import counted, numbers_code
from piper.ir.dag.dag import PASS, Dag
from piper.ir.dag.filters import Filter, select
from piper.ir.dag.verify_dag import verify
from piper.ir.mesh import listed
from piper.ir.passes import RematPolicy


@dataclass(frozen=True)
class Directive(ABC):
    """One step of a strategy."""

    name: ClassVar[str]
    orders: ClassVar[bool] = False
    """Whether it orders nodes; otherwise it lays out regions."""

    @property
    def policies(self) -> tuple[RematPolicy, ...]:
        """The remat policies that it sets. Facts are made only for policies listed here and for
        the defaults (see ``Strategy.policies``)."""
        return ()

    def check(self) -> None:  # noqa: B027 (a directive may have nothing to refuse)
        """Refuse arguments that are wrong for every DAG."""

    @abstractmethod
    def rewrite(self, dag: Dag, me: int) -> Dag:
        """``dag`` rewritten; changed nodes and rules get ``made_by=me``."""

    def checked(self) -> None:
        """``check``, with the directive named in its error."""
        with self._named():
            self.check()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except DirectiveError as error:
            raise DirectiveError(f"{self}: {error}") from None

    def apply(self, dag: Dag) -> Dag:
        """``dag`` rewritten and verified, with this directive in its history."""
        self.checked()
        return self.rewritten(dag.noted(str(self)), len(dag.history), verify)

    def rewritten(self, dag: Dag, me: int, verify: Callable[[Dag], None] | None = None) -> Dag:
        """``rewrite``, and ``verify`` of the result, with the directive named in their errors."""
        with self._named():
            after = self.rewrite(dag, me)
            if verify is not None:
                verify(after)
        return after

    def to_json(self) -> dict[str, Any]:
        """The directive as plain data: ``op`` and the fields that differ from their default."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if not _at_default(self, f)}
        return {"op": self.name, **{key: _plain(value) for key, value in given.items()}}

    def __str__(self) -> str:
        given = [f for f in fields(self) if not _at_default(self, f) and self._shown(f.name)]
        return f"{self.name}({', '.join(self._written(f.name) for f in given)})"

    positional: ClassVar[tuple[str, ...]] = ("where",)
    """The fields that the directive's function takes by position."""

    def _shown(self, field: str) -> bool:
        """Whether the field is an argument of the directive's function, not part of another
        argument."""
        return True

    def _written(self, field: str) -> str:
        value = _plain(getattr(self, field))
        code = numbers_code(value) if field == "devices" and value else repr(value)
        return code if field in self.positional else f"{field}={code}"


def _at_default(directive: Directive, field: Any) -> bool:
    return bool(getattr(directive, field.name) == field.default)


def _plain(value: Any) -> Any:
    """``value`` in JSON types."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(item) for item in listed(value)]
    return value


def plain_filter(where: object) -> dict[str, Any]:
    """A filter as the user wrote it, in plain types."""
    if not isinstance(where, Mapping):
        raise DirectiveError(
            f"a filter is a mapping from tag to value, such as {{'PP': 0}}, not {where!r}"
        )
    return {str(name): _plain(value) for name, value in where.items()}


def device_group(devices: object) -> tuple[int, ...]:
    """A group of devices, in order."""
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise DirectiveError(f"devices={devices!r} must be a list of device numbers")
    return listed(devices)


def check_group(group: tuple[int, ...]) -> None:
    """Refuse an invalid group of devices."""
    if not group or any(not isinstance(d, int) or isinstance(d, bool) or d < 0 for d in group):
        raise DirectiveError(f"devices={list(group)} must be device numbers, at least one")
    if len(set(group)) < len(group):
        raise DirectiveError(f"devices={list(group)} names a device twice")


def whole_chunks(dag: Dag, where: Filter, what: str) -> list[int]:
    """The nodes that match a filter on whole regions, not on single microbatches or passes."""
    batch = dag.microbatches[0] if dag.microbatches else ""
    for term in where.terms:
        if term.name in (PASS, batch):
            raise DirectiveError(
                f"{what} applies to whole regions, so the filter {where} cannot name "
                f"{term.name!r}: leave it out"
            )
    return select(dag, where)


def check_stream(what: str, name: object) -> None:
    """Refuse an invalid stream name."""
    if not isinstance(name, str) or not name:
        raise DirectiveError(f"{what}={name!r} must be the name of a stream")


def check_tag(what: str, name: object) -> None:
    """Refuse an invalid tag name."""
    if not isinstance(name, str) or not name:
        raise DirectiveError(f"{what}={name!r} must be the name of a tag")


def check_axis(what: str, name: object) -> None:
    """Refuse an invalid axis name; None (no axis) is valid."""
    if name is not None and not isinstance(name, str):
        raise DirectiveError(f"{what}={name!r} must be the name of an axis of the mesh")


def axis_names(what: str, given: object) -> tuple[str, ...] | None:
    """Axes as the user wrote them: one name, or several."""
    if given is None or isinstance(given, str):
        return None if given is None else (given,)
    names = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(name, str) for name in names):
        raise DirectiveError(f"{what}={given!r} must be names of axes of the mesh")
    return names


def positive(what: str, value: object) -> int:
    """``value``, which must be a positive whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DirectiveError(f"{what}={value!r} must be a positive whole number")
    return value


def check_speeds(speeds: object, number: int, what: str) -> tuple[float, ...]:
    """``speeds``, one positive number for each of ``number`` things."""
    if not isinstance(speeds, Sequence) or isinstance(speeds, str):
        raise DirectiveError(f"speeds={speeds!r} must be a list of numbers, one for each {what}")
    if len(speeds) != number:
        raise DirectiveError(
            f"speeds={list(speeds)} has {counted(len(speeds), 'number')} for "
            f"{counted(number, what)}: give one for each"
        )
    for speed in speeds:
        good = isinstance(speed, int | float) and not isinstance(speed, bool)
        if not good or not 0 < speed < math.inf:
            raise DirectiveError(
                f"speeds={list(speeds)}: {speed!r} is not a positive number; leave out devices "
                "that do not compute"
            )
    return tuple(map(float, speeds))
