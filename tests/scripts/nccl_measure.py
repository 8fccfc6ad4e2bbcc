"""Trains larger programs of a folder on two NCCL ranks, and measures memory and host time.

    nccl_measure.py FOLDER      under torchrun

Each rank writes ``measured.RANK``. Steps run under torch's check that the host never waits.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import torch

import piper
from tests.scripts.nccl_cases import LARGE, LARGER, Case, batch


def main(folder: Path) -> None:
    found = {}
    for name, case in LARGER.items():
        for graphs in (False, True):
            found[name, graphs] = measured(case, folder / name, graphs)
            print(name, graphs, found[name, graphs], flush=True)
    torch.save(found, folder / f"measured.{os.environ['RANK']}")


def measured(case: Case, path: Path, graphs: bool) -> dict[str, float]:
    program = case.load(path)
    number = program.devices[int(os.environ["RANK"])]
    plan = program.plan_of(number)
    memory = program.memory[program.plans.index(plan)]
    x, y = (tensor.cuda() for tensor in batch(0, LARGE))
    with piper.launch(
        program, on="torchrun", share_gpus=True, timeout=60, cuda_graphs=graphs
    ) as trainer:
        for _ in range(4):
            trainer.step(x, y)
        torch.cuda.synchronize()
        other = torch.cuda.memory_allocated() - memory.parameters - memory.optimizer
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_sync_debug_mode("error")
        host, whole = [], []
        try:
            for _ in range(5):
                start = time.perf_counter()
                trainer.step(x, y)
                host.append(time.perf_counter() - start)
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
                whole.append(time.perf_counter() - start)
                torch.cuda.set_sync_debug_mode("error")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        peak = torch.cuda.max_memory_allocated() - other
    return {
        "measured": peak,
        "predicted": memory.peak,
        "host ms": 1e3 * statistics.median(host),
        "step ms": 1e3 * statistics.median(whole),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
