"""Comparisons with other systems: the report of their figures, and that wrong losses fail."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("report")


def comparison(report: ModuleType, losses: list[float]) -> object:
    """Ours takes half the time of the faster of two others, and more memory."""
    sides = {
        "piper": report.Found([2.0, 1.0], [1.0, 3.0, 1.0], [0.5, 0.5, 0.5], 3 * 2**20),
        "slow": report.Found([2.0, 1.0], [4.0, 12.0, 4.0], [1.0, 1.0, 1.0], 2**20),
        "quick": report.Found(losses, [2.0, 6.0, 2.0], [1.0, 1.0, 1.0], 2 * 2**20),
    }
    against = report.best(sides, ["slow", "quick"])
    case = report.Case("a case", against, sides, {"piper": 0.5})
    return report.Comparison("a title", "here", [case], ["a peer: skipped"])


def test_ratios_are_to_the_best_of_the_others(report: ModuleType, tmp_path: Path) -> None:
    found = comparison(report, [2.0, 1.0])
    found.write(tmp_path / "found.json")
    found = report.Comparison.read(tmp_path / "found.json")
    (case,) = found.cases
    assert case.against == "quick"
    assert (case.time_ratio("piper"), case.time_ratio("slow")) == (0.5, 2.0)
    assert (case.running_ratio("piper"), case.memory_ratio("piper")) == (0.5, 1.5)
    assert (case.reached("piper"), case.reached("slow")) == (0.5, None)
    assert case.sides["piper"].spread == (1.0, 3.0)
    found.check()
    with (tmp_path / "table").open("w") as file:
        report.print_cases(found, Console(width=120, file=file))
    text = (tmp_path / "table").read_text()
    for part in ("a case", "ratios to quick", "1,000.0", "0.500", "1.500", "a peer: skipped"):
        assert part in text


def test_a_faster_wrong_answer_fails(report: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"a title, a case: losses differ by 1\.0e-03"):
        comparison(report, [2.0, 0.999]).check()


def test_sides_that_round_otherwise_must_begin_alike(report: ModuleType) -> None:
    """Sides with other rounding must agree in the first steps, the others in all steps."""
    same = [1.0] * 20
    drifting, wrong = [*same[:10], *[1.01] * 10], [1.0, 1.01, *same[2:]]

    def check(**losses: list[float]) -> None:
        sides = {name: report.Found(x, [1.0] * len(x)) for name, x in losses.items()}
        case = report.Case("a case", "piper", sides)
        report.Comparison("a title", "here", [case], rounding="Deep").check()

    check(piper=same, torch=same, DeepSpeed=drifting)
    with pytest.raises(SystemExit, match=r"differ by 9\.9e-03 with Deep in the first 10 steps"):
        check(piper=same, torch=same, DeepSpeed=wrong)
    with pytest.raises(SystemExit, match=r"differ by 9\.9e-03, more than 1e-05"):
        check(piper=same, torch=drifting)


def test_losses_of_zero_do_not_differ_and_none_are_not_compared(report: ModuleType) -> None:
    sides = {name: report.Found(seconds=[1.0]) for name in "ab"}
    report.Comparison("a title", "here", [report.Case("a case", "a", sides)]).check()
    case = report.Case("a case", "a", {name: report.Found([0.0], [1.0]) for name in "ab"})
    assert case.difference() == 0.0
    assert case.running_ratio("b") is case.memory_ratio("b") is None


@pytest.mark.slow
def test_the_command_runs(tmp_path: Path) -> None:
    """The shortest set; the others take minutes."""
    command = [sys.executable, str(BENCH / "compare.py"), "host", "--quick"]
    subprocess.run([*command, "--out", str(tmp_path)], check=True, timeout=600)
    assert json.loads((tmp_path / "ratios.json").read_text())
    assert "µs" in (tmp_path / "tables.txt").read_text()


def test_an_unknown_set_is_refused() -> None:
    command = [sys.executable, str(BENCH / "compare.py"), "fast"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    assert "'fast' is unknown: one of pipelines, data" in ended.stderr
