"""A new schedule, written as a user would, and trained beside one device.

    python examples/own_schedule.py

1F1B computes weight gradients as soon as it can; zero-bubble schedules delay them. Here they run in
beats: the weight gradients of a few microbatches together, one after another with the same weights
in cache. The bubble is between those of ZB-H1 and 1F1B, and the schedule holds the activations of
one more beat.
"""

from __future__ import annotations

import torch
from torch import nn

import piper
from piper.models import DenseConfig, DenseTransformer, lm_loss
from piper.strategies import Schedule, mesh, one_f_one_b, straight, timed, zb_h1


def beats(ranks: int, microbatches: int, beat: int = 2) -> Schedule:
    """1F1B whose weight passes run for ``beat`` microbatches at a time."""
    schedule = straight("beats", ranks, microbatches)
    for rank, row in enumerate(schedule.rows):
        row.forward(rank, times=min(ranks - rank, microbatches))
        while row.backwards_left(rank):
            for _ in range(min(beat, row.backwards_left(rank))):
                row.backward_input(rank)
                if row.forwards_left(rank):
                    row.forward(rank)
            row.backward_weight(times=row.weights_left)
    return schedule


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def losses(strategy: piper.Strategy, steps: int = 3) -> list[float]:
    """The losses of training on virtual devices."""
    torch.manual_seed(0)
    config = DenseConfig(vocab=64, dim=16, heads=2, mlp_dim=32, max_seq=8, layers=4)
    tokens = torch.randint(64, (16, 8))
    program = piper.compile(
        DenseTransformer(config),
        strategy,
        inputs=(tokens,),
        targets=(tokens,),
        loss=lm_loss,
        optimizer=sgd,
    )
    with piper.launch(program) as trainer:
        return [float(trainer.step(tokens, tokens)) for _ in range(steps)]


def main() -> None:
    mine = beats(4, 8)
    print(mine)
    for other in (one_f_one_b(4, 8), zb_h1(4, 8)):
        found = timed(other)
        print(f"{other.name}: bubble {found.bubble:g}, activations {max(found.activations)}")
    together = losses(mesh(pp=4, schedule=mine))
    alone = losses(mesh(schedule=one_f_one_b(1, 8)))
    for step, (a, b) in enumerate(zip(together, alone, strict=True)):
        print(f"step {step}: loss {a:.6f} on four devices, {b:.6f} on one")
    print("equal, bit for bit" if together == alone else "NOT EQUAL")


if __name__ == "__main__":
    main()
