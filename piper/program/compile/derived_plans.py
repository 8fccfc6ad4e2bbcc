"""The strategy for a model that declares no plan for tensor parallelism: the ``parameters=`` of its
``shard`` directives are derived from the captured model, and written as a user would.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from piper.base.errors import DirectiveError
from piper.capture.model import Captured
from piper.ir.dag.dag import Dag
from piper.ir.shards import Style
from piper.strategies.directives.shard import Shard
from piper.strategies.directives.tensor_parallel import matches
from piper.strategies.strategy import Strategy


class DerivedPlans:
    """The plans of one model, for each set of chunks and number of devices."""

    def __init__(self) -> None:
        self._known: dict[tuple[frozenset[int], int], dict[str, str]] = {}

    def added(self, strategy: Strategy, captured: Captured, dag: Callable[[], Dag]) -> Strategy:
        """``strategy`` with ``parameters=`` where neither it nor the model says how parameters are
        sharded. If nothing can be sharded, it stays as it is, and compiling refuses it. ``dag`` is
        the model's before any directive."""
        directives = list(strategy.directives)
        for at, directive in enumerate(directives):
            if captured.declared or not isinstance(directive, Shard) or directive.axis is None:
                continue
            if directive.parameters is not None:
                continue
            try:
                before = Strategy(d for d in directives[:at] if not d.orders)
                ways = directive.tensor_ways(before.layout(dag()))
            except DirectiveError:
                continue  # compiling refuses it, too, and names the directive
            over = math.lcm(*ways.values())
            plan = self._plan(captured, frozenset(ways), over) if over > 1 else {}
            directives[at] = replace(directive, parameters=plan or None)
        return strategy if directives == list(strategy.directives) else Strategy(directives)

    def _plan(self, captured: Captured, chunks: frozenset[int], ways: int) -> dict[str, str]:
        if (chunks, ways) not in self._known:
            styles = captured.derived_styles(chunks, ways)
            self._known[chunks, ways] = _patterns(styles, captured)
        return self._known[chunks, ways]


def _patterns(styles: Mapping[str, Style], captured: Captured) -> dict[str, str]:
    """Patterns that match the parameters in ``styles`` and no others, except biases of products
    that are sharded by rows, which stay whole."""
    shapes = {name: spec.shape for name, spec in captured.parameters.items()}
    patterns: dict[str, str] = {}
    for name, style in styles.items():
        if any(matches(name, pattern) for pattern in patterns):
            continue
        for pattern in _candidates(name):
            others = {n for n in shapes if matches(n, pattern) and styles.get(n) is not style}
            biases = {n for n in others if n not in styles and len(shapes[n]) == 1}
            if not others or (style is Style.ROW and others == biases):
                break
        patterns[pattern] = style.value
    return patterns


def _candidates(name: str) -> Iterator[str]:
    """Patterns that match ``name``, from the most general to itself."""
    module = name.rpartition(".")[0]
    layers = re.sub(r"(^|\.)\d+(?=\.)", r"\1*", module, count=1)
    yield from (layers, module) if module else ()
    yield re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name, count=1)
    yield name
