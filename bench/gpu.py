"""Whole training steps on one GPU: ours beside ``torch.compile``, and pipelines of virtual devices.

One dense transformer of 200M parameters in bf16, fused AdamW, the same weights and batches. The
sides take turns. A step is timed on the host, with the device synchronized before and after:

    8 x 1,024 tokens     ours and torch.compile, each with and without CUDA graphs
    1 x 1,024 tokens     the same
    8 microbatches of 1 and of 4 x 1,024 tokens
                         ours on one device; 1F1B on 4 and 8 virtual devices, DualPipeV on 4

Memory is the bytes that a side holds between steps, plus the most it allocates beyond that in one.

    python bench/gpu.py [--rounds 20] [--json FILE]
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import typer
from options import File, Rounds
from report import Case, Comparison
from torch import Tensor
from turns import turns

import piper
from piper.models import DenseConfig, DenseTransformer, lm_loss
from piper.strategies import mesh

adamw = partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.1, fused=True)
COMPARED, TOLERANCE = 10, 5e-4
"""Whole-model compilation and chunk programs fuse differently, so bf16 rounds differently. Losses
differ by 3e-5 in the first step, and the difference grows from step to step."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The model and the batch size."""

    config: DenseConfig
    rows: int
    microbatches: int

    def model(self) -> DenseTransformer:
        torch.manual_seed(0)
        return DenseTransformer(self.config).to(torch.bfloat16)

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        draws = torch.Generator("cuda").manual_seed(seed)
        shape = (self.rows * self.microbatches, self.config.max_seq + 1)
        tokens = torch.randint(self.config.vocab, shape, generator=draws, device="cuda")
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


Make = Callable[[contextlib.ExitStack], Callable[[Tensor, Tensor], Tensor]]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train."""

    make: Make
    graphs: bool
    """Whether it uses CUDA graphs: the allocator does not count their memory."""


class Side:
    """A way to train, and its memory."""

    def __init__(self, way: Way, stack: contextlib.ExitStack) -> None:
        gc.collect()
        before = torch.cuda.memory_allocated()
        self._graphs = way.graphs
        self._step = way.make(stack)
        self._before, self._held, self._peak = before, 0, 0

    def step(self, x: Tensor, y: Tensor) -> float:
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated() - self._held
        loss = self._step(x, y)
        torch.cuda.synchronize()
        self._peak = max(self._peak, torch.cuda.max_memory_allocated() - others)
        return float(loss)

    def settle(self) -> None:
        """Record the memory held between steps; all of it exists from now on."""
        gc.collect()
        torch.cuda.synchronize()
        self._held = torch.cuda.memory_allocated() - self._before
        self._peak = 0

    def running(self) -> float:
        return 0.0

    def peak(self) -> int:
        return 0 if self._graphs else self._peak


def torchs(setting: Setting, mode: str | None) -> Way:
    def make(_: contextlib.ExitStack) -> Callable[[Tensor, Tensor], Tensor]:
        model = setting.model().cuda()
        optimizer = adamw(model.parameters())
        forward = torch.compile(lambda x, y: lm_loss(model(x), y), mode=mode)
        parts = setting.microbatches

        def step(x: Tensor, y: Tensor) -> Tensor:
            total = torch.zeros((), device="cuda")
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
                if mode is not None:
                    torch.compiler.cudagraph_mark_step_begin()
                loss = forward(a, b) / parts
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return total

        return step

    return Way(make, mode is not None)


def ours(setting: Setting, strategy: piper.Strategy, graphs: bool) -> Way:
    def make(stack: contextlib.ExitStack) -> Callable[[Tensor, Tensor], Tensor]:
        x, y = setting.batch(0)
        program = piper.compile(
            setting.model(),
            strategy,
            inputs=(x,),
            targets=(y,),
            loss=lm_loss,
            optimizer=adamw,
            compiler="inductor",
            device="cuda",
        )
        trainer = stack.enter_context(piper.launch(program, cuda_graphs=graphs))
        return lambda x, y: trainer.step(x, y).loss

    return Way(make, graphs)


def single(setting: Setting) -> dict[str, Way]:
    """The sides on one device."""
    strategy = mesh(microbatches=setting.microbatches)
    return {
        "torch.compile": torchs(setting, None),
        "torch.compile, reduce-overhead": torchs(setting, "reduce-overhead"),
        "piper": ours(setting, strategy, False),
        "piper, CUDA graphs": ours(setting, strategy, True),
    }


def pipelines(setting: Setting) -> dict[str, Way]:
    """Pipelines on several virtual devices, beside one device."""
    parts = setting.microbatches
    found = {}
    for graphs in (False, True):
        kinds = {
            "one device": mesh(microbatches=parts),
            "1F1B, 4 stages": mesh(pp=4, microbatches=parts),
            "1F1B, 8 stages": mesh(pp=8, microbatches=parts),
            "DualPipeV, 4 ranks": mesh(pp=4, schedule="dualpipev", microbatches=parts),
        }
        for name, strategy in kinds.items():
            label = f"piper, {name}{', CUDA graphs' if graphs else ''}"
            found[label] = ours(setting, strategy, graphs)
    return found


def main(
    layers: int = 12,
    dim: int = 1024,
    heads: int = 16,
    mlp_dim: int = 2816,
    vocab: int = 32000,
    seq: int = 1024,
    rounds: Rounds = 20,
    only: Annotated[list[int] | None, typer.Option(help="Cases, by number; or all.")] = None,
    file: File = None,
) -> None:
    """Compare steps on a GPU."""
    if not torch.cuda.is_available():
        typer.echo("skipped: no CUDA device here")
        raise typer.Exit
    config = DenseConfig(
        vocab=vocab, dim=dim, layers=layers, heads=heads, mlp_dim=mlp_dim, max_seq=seq
    )
    kinds = [
        (Setting(config, 8, 1), single, "8 x {} tokens", "torch.compile"),
        (Setting(config, 1, 1), single, "1 x {} tokens", "torch.compile"),
        (Setting(config, 1, 8), pipelines, "8 microbatches of 1 x {} tokens", "piper, one device"),
        (Setting(config, 4, 8), pipelines, "8 microbatches of 4 x {} tokens", "piper, one device"),
    ]
    cases = []
    for number, (setting, sides, name, against) in enumerate(kinds):
        if only and number not in only:
            continue
        found = turns(
            setting.batch,
            sides(setting),
            Side,
            rounds=rounds,
            turn=3,
            warm=5,
            tell=lambda text: typer.echo(text, err=True),
        )
        cases.append(Case(name.format(seq), against, found))
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    comparison = Comparison("one GPU", where, cases, tolerance=TOLERANCE, compared=COMPARED)
    comparison.conclude(file)


if __name__ == "__main__":
    typer.run(main)
