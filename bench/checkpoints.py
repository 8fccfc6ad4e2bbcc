"""Saving and loading the training state: ours, torch.save of each rank's own tensors, and torch's
distributed checkpoint (DCP), beside the raw speed of the disk.

    python bench/checkpoints.py [--mb 512] [--ranks 2] [--rounds 3] [--rows 2048]

"in background" is the call with background=True. All save the same tensors with the same sharding
(ZeRO-3 with AdamW) and sync them to disk. They take turns in the same processes. Memory is the rise
of the process's peak, as a share of its own state. Ours also writes checksums of all bytes, and
verifies them before it loads.

The second table is the cost of a background save: the time of the call and the next step, under a
pipeline and under ZeRO. It is compared with steps without a save, and with steps that copy the
whole state first. Nothing is written to disk meanwhile. "copy alone" copies this rank's tensors
between steps.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import piper
from piper.launch.device.device import WorkerDevice
from piper.state.device import checkpoint_parts as parts

WIDTH = 1024


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("layer"):
                x = x + torch.tanh(layer(x))
        return x


def batch_of(rows: int) -> Tensor:
    """The same batch on all ranks."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))


def trainer_of(mb: int, x: Tensor, strategy: piper.Strategy) -> piper.Trainer:
    """A trainer whose state takes about ``mb`` MiB, summed over all ranks."""
    torch.manual_seed(0)
    layers = max(1, mb * 2**20 // (3 * 4 * WIDTH * WIDTH))
    program = piper.compile(
        Net(layers),
        strategy,
        inputs=(x,),
        targets=(x,),
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )
    trainer = piper.launch(program, on="torchrun")
    trainer.step(x, x)
    return trainer


def _device(trainer: piper.Trainer) -> WorkerDevice:
    """The device of this rank."""
    local = trainer._session.devices.local
    assert local is not None
    return local.devices[0]


def own_tensors(trainer: piper.Trainer) -> dict[str, Tensor]:
    """The tensors that this rank holds between steps."""
    state = _device(trainer).state
    found = {f"p{i}": held.updated for i, held in state.held.items()}
    for i, kept in enumerate(state.optimizer.state.values()):
        found |= {f"{kind}{i}": x for kind, x in kept.items() if x.numel() > 1}
    return found


class Ours:
    name = "piper"

    def __init__(self, trainer: piper.Trainer) -> None:
        self.trainer = trainer

    def save(self, path: Path) -> None:
        self.trainer.save(path)

    def load(self, path: Path) -> None:
        self.trainer.load(path)


class Background(Ours):
    """The part of a save that blocks training: the copy, not the disk."""

    name = "in background"

    def save(self, path: Path) -> None:
        self.trainer.save(path, background=True)

    def wait(self) -> None:
        self.trainer.settle_save()


class TorchSave:
    name = "torch.save"

    def __init__(self, trainer: piper.Trainer) -> None:
        self.tensors = own_tensors(trainer)
        self.file = f"rank{dist.get_rank()}.pt"

    def save(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        with (path / self.file).open("wb") as file:
            torch.save(self.tensors, file)
            file.flush()
            os.fsync(file.fileno())
        dist.barrier()

    def load(self, path: Path) -> None:
        found = torch.load(path / self.file, weights_only=True)
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(found[name])
        dist.barrier()


class Dcp:
    name = "DCP"

    def __init__(self, trainer: piper.Trainer) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        own = own_tensors(trainer)
        self.tensors = {n: DTensor.from_local(x, mesh, [Shard(0)]) for n, x in own.items()}

    def save(self, path: Path) -> None:
        dcp.save(self.tensors, checkpoint_id=path)

    def load(self, path: Path) -> None:
        dcp.load(self.tensors, checkpoint_id=path)


class Disk:
    """Writes and reads as many bytes as this rank's state has, and nothing else."""

    name = "disk"

    def __init__(self, trainer: piper.Trainer) -> None:
        self.left = sum(x.nbytes for x in own_tensors(trainer).values())
        self.block = memoryview(os.urandom(4 * 2**20))

    def save(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        with (path / f"{dist.get_rank()}").open("wb", buffering=0) as file:
            for at in range(0, self.left, len(self.block)):
                file.write(self.block[: min(len(self.block), self.left - at)])
            os.fsync(file.fileno())
        dist.barrier()

    def load(self, path: Path) -> None:
        buffer = bytearray(len(self.block))
        with (path / f"{dist.get_rank()}").open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
        dist.barrier()


def resident(what: str) -> int:
    """``VmRSS`` (resident memory) or ``VmHWM`` (its peak), in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise AssertionError(what)


def measured(call: Callable[[], None]) -> tuple[float, int]:
    """Seconds of the call, and the rise of peak memory in bytes."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    start = time.perf_counter()
    call()
    return time.perf_counter() - start, resident("VmHWM") - before


class Held:
    """Blocks the writing of parts, so that the disk does not affect the measurement."""

    def __init__(self) -> None:
        self._usual = parts.write_file
        self.go = threading.Event()
        parts.write_file = self._write

    def _write(self, path: Path, tensors: Any) -> Any:
        self.go.wait()
        return self._usual(path, tensors)


PLAIN, SAVED, AT_ONCE, COPY = "plain step", "after a save", "all copied before", "copy alone"
KINDS = (PLAIN, SAVED, AT_ONCE)


def saved_step(trainer: piper.Trainer, x: Tensor, kind: str, path: Path) -> None:
    """One step of the given kind."""
    if kind != PLAIN:
        trainer.save(path, background=True)
    if kind == AT_ONCE:
        _device(trainer).loaded.finish_copies()
    trainer.step(x, x)


def stalls(folder: Path, mb: int, rows: int, rounds: int) -> dict[str, dict[str, float]]:
    """By strategy: the median seconds of each kind of step, on the slowest rank."""
    ranks = int(os.environ["WORLD_SIZE"])
    strategies = {
        f"pp {ranks}, 1F1B": piper.strategies.mesh(pp=ranks, schedule="1f1b", microbatches=4),
        f"dp {ranks}, ZeRO-1": piper.strategies.mesh(dp=ranks, zero=1),
    }
    held, found = Held(), {}
    for name, strategy in strategies.items():
        x = batch_of(rows)
        taken: dict[str, list[float]] = {PLAIN: [], SAVED: [], AT_ONCE: [], COPY: []}
        with trainer_of(mb, x, strategy) as trainer:
            for turn in range(rounds + 1):  # round 0 does one-time setup; not counted
                for kind in KINDS[turn % 3 :] + KINDS[: turn % 3]:  # rotated: no fixed predecessor
                    held.go.clear()
                    seconds, _ = measured(
                        partial(saved_step, trainer, x, kind, folder / f"stall-{turn}-{kind}")
                    )
                    held.go.set()
                    trainer.settle_save()
                    taken[kind].append(seconds)
                copies = partial(list, (x.clone() for x in own_tensors(trainer).values()))
                taken[COPY].append(measured(copies)[0])
        all_ranks: list[Any] = [None] * ranks
        dist.all_gather_object(all_ranks, taken)
        found[name] = {
            kind: statistics.median([max(r[kind][i + 1] for r in all_ranks) for i in range(rounds)])
            for kind in taken
        }
    return found


def work(folder: Path, mb: int, tokens: int, rounds: int) -> None:
    """The work of one rank."""
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    place = piper.place({}, devices=list(range(ranks)))
    strategy = piper.Strategy([place, piper.replicate({}, zero=3)])
    stalled = stalls(folder, mb // 4, tokens, 3 * rounds)
    with trainer_of(mb, batch_of(ranks), strategy) as trainer:
        state = sum(x.nbytes for x in own_tensors(trainer).values())
        rows = []
        for turn in range(rounds):
            for kind in (Ours, Background, TorchSave, Dcp, Disk):
                side: Any = kind(trainer)
                path = folder / f"{side.name}-{turn}"
                for what in ("save", "load"):
                    seconds, rise = measured(partial(getattr(side, what), path))
                    rows.append([side.name, what, seconds, rise / state])
                    if what == "save" and isinstance(side, Background):
                        side.wait()
                dist.barrier()
                if dist.get_rank() == 0:
                    shutil.rmtree(path)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, rows)
        if dist.get_rank() == 0:
            (folder / "found.json").write_text(json.dumps([state, found, stalled]))


def figures(found: list[Any], side: str, what: str) -> tuple[float, float]:
    """The median seconds of the slowest rank, and the largest memory of any rank."""
    rows = [[(s, m) for name, w, s, m in rank if (name, w) == (side, what)] for rank in found]
    turns: Iterator[Any] = zip(*rows, strict=True)
    slowest = [max(seconds for seconds, _ in turn) for turn in turns]
    return statistics.median(slowest), max(memory for rank in rows for _, memory in rank)


def main(
    mb: Annotated[int, typer.Option(help="MiB of state on all ranks together.")] = 512,
    ranks: Annotated[int, typer.Option(help="Processes.")] = 2,
    rounds: Annotated[int, typer.Option(help="Turns of each side.")] = 3,
    rows: Annotated[int, typer.Option(help="Rows of a batch of the steps after saves.")] = 2048,
    at: Annotated[Path | None, typer.Option(help="The folder to write to.")] = None,
) -> None:
    """Compare ways to save and load."""
    with tempfile.TemporaryDirectory(dir=at) as folder:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        arguments = ["--work", folder, str(mb), str(rows), str(rounds)]
        subprocess.run([sys.executable, *command, __file__, *arguments], check=True)
        state, found, stalled = json.loads((Path(folder) / "found.json").read_text())
    title = f"{state / 2**20:.0f} MiB of state on each of {ranks} ranks, {rounds} rounds"
    table = Table("", "save s", "to ours", "peak +", "load s", "to ours", "peak +", title=title)
    ours = {what: figures(found, Ours.name, what)[0] for what in ("save", "load")}
    for side in (Ours.name, Background.name, TorchSave.name, Dcp.name, Disk.name):
        row = [side]
        for what in ("save", "load"):
            seconds, memory = figures(found, side, what)
            row += [f"{seconds:.2f}", f"{ours[what] / seconds:.2f}", f"{memory:.1%}"]
        table.add_row(*row)
    Console().print(table)
    print("to ours: our seconds divided by theirs; peak +: rise of a rank's memory, of its state")
    table = Table("", *(f"{kind} s" for kind in (PLAIN, SAVED, AT_ONCE, COPY)), "to plain", "")
    for name, row in stalled.items():
        ratios = [f"{row[kind] / row[PLAIN]:.3f}" for kind in (SAVED, AT_ONCE)]
        table.add_row(name, *(f"{s:.3f}" for s in row.values()), *ratios)
    Console().print(table)
    print("to plain: a step after a save, and one before which all is copied, to a step without")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]), *map(int, sys.argv[3:]))
    else:
        typer.run(main)
