"""The demonstration: a mixture of experts on four devices and, to compare, on one.

Two pipeline stages, each on two devices that split the batch and shard the experts. The model reads
the source code of Python's standard library byte by byte, so nothing is downloaded. Every loss is
compared with that of plain PyTorch on one device and the same rows, in float64, where rounding does
not hide an error.
"""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from piper.base.arguments import CompilerName
from piper.capture.model import capture
from piper.cli.demo.layers import lm_loss
from piper.cli.demo.moe import MoEConfig, MoETransformer
from piper.cli.demo.text_data import ByteBatches, stdlib_bytes
from piper.launch.launch import launch
from piper.launch.launchers import Where
from piper.launch.trainer.trainer import Trainer
from piper.program.chunk_table import chunk_table
from piper.program.compile.compiler import compile
from piper.state.optimizer.factory import OptimizerFactory, make
from piper.strategies.directives import partition, place, replicate, shard, split
from piper.strategies.strategy import Strategy

BATCH, SEQ = 16, 64


def four_devices(microbatches: int, zero: int) -> Strategy:
    """Two stages of two devices each, with experts sharded and the rest replicated."""
    return Strategy(
        [
            partition("layer", into="PP", parts=2),
            split(parts=microbatches),
            place({"PP": 0}, devices=[0, 1]),
            place({"PP": 1}, devices=[2, 3]),
            replicate({"EP": "-"}, zero=zero),
            shard({"EP": "*"}),
        ]
    )


def run(
    console: Console,
    *,
    steps: int,
    layers: int,
    dim: int,
    experts: int,
    microbatches: int,
    zero: int,
    on: Where,
    compiler: CompilerName,
    seed: int,
    device: str,
) -> None:
    """Train the model under the strategy, and on one device."""
    torch.set_num_threads(1)  # operations are too small to gain from several cores
    torch.manual_seed(seed)
    config = MoEConfig(
        vocab=256,
        dim=dim,
        layers=layers,
        heads=4,
        mlp_dim=dim,
        max_seq=SEQ,
        experts=experts,
        top_k=min(2, experts),
    )
    model = MoETransformer(config).double()  # annotates its own regions: piper/cli/demo/moe.py
    strategy = four_devices(microbatches, zero)
    batches = ByteBatches(stdlib_bytes(), batch=BATCH, seq=SEQ, seed=seed)
    held_out = ByteBatches(stdlib_bytes(), batch=8 * BATCH, seq=SEQ, split="valid")[0]
    x, y = batches[0]
    how: dict[str, Any] = {
        "inputs": (x,),
        "targets": (y,),
        "loss": lm_loss,
        "compiler": compiler.value,
        "device": device,
    }

    def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=5e-3)

    started = time.perf_counter()
    program = compile(model, strategy, optimizer=adamw, **how)
    console.print(f"{strategy}\n", markup=False)
    console.print(f"compiled in {time.perf_counter() - started:.1f} s: {program}\n", markup=False)
    whole = 2 * microbatches  # a microbatch is split over two devices, so one runs twice as many
    captured = capture(model, microbatches=whole, **how)
    console.print(chunk_table(captured, fold=True))
    alone = OneDevice(copy.deepcopy(model).to(device), adamw, microbatches=whole)
    before = validation_loss(model, *held_out)
    with launch(program, on=on.value) as trainer:
        done, worst = train(trainer, alone, batches, steps, console)
        model.load_state_dict(trainer.state_dict())
    after = validation_loss(model, *held_out)
    console.print(
        f"\n{done} steps on 4 devices and on 1; largest difference of a loss "
        f"[bold]{worst:.1e}[/]; validation loss [bold]{before:.2f} → {after:.2f}[/]"
    )
    console.print("\n[dim]and the trained model writes:[/]\n")
    console.print(sample(model, "    def __init__(self", 240, seed), markup=False)


class OneDevice:
    """Trains the model in plain PyTorch, microbatch by microbatch."""

    def __init__(
        self, model: MoETransformer, optimizer: OptimizerFactory, *, microbatches: int
    ) -> None:
        self._model = model
        self._optimizer = make(optimizer, list(model.named_parameters()))
        self._microbatches = microbatches

    def step(self, x: Tensor, y: Tensor) -> float:
        """Train on one batch. Returns the loss."""
        total, where = 0.0, self._model.head.weight.device
        for part in zip(*(t.to(where).chunk(self._microbatches) for t in (x, y)), strict=True):
            loss = lm_loss(self._model(part[0]), part[1]) / self._microbatches
            loss.backward()
            total += loss.item()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total


def train(
    trainer: Trainer, alone: OneDevice, batches: ByteBatches, steps: int, console: Console
) -> tuple[int, float]:
    """Train both until done or Ctrl-C. Returns the number of steps and the largest relative
    difference of a loss."""
    console.print(f"\n[dim]training for {steps} steps; Ctrl-C stops early[/]")
    console.print("[dim]          four devices     one device[/]")
    bar = Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # without a terminal, the lines printed below suffice
    )
    worst = 0.0
    try:
        with bar:
            task = bar.add_task("", total=steps)
            for step, (x, y) in zip(range(1, steps + 1), batches, strict=False):
                ours, theirs = trainer.step(x, y).loss.item(), alone.step(x, y)
                worst = max(worst, abs(ours - theirs) / abs(theirs))
                bar.update(task, completed=step)
                if step == 1 or step % max(1, steps // 10) == 0:
                    console.print(f"step {step:4}  {ours:.10f}   {theirs:.10f}")
    except KeyboardInterrupt:
        console.print("stopped by Ctrl-C")
    return trainer.steps, worst


def roomy(model: MoETransformer) -> MoETransformer:
    """The same weights in a model that drops no tokens, to run in plain PyTorch."""
    config = model.config
    assert isinstance(config, MoEConfig)
    copied = MoETransformer(replace(config, capacity_factor=config.experts / config.top_k))
    copied.load_state_dict(model.state_dict())
    return copied.eval()


@torch.no_grad()
def validation_loss(model: MoETransformer, x: Tensor, y: Tensor) -> float:
    return lm_loss(roomy(model)(x), y).item()


@torch.no_grad()
def sample(model: MoETransformer, prompt: str, length: int, seed: int) -> str:
    """The prompt, continued byte by byte."""
    reader, generator = roomy(model), torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        logits = reader(tokens[:, -SEQ:])[0, -1]
        token = torch.softmax(logits / 0.8, dim=0).multinomial(1, generator=generator)
        tokens = torch.cat((tokens, token[None]), dim=1)
    text = bytes(tokens[0].tolist()).decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)
