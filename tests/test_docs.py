"""Every Python snippet of the README and of docs/ runs and prints what the text says it does.

A ```text block directly after a ```python block is that snippet's output.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n?^```text\n(?P<output>.*?)^```\n)?", re.M | re.S
)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)[^)]*\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run_and_print_what_the_page_says(page: Path) -> None:
    text = page.read_text()
    snippets = list(SNIPPET.finditer(text))
    assert len(snippets) == text.count("```python"), "a snippet that this test does not see"
    namespace: dict[str, object] = {"__name__": "__main__"}
    for snippet in snippets:
        # Blank lines above, so that line numbers in errors are those of the page.
        above = text[: snippet.start("code")].count("\n")
        code = compile("\n" * above + snippet["code"], page.name, "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if snippet["output"] is not None:
            assert lines(printed.getvalue()) == lines(snippet["output"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    broken = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not broken


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]
