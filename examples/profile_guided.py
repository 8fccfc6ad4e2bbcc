"""Measure a few steps, order the plan by what was measured, and go on training with it.

    python examples/profile_guided.py                 # two processes
    python examples/profile_guided.py --on virtual    # one; its times of communication are not real

Piper orders what a strategy leaves open by how long each operation takes. Without a profile it
predicts the times from operation counts, which know nothing of this machine. `trainer.switch`
replaces the plan in the middle of the run: the state stays in place, and the losses are those of a
run without the switch.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import piper
from piper.models import ByteBatches, MoEConfig, MoETransformer, lm_loss, stdlib_bytes
from piper.strategies import dualpipev, mesh

BATCH, SEQ, STEPS, PROFILED = 16, 16, 3, 5


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def predicted(program: piper.Program, recorded: piper.Recorded) -> str:
    """The step time of a program, simulated with measured costs."""
    found = program.simulate(piper.Cluster.of("CPU", 2), recorded)
    return f"{1e3 * found.seconds:.1f} ms, exposed communication {1e3 * found.exposed:.1f} ms"


def trained(trainer: piper.Trainer, batches: ByteBatches, steps: int) -> list[float]:
    return [float(trainer.step(*batches[trainer.steps])) for _ in range(steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", default="processes", choices=("virtual", "processes"))
    on = parser.parse_args().on
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = MoEConfig(vocab=256, dim=32, heads=2, mlp_dim=32, max_seq=SEQ, layers=2, experts=4)
    batches = ByteBatches(stdlib_bytes(2**20), batch=BATCH, seq=SEQ)
    x, y = batches[0]
    captured = piper.capture(
        MoETransformer(config), inputs=(x,), targets=(y,), loss=lm_loss, optimizer=adamw
    )
    # Separate weight backwards: nothing waits for them, so they can fill gaps in the order.
    strategy = mesh(dp=2, ep=2, schedule=dualpipev(1, 4).with_weights_apart())
    guessed = captured.compile(strategy)
    with piper.launch(guessed, on=on) as trainer:
        trained(trainer, batches, STEPS)
        profile = trainer.profile(x, y, steps=PROFILED)  # these steps train, too
        ordered = captured.compile(strategy, costs=piper.Costs(recorded=profile.recorded))
        trainer.switch(ordered)
        after = trained(trainer, batches, STEPS)
    print("predicted from the profile, ordered by counts of operations:")
    print(" ", predicted(guessed, profile.recorded))
    print("predicted from the profile, ordered by the profile:")
    print(" ", predicted(ordered, profile.recorded))

    with piper.launch(guessed, on=on) as trainer:
        trained(trainer, batches, STEPS)
        for _ in range(PROFILED):
            trainer.step(x, y)
        plain = trained(trainer, batches, STEPS)
    first = STEPS + PROFILED + 1
    for step, (a, b) in enumerate(zip(after, plain, strict=True), first):
        print(f"step {step}: loss {a:.6f} after the switch, {b:.6f} without it")
    worst = max(abs(a - b) / b for a, b in zip(after, plain, strict=True))
    print("equal up to reduction order" if worst < 1e-5 else "NOT EQUAL")


if __name__ == "__main__":
    main()
