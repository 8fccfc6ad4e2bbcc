"""Steps of several ranks over NCCL that share one GPU: ours beside torch's own parallelism.

One transformer, in fp32 unless the case says otherwise, the same weights, batches and AdamW; on 2
or 4 ranks:

    1f1b, interleaved, zb-v, dualpipev   the same schedule of ``torch.distributed.pipelining``
    ddp                                  ``DistributedDataParallel``
    zero-2, zero-3                       ``fully_shard`` that keeps, or frees, gathered parameters
    tp, tp-sequence                      ``parallelize_module``, without and with sequence parallel
    experts, experts-bf16                TorchTitan's dispatch: experts, no token dropped

Each side runs without a report and with one. A report has the loss of all ranks and the norm of all
gradients, which take extra communication.

NCCL lets ranks share a GPU if each claims to be its own host. They then communicate over the
loopback: order and lifetimes are real, speeds are not those of a cluster, for all sides alike.

The sides of a case take turns in one set of processes. Every rank times a turn as a whole, between
two barriers on a synchronized device; nothing inside a turn waits for the device. ``host`` is the
time of the call alone, on the slowest rank. Memory is the peak that a side allocates, on each rank.
The losses of the first steps must agree: a faster wrong answer fails.

    python bench/nccl.py [--ranks 4] [--sides 1f1b] [--device cpu] [--json FILE]
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import data_parallel
import expert_parallel
import pipelines
import tensor_parallel
import torch
import torch.distributed as dist
import typer
from expert_peers import Dispatched
from options import Device, File, Fused, Inside, Layers, Limit, Ranks, Seq, Vocab, Warm, chosen
from peers import Piped, Replicated, Sharded, Tensored
from ranks import Here, entered, run_comparison, skip_without
from report import Case, Comparison, best, theirs
from torch import Tensor
from turns import Found
from work import Work, reference
from workers import Way

import piper
from piper.models import DenseConfig
from piper.strategies import one_f_one_b

LEVELS = {"ddp": 0, "zero-2": 2, "zero-3": 3}
TENSOR = {"tp": False, "tp-sequence": True}
EXPERTS = {"experts": torch.float32, "experts-bf16": torch.bfloat16}
CASES = ("1f1b", *LEVELS, *TENSOR, *EXPERTS, "interleaved", "zb-v", "dualpipev")
"""Rare cases come last: if a rank hangs, the results of the earlier cases are known."""
COSTS = piper.Costs(flops_per_second=20e12, bytes_per_second=1e9, overhead=5e-5)
"""Roughly the speed of fp32 kernels and of sockets on one machine."""
BUCKETS = (25.0, 4.0)
"""Sizes in MB: torch's default, and a smaller one."""
WARM = 10
"""Warm-up steps, whose losses must agree. Later losses may not: AdamW amplifies rounding."""


@dataclass(frozen=True, slots=True)
class Ours:
    """A program, and how it is launched."""

    program: piper.Program
    cuda_graphs: bool = False


Make = Callable[[], Ours | piper.Program | Way]
REPORTING = ", loss and norm"
"""The suffix of the names of sides that report."""


