"""The wheel without a checkout contains all that the commands and pages need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_a_wheel_runs_the_demo_and_writes_pages(tmp_path: Path) -> None:
    source, wheels, site = tmp_path / "source", tmp_path / "wheels", tmp_path / "site"
    source.mkdir()
    shutil.copytree(ROOT / "piper", source / "piper", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel")
    run(*pip, "--no-build-isolation", "--no-deps", "--wheel-dir", wheels, source, cwd=tmp_path)
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        packed.extractall(site)
    assets = {f"piper/view/assets/{path.name}" for path in (ROOT / "piper/view/assets").iterdir()}
    assert assets | {"piper/py.typed", "piper/cli/demo/demo.py"} <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "bench/"))]

    piper = (sys.executable, "-P", "-m", "piper")
    small = ("--steps", "1", "--dim", "16", "--experts", "2", "--microbatches", "2")
    assert "largest difference of a loss" in run(*piper, "demo", *small, cwd=tmp_path, site=site)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run(
        *piper, "show", script, "--dag", "dag.html", "--timeline", "t.html", cwd=tmp_path, site=site
    )
    for page in ("dag.html", "t.html"):
        assert "<script" in (tmp_path / page).read_text()


def run(*command: str | Path, cwd: Path, site: Path | None = None) -> str:
    """The output of a command; Piper is imported from ``site``."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(site or "")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SCRIPT = """
import piper, torch
from torch import nn

assert piper.__file__.startswith(__file__.removesuffix("train.py") + "site")


class Net(nn.Linear):
    def forward(self, x):
        with piper.annotate("layer"):
            return super().forward(x)


x = torch.ones(4, 4)
job = piper.Job(Net(4, 4), (x,), (x,), nn.functional.mse_loss, strategy=piper.strategies.mesh(dp=2))
"""
