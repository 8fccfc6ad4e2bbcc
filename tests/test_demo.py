"""The demonstration as a stranger runs it, only smaller."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SMALL = ("--layers", "1", "--dim", "16", "--experts", "2", "--microbatches", "2")


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    hidden = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [sys.executable, "examples/demo.py", *options],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_it_trains_and_equals_plain_pytorch_bit_for_bit() -> None:
    result = demo("--steps", "2", "--remat", "min-cut", *SMALL)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "bitwise equal: yes" in result.stdout
    assert "\x1b" not in result.stdout, "escape codes outside a terminal"
    losses = [
        float(loss) for loss in re.findall(r"^step +\d+ +loss (\d\.\d+)", result.stdout, re.M)
    ]
    assert len(losses) == 2
    before, after = re.search(r"validation loss ([\d.]+) → ([\d.]+)", result.stdout).groups()
    assert float(after) < float(before)


def test_a_count_that_does_not_divide_is_one_message() -> None:
    result = demo("--microbatches", "3")
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "error: a batch of 16 does not divide into 3 microbatches; counts that work: 1, 2, 4, 8, 16"
    ]


def test_an_unknown_choice_lists_those_that_exist() -> None:
    result = demo("--compiler", "gcc")
    assert result.returncode == 2
    assert "'gcc' is not one of 'eager', 'inductor'" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
