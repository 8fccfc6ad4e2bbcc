"""A disk that fills up while a run saves to it: a real one, in memory."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import piper
from tests.scripts.fault_at import FILLER, fill
from tests.scripts.resumed import batch, compiled

STEPS = 9


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.filterwarnings("ignore::piper.PiperWarning")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("on", ["virtual", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_disk_that_is_full_during_a_save(on: str, background: bool, disk: Path) -> None:
    """The run ends with an error, and continues from the checkpoint before when there is room."""
    program = compiled()
    with piper.launch(program) as trainer:
        expected = [float(one) for one in trainer.iterate(batch, steps=STEPS, progress=False)]
    how: dict[str, Any] = {"steps": STEPS, "checkpoint": disk / "run", "every": 3, "keep": 2}
    how |= {"background": background, "progress": False}
    found: dict[int, float] = {}

    def train(*, full_after: int, resume: bool = False) -> None:
        with piper.launch(program, on=on) as trainer:
            for result in trainer.iterate(batch, resume=resume, **how):
                assert found.setdefault(trainer.steps, float(result)) == float(result)
                if trainer.steps == full_after:
                    trainer.settle_save()
                    fill(disk / FILLER)

    with pytest.raises(piper.PiperError, match="No space left on device"):
        train(full_after=5)
    (disk / FILLER).unlink()
    assert [path.name for path in (disk / "run").iterdir()] == ["step-00000003"]
    train(full_after=STEPS + 1, resume=True)
    assert list(found.values()) == expected
