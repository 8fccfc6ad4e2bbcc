"""Train a small mixture-of-experts language model, on one device, through Piper's chunks.

The model reads the source of Python's own standard library, byte by byte. The first batch is
also run by plain PyTorch, and its loss and gradients compared bit by bit.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from piper import PiperError
from piper.capture import Remat, capture
from piper.capture.codegen import CompilerName
from piper.data import ByteBatches, stdlib_bytes
from piper.models import MoEConfig, MoETransformer, lm_loss
from piper.single import SingleDevice
from piper.view import chunk_table, summary

BATCH, SEQ = 16, 64
console = Console(highlight=False)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 240,
    layers: Annotated[int, typer.Option(min=1, help="Transformer blocks.")] = 3,
    dim: Annotated[int, typer.Option(min=1, help="Width of the residual stream.")] = 48,
    experts: Annotated[int, typer.Option(min=1, help="Experts in each block.")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="Parts of each batch.")] = 4,
    compiler: Annotated[CompilerName, typer.Option(help="Runs the chunks.")] = CompilerName.EAGER,
    remat: Annotated[Remat | None, typer.Option(help="What the backward recomputes.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and the batches.")] = 0,
    device: Annotated[str, typer.Option(help="Where to train, such as cpu or cuda.")] = "cpu",
) -> None:
    """Train a small mixture-of-experts language model through Piper's chunks."""
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
    model = MoETransformer(config).to(device)  # names its regions itself: see piper/models/moe.py
    text = stdlib_bytes()
    batches = ByteBatches(text, batch=BATCH, seq=SEQ, seed=seed)
    held_out = ByteBatches(text, batch=8 * BATCH, seq=SEQ, split="valid")[0]
    x, y = batches[0]

    started = time.perf_counter()
    captured = capture(
        model,
        inputs=(x,),
        targets=(y,),
        loss=lm_loss,
        microbatches=microbatches,
        compiler=compiler.value,
        remat=remat.value if remat else None,
    )
    trainer = SingleDevice(captured, model, lambda p: torch.optim.AdamW(p, lr=5e-3), seed=seed)
    console.print(f"captured in {time.perf_counter() - started:.1f} s\n{summary(captured)}\n")
    console.print(chunk_table(captured, fold=True))

    console.print(f"\nbitwise equal: {compare_with_eager(trainer, model, x, y)}")
    before = validation_loss(model, *held_out)
    done, seconds = train(trainer, batches, steps)
    after = validation_loss(model, *held_out)
    console.print(
        f"\n{done} steps of {BATCH * SEQ} bytes in {seconds:.0f} s; "
        f"validation loss [bold]{before:.2f} → {after:.2f}[/]"
    )
    console.print("\n[dim]and the trained model writes:[/]\n")
    console.print(sample(model, "    def __init__(self", 240, seed), markup=False)


def compare_with_eager(trainer: SingleDevice, model: MoETransformer, x: Tensor, y: Tensor) -> str:
    """One batch's loss and gradients by Piper's programs and by PyTorch's autograd engine."""
    loss, gradients, _ = trainer.differentiate(x, y)
    parts = trainer.captured.microbatches
    device = trainer.captured.device
    losses = []
    for part_x, part_y in zip(x.to(device).chunk(parts), y.to(device).chunk(parts), strict=True):
        part_loss = lm_loss(model(part_x), part_y)
        (part_loss / parts).backward()
        losses.append(part_loss.detach())
    pairs = [(loss, torch.stack(losses).sum() / parts)]
    pairs += [(gradients[name], p.grad) for name, p in model.named_parameters()]
    model.zero_grad()
    if all(torch.equal(ours, theirs) for ours, theirs in pairs):
        return f"yes (first loss {loss:.4f} and {len(gradients)} gradients, against plain PyTorch)"
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return f"no (largest difference to plain PyTorch: {worst:.1e} of a gradient's largest entry)"


def train(trainer: SingleDevice, batches: ByteBatches, steps: int) -> tuple[int, float]:
    """Train until done or Ctrl-C; the steps made and the seconds they took."""
    console.print(f"\n[dim]training for {steps} steps; Ctrl-C stops early[/]")
    bar = Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # elsewhere, the lines printed below are enough
    )
    started = time.perf_counter()
    step, smooth = 0, float("nan")
    try:
        with bar:
            task = bar.add_task("", total=steps, loss="")
            for step, (x, y) in zip(range(1, steps + 1), batches, strict=False):
                loss = trainer.step(x, y).loss.item()
                smooth = loss if step == 1 else 0.9 * smooth + 0.1 * loss
                bar.update(task, completed=step, loss=f"loss {smooth:.3f}")
                if step == 1 or step % max(1, steps // 10) == 0:
                    speed = step * BATCH * SEQ / (time.perf_counter() - started)
                    console.print(f"step {step:4}   loss {smooth:.3f}   {speed:7,.0f} tokens/s")
    except KeyboardInterrupt:
        console.print("stopped by Ctrl-C")
        step = trainer.steps
    return step, time.perf_counter() - started


def roomy(model: MoETransformer) -> MoETransformer:
    """The same weights in a model that drops no token, to be run by plain PyTorch."""
    config = model.config
    copy = MoETransformer(replace(config, capacity_factor=config.experts / config.top_k))
    copy.load_state_dict(model.state_dict())
    return copy.to(next(model.parameters()).device).eval()


@torch.no_grad()
def validation_loss(model: MoETransformer, x: Tensor, y: Tensor) -> float:
    device = next(model.parameters()).device
    return lm_loss(roomy(model)(x.to(device)), y.to(device)).item()


@torch.no_grad()
def sample(model: MoETransformer, prompt: str, length: int, seed: int) -> str:
    """The prompt, continued byte by byte."""
    reader, generator = roomy(model).cpu(), torch.Generator().manual_seed(seed)
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
