"""What stands to the left in the map of the house does not import what stands to its right."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HOUSE = Path(__file__).parent.parent / "piper"
RIGHT = {
    "capture": ("ir", "directives", "strategy", "strategies", "lower", "program", "runtime"),
    "ir": ("directives", "strategy", "strategies", "lower", "program", "runtime", "launch"),
    "directives": ("strategy", "strategies", "lower", "program", "runtime", "launch"),
    "lower": ("directives", "strategy", "strategies", "program", "runtime", "launch"),
    "runtime": ("directives", "strategy", "strategies", "program", "compiler", "job", "launch"),
    "launch": ("cli", "strategies"),
}
"""By package, what it must not know: a worker is given plans, chunk programs and state."""


def imported(file: Path) -> set[str]:
    """The parts of Piper that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found.update(name.split(".")[1] for name in names if name.startswith("piper."))
    return found


@pytest.mark.parametrize("package", RIGHT)
def test_a_package_imports_nothing_to_its_right(package: str) -> None:
    files = sorted((HOUSE / package).glob("*.py"))
    assert files
    for file in files:
        assert imported(file).isdisjoint(RIGHT[package]), file.name
