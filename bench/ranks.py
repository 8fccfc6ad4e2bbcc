"""Ranks that share one GPU: starts this program once per rank, and gives each rank its context.

NCCL lets ranks share a GPU if each claims to be its own host, which must be set before torch
starts. Under NVIDIA's MPS, which is started if it is available, their kernels run concurrently, as
on separate GPUs. Without it the ranks take turns, and a rank that waits for another blocks it for a
time slice.

If one rank fails, or the time limit passes, all are ended, and the tails of their logs are shown.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import typer
from report import Comparison, print_cases
from rich.console import Console
from workers import ENVIRONMENT

Given = TypeVar("Given")


@dataclass(frozen=True, slots=True)
class Here:
    """This rank."""

    device: str
    limit: float
    """Time limit in seconds, of the run and of each operation."""
    control: Any
    """The gloo group for everything that is not measured, so that NCCL serves only the sides."""

    def barrier(self) -> None:
        """Return when all ranks are here, and their devices are idle."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier(group=self.control)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0

    def everyone(self, mine: Given) -> list[Given]:
        """Gather one value from each rank."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, group=self.control)
        return found


def run_ranks(count: int, limit: float) -> str | None:
    """Run this program once per rank, to the end; the error with the tails of the logs, or None.
    Leaves no rank running."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "LOCAL_RANK": "0"}
    common |= {"NCCL_SOCKET_NTHREADS": "1", "NCCL_NSOCKS_PERTHREAD": "1"}  # fastest, most even
    common |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-W", "ignore", "-X", "faulthandler", *sys.argv, "--inside"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        common |= stack.enter_context(shared_gpu(Path(folder) / "mps"))
        logs = [Path(folder) / f"{rank}.log" for rank in range(count)]
        ranks = []
        for rank, log in enumerate(logs):
            own = {"RANK": str(rank), "NCCL_HOSTID": f"host{rank}"}
            file = stack.enter_context(log.open("w"))
            ranks.append(
                subprocess.Popen(
                    command,
                    env=os.environ | ENVIRONMENT | common | own,
                    stdout=file if rank else None,
                    stderr=file,
                )
            )
            stack.callback(_end, ranks[-1])
        end = time.monotonic() + limit
        while any(x.poll() is None for x in ranks) and time.monotonic() < end:
            if any(x.poll() for x in ranks):
                end = min(end, time.monotonic() + 5)  # others may also fail and say why
            time.sleep(0.1)
        codes = [x.poll() for x in ranks]
        hang = [rank for rank, code in enumerate(codes) if code is None]
        failed = [rank for rank, code in enumerate(codes) if code]
        if not hang and not failed:
            return None
        found = f"ranks {failed} failed" if failed else f"ranks {hang} took more than {limit:g} s"
        for rank in failed or hang:
            _end(ranks[rank])
            found += "\n".join([f"\n--- rank {rank}", *logs[rank].read_text().splitlines()[-60:]])
        return found


def skip_without(device: str) -> None:
    """Exit if the ranks need a GPU and there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        typer.echo("skipped: no CUDA device here")
        raise typer.Exit


def run_comparison(file: Path, ranks: int, limit: float) -> None:
    """Run the ranks, one of which writes ``file``, and print its content, even if they fail
    later."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    wrong = run_ranks(ranks, limit)
    if file.exists():
        comparison = Comparison.read(file)
        print_cases(comparison, Console(width=140))
    if wrong:
        sys.exit(wrong)
    comparison.check()


@contextlib.contextmanager
def shared_gpu(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which kernels of several processes run concurrently on a GPU: NVIDIA's
    MPS, if it can be started."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield {}
        return
    folder.mkdir()
    named = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    if subprocess.run([control, "-d"], env=os.environ | named).returncode:
        yield {}
        return
    try:
        yield named
    finally:
        subprocess.run(
            [control], input=b"quit\n", env=os.environ | named, stdout=subprocess.DEVNULL
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the process dump its stacks into its log, then end it."""
    if process.poll() is None:
        process.send_signal(signal.SIGABRT)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def entered(device: str, limit: float) -> Iterator[Here]:
    """Join the process group as one rank."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    if device == "cuda":
        torch.cuda.set_device(0)
    wait = timedelta(seconds=limit)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=wait)
    dist.all_reduce(torch.zeros(1, device=device))  # connect all ranks before any two communicate
    here = Here(device, limit, dist.new_group(backend="gloo", timeout=wait))
    with contextlib.ExitStack() as stack:
        stack.push(_fail)
        yield here
    here.barrier()
    dist.destroy_process_group()


def _fail(_: object, error: BaseException | None, __: object) -> None:
    """Exit at once on an error: torch's cleanup might wait for the other ranks."""
    if error is not None:
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)
