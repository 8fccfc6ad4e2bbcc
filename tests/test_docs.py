"""The README and every page of docs/ run and print what they say; links resolve; docs/errors.md
lists every message, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from piper.base.errors import DirectiveError
from piper.ir.dag.build import build
from piper.lower.lower import lower
from piper.strategies.strategy import Strategy
from tests.facts import at
from tests.pages import run_page, same
from tests.strategies.test_strategy_errors import MISTAKES, REFUSALS, WRONG_JSON

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)[^)]*\)")


def name(page: Path) -> str:
    return page.name if page.parent == ROOT else str(page.relative_to(DOCS))


LONG = (
    "README.md",
    "choosing.md",
    "command_line.md",
    "fine_tuning.md",
    "migrating.md",
    "regions.md",
    "tensor_parallelism.md",
    "tutorial.md",
    "running.md",
    "simulating.md",
    "capture.md",
    "correctness.md",
    "experts.md",
    "scale.md",
    "tuning.md",
)
"""Pages whose snippets take a minute."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.slow] if p.name in LONG else []) for p in PAGES],
    ids=name,
)
def test_a_page_runs_and_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)


@pytest.mark.parametrize(
    ("printed", "said"),
    [("a\nb", "a"), ("a 1 c", "a … b"), ("a\nb\nc", "…\nb"), ("", "a")],
)
def test_a_page_that_says_something_else_is_noticed(printed: str, said: str) -> None:
    same("a 1 b\nc\nd\n", "a … b\n…\nd\n")
    with pytest.raises(AssertionError):
        same(printed, said)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page: Path) -> None:
    broken = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not broken


# the index of errors

INDEX = DOCS / "errors.md"
ROWS = re.findall(r"^\| `([^`]+)` \|.*\|.*\|$", INDEX.read_text(), re.M)
FAMILY = {"PiperError", "CaptureError", "DirectiveError", "WorkerError"}
APART = (
    "view",
    "cli/demo/dense.py",
    "cli/demo/layers.py",
    "cli/demo/moe.py",
    "cli/demo/text_data.py",
)
"""Parts of piper whose messages are not in the index: example models, example text, HTML pages."""


def pattern(row: str) -> re.Pattern[str]:
    """The pattern of a row of the index: … matches anything."""
    return re.compile(".*?".join(map(re.escape, row.split("…"))), re.S)


PATTERNS = [pattern(row) for row in ROWS if len(re.sub(r"[^a-z]", "", row)) > 5]


def template(node: ast.AST) -> str:
    """A string in code, with … for its placeholders."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    return "…"


def nodes() -> Iterator[ast.AST]:
    for path in sorted((ROOT / "piper").rglob("*.py")):
        if not str(path.relative_to(ROOT / "piper")).startswith(APART):
            yield from ast.walk(ast.parse(path.read_text()))


def called(node: ast.Call) -> str:
    return getattr(node.func, "id", getattr(node.func, "attr", ""))


def raised() -> Iterator[str]:
    """The messages of all errors and warnings that are one string."""
    for node in nodes():
        if isinstance(node, ast.Call) and called(node) in {*FAMILY, "warn"} and node.args:
            text = template(node.args[0])
            if len(re.sub(r"[^a-z]", "", text)) > 5:  # else the message is made elsewhere
                yield text


def test_every_row_of_the_index_is_a_message() -> None:
    said = {template(n) for n in nodes() if isinstance(n, ast.Constant | ast.JoinedStr)}
    stale = []
    for row in ROWS:
        words = max(row.split("…"), key=len)
        near = (text for text in said if words in text)
        if not any(pattern(row.removeprefix("…: ")).search(text) for text in near):
            stale.append(row)
    assert ROWS
    assert not stale, "docs/errors.md has messages that nobody gives"


def test_every_message_is_in_the_index() -> None:
    missing = {text for text in raised() if not any(p.match(text) for p in PATTERNS)}
    assert not missing, "add these to docs/errors.md, with their cause and what to do"


def test_every_warning_is_of_the_family() -> None:
    """All warnings come from one function, which finds the user's line."""
    calls = [n for n in nodes() if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    (one,) = [call for call in calls if called(call) == "warn"]
    assert "PiperWarning" in [arg.id for arg in one.args if isinstance(arg, ast.Name)]


def refusals() -> Iterator[str]:
    """The actual messages for the tables of wrong strategies."""
    for mistake in MISTAKES:
        before = Strategy(mistake.after).apply(build(mistake.model()))
        with pytest.raises(DirectiveError) as caught:
            mistake.wrong.apply(before)
        yield str(caught.value)
    for refusal in REFUSALS:
        model = refusal.model()
        dag = Strategy(refusal.strategy).apply(build(model))
        with pytest.raises(DirectiveError) as caught:
            lower(dag, {n: at(model, n) for n in (1, 2, 4)}, refusal.settings)
        yield str(caught.value)
    for data, _ in WRONG_JSON.values():
        with pytest.raises(DirectiveError) as caught:
            Strategy.from_json(data)
        yield str(caught.value)


def test_every_refusal_of_the_tests_is_in_the_index() -> None:
    missing = [text for text in refusals() if not any(p.search(text) for p in PATTERNS)]
    assert not missing
