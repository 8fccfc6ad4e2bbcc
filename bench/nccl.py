"""Steps of several ranks over NCCL that share one GPU: ours beside torch's own parallelism.

One transformer in fp32, or as the case says, the same weights, batches and AdamW; on 2 or 4 ranks:

    1f1b, interleaved, zb-v, dualpipev   the same schedule of ``torch.distributed.pipelining``
    ddp                                  ``DistributedDataParallel``
    zero-2, zero-3                       ``fully_shard`` that keeps, or frees, gathered parameters
    tp, tp-sequence                      ``parallelize_module``, without and with sequence parallel
    experts, experts-bf16                TorchTitan's way of dispatch: experts, no token dropped

Each side runs without a report, and with one: the loss of all ranks and the norm of all gradients,
which take communication of their own.

NCCL lets ranks share a GPU if each says that it is a host of its own. They talk over the loopback
then: order and lifetimes are real, and speeds are not those of a cluster, for all sides alike.

The sides of a case take turns in one set of processes. A turn is timed on every rank as a whole,
between two barriers on a synchronized device; nothing waits for the device inside it. The time of
the call alone is ``host``, of the rank where it took longest. Memory is what a side allocates at
most, on each rank. The losses of the first steps must agree: a faster wrong answer fails.

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
"""The rarer ones last: where a rank hangs, the cases before it are known."""
COSTS = piper.Costs(flops_per_second=20e12, bytes_per_second=1e9, overhead=5e-5)
"""About what fp32 kernels and sockets of one machine do."""
BUCKETS = (25.0, 4.0)
"""Sizes in MB: torch's default, and a smaller one."""
WARM = 10
"""Steps before all others, whose losses must agree: AdamW multiplies differences of rounding."""


@dataclass(frozen=True, slots=True)
class Ours:
    """A program, and how it is launched."""

    program: piper.Program
    cuda_graphs: bool = False


Make = Callable[[], Ours | piper.Program | Way]
REPORTING = ", loss and norm"
"""What names of sides that report end in."""


class Side:
    """Something that trains on this rank, and what it took."""

    def __init__(self, make: Make, here: Here) -> None:
        gc.collect()
        self._here, self._held = here, 0
        self._allocates = here.device == "cuda"
        """Whether the allocator knows what a step takes: not of a CUDA graph, which has its own."""
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
        """Train on ``batches``; only the whole of it is timed. Whether ours ``report`` can be said
        of every turn."""
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
        """Let the workspaces of cuBLAS go, so that every side pays for those of its own streams and
        threads, and not the first for all."""
        if self._here.device == "cuda":
            self._here.barrier()
            torch._C._cuda_clearCublasWorkspaces()

    def settle(self) -> None:
        """Warm from now on, and everything that is kept between steps is there."""
        gc.collect()
        self._forget()
        self._held = self._here.allocated() - self._before
        self.found.seconds, self.found.host, self.found.memory = [], [], 0


def measure(
    here: Here, name: str, sides: Mapping[str, Make], work: Work, rounds: int, steps: int, warm: int
) -> list[Case]:
    """Each side is begun once and made warm; then they take turns, there and back."""

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
    for one in ready.values():  # not after an error: the other ranks would be waited for
        one.close()
    found = {side: joined(here.everyone(one.found)) for side, one in ready.items()}
    return [
        Case(f"{name}{more}", best(kept, theirs(kept)), kept)
        for more in ("", REPORTING)
        if (kept := {k: v for k, v in found.items() if k.endswith(REPORTING) is bool(more)})
    ]


def joined(ranks: Sequence[Found]) -> Found:
    """What all ranks found of one side: times of the slowest, and the loss of those that know."""
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
    """Ours and theirs."""
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
            if not reports:  # theirs reports nothing
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
            ahead = device == "cpu"  # on GPUs it is the default
            found[f"FSDP2{more}"] = partial(Sharded, work, zero == 3, ahead, True, device, reports)
    return found


def experts(work: Work, device: str) -> dict[str, Make]:
    """One microbatch after another and in pairs; with a bound on the rows of a rank; and as a CUDA
    graph, which theirs cannot be: its host reads counts."""
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
