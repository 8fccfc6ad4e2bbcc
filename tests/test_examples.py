"""The programs of examples/ at small sizes, started as a reader would."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
BIN = Path(sys.executable).parent
SMALL = ("--layers", "4", "--dim", "16", "--seq", "8", "--batch", "16", "--every", "1")
STAND_INS = {"scontrol": "echo localhost", "srun": 'shift; exec "$@"'}
"""Slurm's commands for a cluster of this machine alone."""


def run(*command: str | Path, cwd: Path, **more: str) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed: str) -> list[str]:
    """The steps and losses in a program's output, as text."""
    return re.findall(r"^step \d+: loss [\d.]+", printed, re.M)


def moe(folder: Path, *options: str) -> list[str]:
    """Pretrain at a small size on virtual devices."""
    program = EXAMPLES / "pretrain_moe.py"
    return losses(run(sys.executable, program, "--on", "virtual", *SMALL, *options, cwd=folder))


@pytest.mark.slow
def test_lora_trains_resumes_merges_and_writes_a_model(tmp_path: Path) -> None:
    command = (sys.executable, EXAMPLES / "lora.py", "--checkpoints", "run")
    first = run(*command, "--steps", "10", cwd=tmp_path)
    assert "3,584 of 57,120 parameters trained" in first
    # Another strategy resumes from the same checkpoints.
    again = (*command, "--steps", "15", "--pp", "1", "--zero", "3", "--out", "merged")
    rest = run(*again, cwd=tmp_path)
    assert [line.split(":")[0] for line in losses(first + rest)] == [
        "step 1",
        "step 5",
        "step 10",
        "step 15",
    ]
    apart = re.search(r"logits differ by at most (\S+) of", rest)
    assert apart is not None
    assert float(apart[1]) < 1e-5
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").config.vocab_size == 256


@pytest.mark.slow
def test_pretraining_resumes_under_torchrun(tmp_path: Path) -> None:
    whole = moe(tmp_path, "--steps", "4")
    assert len(whole) == 4
    kept = ("--checkpoints", "run")
    assert moe(tmp_path, "--steps", "4", *kept) == whole
    shutil.rmtree(tmp_path / "run" / "step-00000004")
    command = (BIN / "torchrun", "--standalone", "--nproc-per-node", "4")
    program = (EXAMPLES / "pretrain_moe.py", *SMALL, "--steps", "4", *kept)
    assert losses(run(*command, *program, cwd=tmp_path)) == whole[3:]


@pytest.mark.slow
def test_the_slurm_script_starts_the_program(tmp_path: Path) -> None:
    for name, does in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    printed = run(
        "bash",
        EXAMPLES / "slurm.sbatch",
        *(*SMALL, "--pp", "1", "--dp", "2", "--ep", "2", "--microbatches", "4", "--steps", "2"),
        cwd=tmp_path,
        PATH=f"{tmp_path}:{BIN}:{os.environ['PATH']}",
        RUN=str(tmp_path / "run"),
        PORT="0",
        DEVICE="cpu",
        PRECISION="fp32",
        SLURM_JOB_ID="1",
        SLURM_JOB_NODELIST="localhost",
        SLURM_NNODES="1",
        SLURM_GPUS_ON_NODE="2",
        SLURM_SUBMIT_DIR=str(ROOT),
    )
    assert len(losses(printed)) == 2
    assert printed.count("done") == 1, "only rank 0 prints"
    assert (tmp_path / "run" / "step-00000002").is_dir()


def test_the_kubernetes_file_starts_the_same_program() -> None:
    yaml = pytest.importorskip("yaml")
    documents: list[Any] = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))
    service, job = documents
    name = job["metadata"]["name"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = container["command"]
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert f"--master-addr={name}-0.{pod['subdomain']}" in command
    assert f"--nnodes={job['spec']['completions']}" in command
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    known = set(re.findall(r'"(--[a-z]+)"', (EXAMPLES / "pretrain_moe.py").read_text()))
    script = command.index("examples/pretrain_moe.py")
    given = dict(part.split("=") for part in command[script + 1 :])
    assert set(given) <= known
    assert int(given["--pp"]) * int(given["--dp"]) == 4 * 8


@pytest.mark.slow
def test_an_order_by_a_profile_changes_no_loss(tmp_path: Path) -> None:
    printed = run(sys.executable, EXAMPLES / "profile_guided.py", "--on", "virtual", cwd=tmp_path)
    assert printed.splitlines()[-1] == "equal up to reduction order"


@pytest.mark.slow
def test_a_schedule_of_ones_own_trains(tmp_path: Path) -> None:
    printed = run(sys.executable, EXAMPLES / "own_schedule.py", cwd=tmp_path)
    assert printed.splitlines()[-1] == "equal, bit for bit"
