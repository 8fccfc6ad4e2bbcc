"""What compilation shows of its stages."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
import torch
from torch import nn

import piper
from piper.program.compile.stages import Stages
from piper.strategies import mesh


def test_a_program_knows_the_seconds_of_each_stage() -> None:
    x = torch.randn(8, 4)
    program = piper.compile(
        nn.Linear(4, 4), mesh(dp=2), inputs=(x,), targets=(x,), loss=nn.MSELoss()
    )
    assert list(program.timings) == [
        "capturing the model",
        "applying the strategy",
        "planning",
        "capturing evaluation mode",
    ]


@pytest.mark.parametrize(
    ("shown", "rank", "expected"),
    [
        (True, "0", ["testing: one", "testing: two", "testing took"]),
        (True, "1", []),
        (None, "0", ["testing: one", "testing took"]),  # no terminal
        (None, "1", []),
        (False, "0", []),
    ],
)
def test_lines_where_there_is_no_terminal(
    shown: bool | None,
    rank: str,
    expected: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", rank)
    stages = Stages("testing", shown, after=0.0)
    for name in ("one", "two"):
        with stages.stage(name):
            pass
    stages.end()
    lines = capsys.readouterr().err.splitlines()
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected


def test_a_long_first_stage_has_a_line_before_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    stages = Stages("testing", True, after=0.01)
    seen = ""
    with stages.stage("one"):
        while not seen:
            seen = capsys.readouterr().err
    assert seen == "testing: one\n"


def test_nothing_in_the_first_second(capsys: pytest.CaptureFixture[str]) -> None:
    stages = Stages("testing", True, after=1e9)
    with stages.stage("one"):
        pass
    stages.end()
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_the_stage() -> None:
    code = (
        "import sys, time; from piper.program.compile.stages import Stages\n"
        "stages = Stages('testing', None, after=0.0)\n"
        "with stages.stage('one'): print(sys.stdin.readline())\n"
        "stages.end()"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    while b"testing: one, 0 s" not in seen:
        seen += os.read(ours, 1000)
    process.communicate(b"go on\n")
    while b"testing took" not in seen:
        seen += os.read(ours, 1000)
    os.close(ours)
    assert process.returncode == 0
