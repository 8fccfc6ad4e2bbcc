"""Chunk programs against plain PyTorch on one device: time and peak memory of loss and gradients.

Four ways to compute the same gradients take turns in one process: eager, eager chunk programs,
whole-model ``torch.compile``, Inductor chunk programs. Ratios compare the medians; the spread is
the interquartile range of the rounds.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from piper.capture.model import capture
from piper.models import DenseConfig, DenseTransformer, lm_loss
from tests.one_device import SingleDevice

Gradients = Callable[[], tuple[Tensor, list[Tensor]]]


@dataclass(slots=True)
class Contender:
    name: str
    against: str | None
    run: Gradients
    seconds: list[float]
    peak_bytes: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def main(
    layers: int = 12,
    dim: int = 1024,
    heads: int = 16,
    mlp_dim: int = 2816,
    vocab: int = 32000,
    batch: int = 8,
    seq: int = 1024,
    rounds: int = 20,
    microbatches: int = 1,
    device: str = "cuda",
    dtype: str = "bfloat16",
    remat: Annotated[str, typer.Option(help="policy of the Inductor chunk programs")] = "min-cut",
    out: Annotated[Path | None, typer.Option(help="write the figures as JSON here")] = None,
) -> None:
    """Print the four ways side by side."""
    torch.manual_seed(0)
    config = DenseConfig(
        vocab=vocab, dim=dim, layers=layers, heads=heads, mlp_dim=mlp_dim, max_seq=seq
    )
    with torch.device(device):
        model = DenseTransformer(config).to(getattr(torch, dtype))
        x = torch.randint(0, vocab, (batch, seq))
        y = torch.randint(0, vocab, (batch, seq))
    console = Console(width=110)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"{parameters / 1e6:.0f}M parameters, {batch} x {seq} tokens in {microbatches} "
        f"microbatches, {dtype}, {_device_name(device)}, torch {torch.__version__}"
    )
    contenders = _contenders(model, x, y, microbatches, remat)
    reference = None
    for contender in contenders:
        start = time.perf_counter()
        for _ in range(3):
            loss, _ = contender.run()
        _synchronize(device)
        console.print(
            f"{contender.name}: loss {loss.item():.6f}, ready in "
            f"{time.perf_counter() - start:.1f} s"
        )
        reference = loss if reference is None else reference
        torch.testing.assert_close(loss.float(), reference.float(), rtol=1e-3, atol=1e-3)
    for contender in contenders:
        contender.peak_bytes = _peak(contender.run, device)
    for _ in range(rounds):
        for contender in contenders:
            _synchronize(device)
            start = time.perf_counter()
            result = contender.run()
            _synchronize(device)
            contender.seconds.append(time.perf_counter() - start)
            del result
    _report(console, contenders, out)


def _contenders(
    model: DenseTransformer, x: Tensor, y: Tensor, microbatches: int, remat: str
) -> list[Contender]:
    parameters = list(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        return lm_loss(model(x), y)

    def plain(forward: Callable[[Tensor, Tensor], Tensor]) -> Gradients:
        def run() -> tuple[Tensor, list[Tensor]]:
            total = torch.zeros((), device=x.device)
            for a, b in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
                loss = forward(a, b)
                (loss / microbatches).backward()
                total += loss.detach()
            grads = [p.grad for p in parameters]
            for p in parameters:
                p.grad = None
            return total / microbatches, grads

        return run

    def chunked(compiler: str, policy: str | None) -> Gradients:
        captured = capture(
            model,
            inputs=(x,),
            targets=(y,),
            loss=lm_loss,
            microbatches=microbatches,
            compiler=compiler,
            remat=policy,
        )
        single = SingleDevice(captured, model)

        def run() -> tuple[Tensor, list[Tensor]]:
            loss, gradients, _ = single.differentiate(x, y)
            return loss, list(gradients.values())

        return run

    return [
        Contender("eager", None, plain(step), []),
        Contender("eager chunks", "eager", chunked("eager", None), []),
        Contender("torch.compile", None, plain(torch.compile(step)), []),
        Contender("inductor chunks", "torch.compile", chunked("inductor", remat), []),
    ]


def _peak(run: Gradients, device: str) -> int:
    if not device.startswith("cuda"):
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated()


def _report(console: Console, contenders: list[Contender], out: Path | None) -> None:
    named = {c.name: c for c in contenders}
    table = Table()
    for column in ("", "median ms", "middle half", "peak MiB", "time ratio", "memory ratio"):
        table.add_column(column, justify="right")
    figures = []
    for c in contenders:
        low, _, high = statistics.quantiles(c.seconds, n=4)
        base = named[c.against] if c.against else None
        time_ratio = c.median / base.median if base else None
        memory_ratio = c.peak_bytes / base.peak_bytes if base and base.peak_bytes else None
        table.add_row(
            c.name,
            f"{1000 * c.median:.2f}",
            f"{1000 * low:.2f} to {1000 * high:.2f}",
            f"{c.peak_bytes / 2**20:.0f}",
            f"{time_ratio:.3f}" if time_ratio else "",
            f"{memory_ratio:.3f}" if memory_ratio else "",
        )
        row = {"name": c.name, "seconds": c.seconds, "peak_bytes": c.peak_bytes}
        figures.append({**row, "time_ratio": time_ratio, "memory_ratio": memory_ratio})
    console.print(table)
    if out is not None:
        out.write_text(json.dumps(figures, indent=1))


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else device


if __name__ == "__main__":
    typer.run(main)
