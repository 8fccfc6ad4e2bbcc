"""``piper demo`` as a new user runs it, at a smaller size."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ("--layers", "2", "--dim", "16", "--experts", "2", "--microbatches", "2")


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    hidden = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [sys.executable, "-m", "piper", "demo", *options],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_it_trains_on_four_devices_as_on_one() -> None:
    result = demo("--steps", "2", "--zero", "3", *SMALL)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    difference = re.search(r"largest difference of a loss ([\d.e+-]+);", result.stdout).group(1)
    assert float(difference) < 1e-12
    assert "\x1b" not in result.stdout, "escape codes outside a terminal"
    losses = re.findall(r"^step +\d+ +(\d\.\d+) +(\d\.\d+)", result.stdout, re.M)
    assert len(losses) == 2
    assert all(ours == theirs for ours, theirs in losses)
    before, after = re.search(r"validation loss ([\d.]+) → ([\d.]+)", result.stdout).groups()
    assert float(after) < float(before)


@pytest.mark.slow
def test_a_count_that_does_not_divide_is_one_message() -> None:
    result = demo("--microbatches", "3")
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "error: place({'PP': 0}, devices=[0, 1]): a batch of 16 in 3 microbatches does not divide "
        "over 2 devices; give microbatches= (split: parts=) one of [1, 2, 4, 8]"
    ]


@pytest.mark.slow
def test_an_unknown_choice_lists_those_that_exist() -> None:
    result = demo("--compiler", "gcc")
    assert result.returncode == 2
    assert "'gcc' is not one of 'eager', 'inductor'" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