class Side:
    """A way to train on this rank, with its times and memory."""

    def __init__(self, make: Make, here: Here) -> None:
        gc.collect()
        self._here, self._held = here, 0
        self._allocates = here.device == "cuda"
        """Whether the allocator counts a step's memory: a CUDA graph has a pool of its own."""
        self._forget()
        self._before = here.allocated()
        self.found = Found()
        what, rank = make(), dist.get_rank()
        if isinstance(what, piper.Program):
            what = Ours(what)
        if isinstance(what, Ours):
            program, graphs = what.program, what.cuda_graphs
            self._allocates &= not graphs
            trainer = piper.launch(program, on="torchrun", timeout=here.limit, cuda_graphs=graphs)
            self.close: Callable[[], None] = trainer.close
            device = program.devices[rank]
            self.found.predicted = [m.peak for m in program.memory if device in m.devices]
            self._rows: Callable[[Tensor], Any] = lambda x: x
            self._step: Callable[[Any, Any, bool], Any] = lambda x, y, report: trainer.step(
                x, y, report=report
            )
        else:
            self._rows = lambda x: what.rows(x, rank)
            step = what.begin()
            self._step = lambda x, y, report: step(x, y)
            self.close = lambda: None

    def take(self, batches: Sequence[tuple[Tensor, Tensor]], *, report: bool) -> None:
        """Train on ``batches`` and time them as a whole. Ours can ``report`` or not in each turn;
        theirs ignores it."""
        given = [(self._rows(x), self._rows(y)) for x, y in batches]
        losses, host = [], []
        self._forget()
        others = self._here.allocated() - self._held
        if self._here.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._here.barrier()
        start = time.perf_counter()
        for x, y in given:
            began = time.perf_counter()
            losses.append(self._step(x, y, report))
            host.append(time.perf_counter() - began)
        self._here.barrier()
        self.found.seconds.append((time.perf_counter() - start) / len(given))
        self.found.host += host
        if report:
            self.found.losses += map(float, losses)
        if self._allocates:
            peak = torch.cuda.max_memory_allocated() - others
            self.found.memory = max(self.found.memory, peak)

    def _forget(self) -> None:
        """Free the cuBLAS workspaces, so that every side pays for those of its own streams and
        threads, and the first side does not pay for all."""
        if self._here.device == "cuda":
            self._here.barrier()
            torch._C._cuda_clearCublasWorkspaces()

    def settle(self) -> None:
        """End of warm-up: record the memory held between steps, and reset the measurements."""
        gc.collect()
        self._forget()
        self._held = self._here.allocated() - self._before
        self.found.seconds, self.found.host, self.found.memory = [], [], 0


