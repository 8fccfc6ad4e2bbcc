"""Train a small mixture-of-experts language model on four devices, beside the same on one.

Two pipeline stages, each on two devices that share the batch and divide the experts. The model
reads the source of Python's own standard library, byte by byte. Every loss is compared with that of
one device that runs the same rows: in float64, where rounding does not hide a mistake.
"""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import piper
from piper import PiperError
from piper.capture import capture
from piper.capture.codegen import CompilerName
from piper.data import ByteBatches, stdlib_bytes
from piper.launch.launch import Where
from piper.models import MoEConfig, MoETransformer, lm_loss
from piper.single import SingleDevice
from piper.view import chunk_table

BATCH, SEQ = 16, 64
console = Console(highlight=False)


def strategy(microbatches: int, zero: int) -> piper.Strategy:
    """Two stages of two devices each; experts divided, everything else replicated."""
    return piper.Strategy(
        [
            piper.partition("layer", into="PP", parts=2),
            piper.split(parts=microbatches),
            piper.place({"PP": 0}, devices=[0, 1]),
            piper.place({"PP": 1}, devices=[2, 3]),
            piper.replicate({"EP": "-"}, zero=zero),
            piper.shard({"EP": "*"}),
        ]
    )


def main(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 60,
    layers: Annotated[int, typer.Option(min=2, help="Transformer blocks.")] = 2,
    dim: Annotated[int, typer.Option(min=4, help="Width of the residual stream.")] = 48,
    experts: Annotated[int, typer.Option(min=2, help="Experts in each block.")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="Parts of each batch.")] = 4,
    zero: Annotated[int, typer.Option(min=0, max=3, help="What replicas divide.")] = 1,
    on: Annotated[Where, typer.Option(help="What a device is.")] = Where.VIRTUAL,
    compiler: Annotated[CompilerName, typer.Option(help="Runs the chunks.")] = CompilerName.EAGER,
    seed: Annotated[int, typer.Option(help="Of the weights and the batches.")] = 0,
    device: Annotated[str, typer.Option(help="Where to train, such as cpu or cuda.")] = "cpu",
) -> None:
    """Train a small mixture-of-experts language model on four devices, beside the same on one."""
    check_device(device)
    torch.set_num_threads(1)  # operations this small lose more by waiting than cores gain
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
    model = MoETransformer(config).double()  # names its regions itself: see piper/models/moe.py
    batches = ByteBatches(stdlib_bytes(), batch=BATCH, seq=SEQ, seed=seed)
    held_out = ByteBatches(stdlib_bytes(), batch=8 * BATCH, seq=SEQ, split="valid")[0]
    x, y = batches[0]
    how = {"inputs": (x,), "targets": (y,), "loss": lm_loss, "compiler": compiler.value}

    def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=5e-3)

    started = time.perf_counter()
    plan = strategy(microbatches, zero)
    program = piper.compile(model, plan, optimizer=optimizer, device=device, **how)
    console.print(f"{plan}\n", markup=False)
    console.print(f"compiled in {time.perf_counter() - started:.1f} s: {program}\n", markup=False)
    # a microbatch is divided over two devices, so one device runs twice as many
    rows = capture(model, microbatches=2 * microbatches, device=device, **how)
    console.print(chunk_table(rows, fold=True))
    alone = SingleDevice(rows, copy.deepcopy(model), optimizer, seed=seed)
    before = validation_loss(model, *held_out)
    with piper.launch(program, on=on.value) as trainer:
        done, worst = train(trainer, alone, batches, steps)
        model.load_state_dict(trainer.state_dict())
    after = validation_loss(model, *held_out)
    console.print(
        f"\n{done} steps on 4 devices and on 1; largest difference of a loss "
        f"[bold]{worst:.1e}[/]; validation loss [bold]{before:.2f} → {after:.2f}[/]"
    )
    console.print("\n[dim]and the trained model writes:[/]\n")
    console.print(sample(model, "    def __init__(self", 240, seed), markup=False)


def train(
    trainer: piper.Trainer, alone: SingleDevice, batches: ByteBatches, steps: int
) -> tuple[int, float]:
    """Train both until done or Ctrl-C; the steps made and the largest difference of a loss."""
    console.print(f"\n[dim]training for {steps} steps; Ctrl-C stops early[/]")
    console.print("[dim]          four devices     one device[/]")
    bar = Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # elsewhere, the lines printed below are enough
    )
    worst = 0.0
    try:
        with bar:
            task = bar.add_task("", total=steps)
            for step, (x, y) in zip(range(1, steps + 1), batches, strict=False):
                ours, theirs = trainer.step(x, y).loss.item(), alone.step(x, y).loss.item()
                worst = max(worst, abs(ours - theirs) / abs(theirs))
                bar.update(task, completed=step)
                if step == 1 or step % max(1, steps // 10) == 0:
                    console.print(f"step {step:4}  {ours:.10f}   {theirs:.10f}")
    except KeyboardInterrupt:
        console.print("stopped by Ctrl-C")
    return trainer.steps, worst


def roomy(model: MoETransformer) -> MoETransformer:
    """The same weights in a model that drops no token, to be run by plain PyTorch."""
    config = model.config
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


def check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # the second from builds without CUDA
        reason = str(error).splitlines()[0]
        raise PiperError(f"--device {name} cannot be used: {reason}") from error


def run() -> None:
    try:
        typer.run(main)
    except PiperError as error:
        Console(stderr=True, highlight=False).print(
            f"error: {error}", style="red", markup=False, soft_wrap=True
        )
        raise SystemExit(1) from None


if __name__ == "__main__":
    run()
