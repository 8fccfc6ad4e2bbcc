"""Runs a page of the documentation as its reader would, from top to bottom.

    ```python                    runs; all blocks of a page share one namespace
    ```text                      the output of the block before it
    ```pycon                     the same as a session: ">>> ..." and its output or error
    ```python title="train.py"   written to that file
    ```console                   "$ ..." runs in a shell; the lines after it are its output

Each page runs in its own folder. In outputs, … matches anything in a line, and a line of … alone
matches any lines.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from doctest import DocTestParser
from itertools import zip_longest
from pathlib import Path

from typer.testing import CliRunner

from piper.base.errors import PiperError
from piper.cli.app import app

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(?P<kind>\w*)(?P<more>.*)\n(?P<body>(?:.*\n)*?)^```$", re.M)
TITLE = re.compile(r' title="([^"]+)"')
COLUMNS = {"COLUMNS": "100"}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block and the line on which its content begins."""

    kind: str
    title: str | None
    body: str
    line: int


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a page."""
    found = []
    for one in BLOCK.finditer(text):
        title = TITLE.fullmatch(one["more"])
        assert title or not one["more"], f"a block that this test does not know: {one[0][:60]}"
        line = text[: one.start("body")].count("\n")
        found.append(Block(one["kind"], title[1] if title else None, one["body"], line))
    return found


def run_page(page: Path, folder: Path) -> None:
    """Run a page in a folder and compare the outputs with the page."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    shell = Shell(folder)
    found = blocks(page.read_text())
    with contextlib.chdir(folder):
        for block, after in zip_longest(found, found[1:]):
            if block.title is not None:
                (folder / block.title).write_text(block.body)
            elif block.kind == "python":
                printed = io.StringIO()
                # Blank lines above keep the page's line numbers in errors.
                code = compile("\n" * block.line + block.body, page.name, "exec")
                with contextlib.redirect_stdout(printed):
                    exec(code, namespace)
                if after is not None and after.kind == "text":
                    same(printed.getvalue(), after.body)
            elif block.kind == "pycon":
                for example in DocTestParser().get_examples(block.body):
                    same(said(example.source, namespace), example.want)
            elif block.kind == "console":
                for line, expected in session(block.body):
                    same(shell.run(line), expected)


def said(source: str, namespace: dict[str, object]) -> str:
    """The output of one line of a session; for a ``PiperError``, its kind and message."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(source, "<session>", "single"), namespace)
        except PiperError as error:
            print(f"{type(error).__name__}: {error}")
    return printed.getvalue()


def session(body: str) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with its output."""
    first, *rest = re.split(r"^\$ ", body, flags=re.M)
    assert not first, "a console block begins with a command"
    for part in rest:
        command, _, output = re.sub(r" \\\n\s*", " ", part).partition("\n")
        yield command, output


@dataclass(slots=True)
class Shell:
    """A shell in a folder. Piper's own commands run in this process, which is faster."""

    folder: Path
    code: int = 0
    """The exit code of the last command."""
    runner: CliRunner = field(default_factory=lambda: CliRunner(env=COLUMNS))

    def run(self, line: str) -> str:
        """The output of a command: stdout and stderr."""
        if line == "echo $?":
            return f"{self.code}\n"
        if line.startswith("piper ") and not re.search(r"[|<>;&]", line):
            found = self.runner.invoke(app, shlex.split(line, comments=True)[1:])
            assert found.exception is None or isinstance(found.exception, SystemExit)
            self.code = found.exit_code
            return found.output
        tools = str(Path(sys.executable).parent)
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=os.environ
            | COLUMNS
            | {
                "PATH": f"{tools}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        self.code = done.returncode
        return done.stdout


def same(printed: str, expected: str) -> None:
    """Assert that the output matches the page."""
    found, said = lines(printed), lines(expected)
    if "…" not in expected:
        assert found == said
    else:
        pattern = "".join(r"(?:.*\n)*?" if x == "…" else f"{_escaped(x)}\n" for x in said)
        assert re.fullmatch(pattern, "".join(f"{line}\n" for line in found)), (found, said)


def _escaped(line: str) -> str:
    return ".*?".join(map(re.escape, line.split("…")))


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]