def measure(
    here: Here, name: str, sides: Mapping[str, Make], work: Work, rounds: int, steps: int, warm: int
) -> list[Case]:
    """Start and warm up each side once; then the sides take turns, in alternating order."""

    def batches(first: int, count: int) -> list[tuple[Tensor, Tensor]]:
        drawn = (work.batch(first + i) for i in range(count))
        return [(x.to(here.device), y.to(here.device)) for x, y in drawn]

    ready: dict[str, Side] = {}
    for side, make in sides.items():
        print(f"{name}: {side} starts", file=sys.stderr, flush=True)
        ready[side] = Side(make, here)
        ready[side].take(batches(0, warm), report=True)
        ready[side].settle()
    for number in range(rounds):
        print(f"{name}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        given = batches(warm + number * steps, steps)
        for side in list(sides)[:: -1 if number % 2 else 1]:
            ready[side].take(given, report=side.endswith(REPORTING))
    for one in ready.values():  # not after an error: close waits for the other ranks
        one.close()
    found = {side: joined(here.everyone(one.found)) for side, one in ready.items()}
    return [
        Case(f"{name}{more}", best(kept, theirs(kept)), kept)
        for more in ("", REPORTING)
        if (kept := {k: v for k, v in found.items() if k.endswith(REPORTING) is bool(more)})
    ]


def joined(ranks: Sequence[Found]) -> Found:
    """One side over all ranks: the times of the slowest, and the loss of the ranks that know it."""
    losses = torch.tensor([x.losses for x in ranks], dtype=torch.float64)
    return Found(
        losses=losses.nanmean(0).tolist(),
        seconds=[max(each) for each in zip(*(x.seconds for x in ranks), strict=True)],
        host=[max(each) for each in zip(*(x.host for x in ranks), strict=True)],
        memory=max(x.memory for x in ranks),
        by_rank=[x.memory for x in ranks],
        predicted=[peak for x in ranks for peak in x.predicted],
    )


def sides_of(name: str, work: Work, buckets: Sequence[float], device: str) -> dict[str, Make]:
    """Our sides and theirs."""
    found: dict[str, Make] = {}
    for reports in (False, True):
        more = REPORTING if reports else ""
        if name in TENSOR:
            sequence = TENSOR[name]
            one = one_f_one_b(1, work.microbatches)
            for schedule in (one, one.with_weights_apart()):
                found[f"piper {schedule.name}{more}"] = partial(
                    tensor_parallel.program, work, sequence, schedule, COSTS, device
                )
            found[f"torch parallelize_module{more}"] = partial(
                Tensored, work, sequence, device, reports
            )
            continue
        if name in EXPERTS:
            if not reports:  # theirs does not report
                found |= experts(work, device)
            continue
        if name not in LEVELS:
            torchs = pipelines.SCHEDULES[name]
            found[f"piper {name}{more}"] = partial(pipelines.program, work, name, device, COSTS)
            found[f"torch {torchs}{more}"] = partial(Piped, work, torchs, device, reports)
            continue
        zero = LEVELS[name]
        for mb in buckets:
            found[f"piper zero={zero}, {mb:g} MB{more}"] = partial(
                data_parallel.program, work, zero, mb, "1f1b", COSTS, device
            )
            if zero == 0:
                found[f"DDP, {mb:g} MB{more}"] = partial(
                    Replicated, work, mb, device, False, reports
                )
        if zero:
            ahead = device == "cpu"  # the default on GPUs
            found[f"FSDP2{more}"] = partial(Sharded, work, zero == 3, ahead, True, device, reports)
    return found


def experts(work: Work, device: str) -> dict[str, Make]:
    """One microbatch after another, and in pairs; with a bound on the rows of a rank; and as a CUDA
    graph, which theirs cannot be, because its host reads the counts."""
    ours = partial(expert_parallel.program, work, costs=COSTS, device=device)
    found: dict[str, Make] = {
        "piper 1f1b": partial(ours, "1f1b", None),
        "piper dualpipev": partial(ours, "dualpipev", None),
        "piper 1f1b, capacity=2": partial(ours, "1f1b", 2.0),
        "torch, dispatched by counts": partial(Dispatched, work, device),
    }
    if device == "cuda":
        for schedule in ("1f1b", "dualpipev"):
            found[f"piper {schedule}, CUDA graph"] = partial(_graph, ours, schedule)
    return found


def _graph(ours: Callable[..., piper.Program], schedule: str) -> Ours:
    return Ours(ours(schedule, None), cuda_graphs=True)


def main(
    ranks: Ranks = 2,
    sides: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(CASES)}; or all.")] = None,
    device: Device = "cuda",
    layers: Layers = 8,
    dim: Annotated[
        int,
        typer.Option(help="Its width; 0: 512, divided by the ranks except for tp."),
    ] = 0,
    seq: Seq = 128,
    vocab: Vocab = 1024,
    microbatches: Annotated[int, typer.Option(help="Of a step of a pipeline.")] = 8,
    rows: Annotated[int, typer.Option(help="Sequences of a microbatch, for each rank.")] = 2,
    bucket_mb: Annotated[
        list[float] | None,
        typer.Option(help="Of ours and DDP's buckets: 25 and 4, the best counts."),
    ] = None,
    fused: Fused = True,
    rounds: Annotated[int, typer.Option(min=1, help="How often each side has its turn.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a turn.")] = 8,
    warm: Warm = WARM,
    limit: Limit = 240,
    file: File = None,
    inside: Inside = False,
) -> None:
    """Compare steps of ranks that share a GPU."""
    skip_without(device)
    names = chosen(sides, CASES)
    file = file or Path("bench-results") / f"nccl-{ranks}.json"
    if inside:

        def sized(name: str) -> DenseConfig:
            if name in EXPERTS:
                return expert_parallel.mixture(layers, dim or 512 // ranks, seq, vocab, 8)
            return reference(layers, dim or (512 if name in TENSOR else 512 // ranks), seq, vocab)

        chip = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        widths = " or ".join(sorted({str(sized(name).dim) for name in names}))
        size = f"{layers} blocks of {widths}, {microbatches * rows * ranks} x {seq} tokens"
        comparison = Comparison(
            f"{ranks} ranks over {'NCCL on one GPU' if device == 'cuda' else 'gloo'}",
            f"{chip}, {size}, torch {torch.__version__}",
            [],
            compared=warm,
            tolerance=1e-5 if set(names).isdisjoint({"experts-bf16"}) else 1e-3,
        )
        began = time.monotonic()
        with entered(device, limit) as here:
            for name in names:
                parts = 1 if name in (*LEVELS, *TENSOR) else microbatches
                dtype = EXPERTS.get(name, torch.float32)
                share = rows * microbatches // parts
                work = Work(sized(name), ranks, parts, share, fused, dtype)
                makes = sides_of(name, work, bucket_mb or BUCKETS, device)
                comparison.cases.extend(measure(here, name, makes, work, rounds, steps, warm))
                if dist.get_rank() == 0:
                    comparison.write(file)
                    print(f"{name}: done after {time.monotonic() - began:,.0f} s", flush=True)
        return
    run_comparison(file, ranks, limit)


if __name__ == "__main__":
    typer.run(main)
