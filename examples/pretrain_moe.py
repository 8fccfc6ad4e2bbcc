"""Pretrain a mixture-of-experts language model under torchrun, from one machine to many.

    torchrun --nproc-per-node 4 examples/pretrain_moe.py --pp 2 --dp 2 --ep 2
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/pretrain_moe.py --pp 2 --dp 8 --ep 8 --device cuda --checkpoints /shared

Every process runs this file; pp x dp processes are needed. DualPipeV orders the stages and hides
the experts' all-to-alls behind computation. With --checkpoints the state is saved there; a second
start resumes from the last checkpoint with the same losses. SIGTERM saves and ends the run.
examples/slurm.sbatch and examples/kubernetes.yaml start it on clusters.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import nn

import piper
from piper.callbacks import Callback, TensorBoard
from piper.launch.trainer.step_result import StepResult
from piper.models import ByteBatches, MoEConfig, MoETransformer, lm_loss, stdlib_bytes
from piper.strategies import mesh


class Lines:
    """Prints a line every ``every`` steps."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_step(self, step: int, result: StepResult) -> None:
        if step % self.every == 0:
            rate = f"{result.tokens_per_second:,.0f} tokens/s"
            print(f"step {step}: loss {float(result.loss):.4f}  {rate}", flush=True)

    def on_end(self) -> None:
        print("done", flush=True)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def warmup_then_cosine(steps: int) -> object:
    """A factory of the learning-rate scheduler for a run of ``steps`` steps."""
    warmup = max(1, steps // 20)

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", default="torchrun", choices=("torchrun", "virtual", "processes"))
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--pp", type=int, default=2, help="pipeline ranks")
    parser.add_argument("--dp", type=int, default=2, help="devices of each rank")
    parser.add_argument(
        "--ep", type=int, default=2, help="devices that share the experts of a rank"
    )
    parser.add_argument("--schedule", default="dualpipev")
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=4, help="gradient accumulation")
    parser.add_argument("--batch", type=int, default=32, help="sequences in the global batch")
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100, help="of the whole run")
    parser.add_argument("--every", type=int, default=10, help="steps between lines and checkpoints")
    parser.add_argument(
        "--checkpoints", type=Path, help="folder of checkpoints, shared by all machines"
    )
    parser.add_argument("--tensorboard", type=Path, help="folder for TensorBoard")
    return parser.parse_args()


def main() -> None:
    given = options()
    torch.manual_seed(0)  # equal initial weights in every process
    config = MoEConfig(
        vocab=256,
        dim=given.dim,
        heads=4,
        mlp_dim=2 * given.dim,
        max_seq=given.seq,
        layers=given.layers,
        experts=given.experts,
    )
    batches = ByteBatches(stdlib_bytes(), batch=given.batch, seq=given.seq)
    x, y = batches[0]
    program = piper.compile(
        MoETransformer(config),
        mesh(
            pp=given.pp,
            dp=given.dp,
            ep=given.ep,
            schedule=given.schedule,
            microbatches=given.microbatches,
            zero=given.zero,
        ),
        inputs=(x,),
        targets=(y,),
        loss=lm_loss,
        optimizer=adamw,
        scheduler=warmup_then_cosine(given.steps),
        clip_norm=1.0,
        device=given.device,
        precision=given.precision,
    )
    kept = {"checkpoint": given.checkpoints, "every": given.every, "keep": 2, "resume": True}
    callbacks: list[Callback] = [Lines(given.every)]
    if given.tensorboard is not None:
        callbacks.append(TensorBoard(given.tensorboard))
    with piper.launch(program, on=given.on) as trainer:
        if trainer.rank == 0:
            print(program, flush=True)
        trainer.fit(
            lambda step: batches[step],
            steps=given.steps,
            callbacks=callbacks,
            **(kept if given.checkpoints else {}),
        )


if __name__ == "__main__":
    main()
