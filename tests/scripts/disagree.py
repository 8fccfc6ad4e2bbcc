"""Run with ``torchrun --nproc-per-node 2``: ranks that differ in every possible way. Each writes
the errors it gets to ``told.RANK.json`` in the given folder."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import piper

RANK = int(os.environ["RANK"])


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def compiled(model: nn.Module, devices: int, **options: Any) -> piper.Program:
    strategy = [piper.place({}, devices=range(devices)), piper.replicate({})]
    return piper.compile(
        model,
        piper.Strategy([piper.split(into="MB", parts=2), *strategy]),
        inputs=(torch.zeros(8, 4),),
        targets=(torch.zeros(8, 4),),
        loss=nn.functional.mse_loss,
        **{"optimizer": sgd, **options},
    )


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)


def refused(program: piper.Program, **options: object) -> str:
    try:
        piper.launch(program, on="torchrun", timeout=30, **options)
    except piper.PiperError as error:
        return str(error)
    return "nothing"


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    told = {"program": refused(compiled(model, 1 + RANK))}
    program = compiled(model, 2)
    with torch.no_grad():
        model[2].bias += RANK
    told |= with_optimizers(model)
    told["weights"] = refused(program)
    told["weights, unchecked"] = refused(program, check_weights=False)
    with torch.no_grad():
        model[2].bias.zero_()
    told["option"] = refused(program, check_batches=-1)
    with piper.launch(program, on="torchrun", timeout=30, check_batches=5) as trainer:
        for step in range(1, 8):
            x, y = batch(step)
            if step in (2, 4, 5):  # as with a DistributedSampler; an unseeded shuffle of rows
                x, y = batch(100 * RANK) if step == 2 else (x, y.roll(RANK, 0))
            try:
                trainer.step(x, y)
            except piper.PiperError as error:
                told[f"step {step}"] = str(error)
        try:
            trainer.evaluate(*batch(RANK))
        except piper.PiperError as error:
            told["evaluate"] = str(error)
        told |= with_rows(trainer)
        told |= with_values(trainer)
    trainer = piper.launch(program, on="torchrun", timeout=30, check_batches=0)
    trainer.step(*batch(1))
    if RANK == 1:
        write(folder, told)
        os._exit(0)
    try:
        trainer.step(*batch(2))
    except piper.PiperError as error:
        told["lost"] = f"{type(error).__name__}: {error}"
    try:
        trainer.state_dict()
    except piper.PiperError as error:
        told["lost, state"] = str(error)
    write(folder, told)
    os._exit(0)


def adam(lr: float, **options: Any) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, **options)


def falling(last: int) -> Callable[[torch.optim.Optimizer], Any]:
    """A learning rate that begins to fall after some steps, by a function without settings."""

    def rate(step: int) -> float:
        return 1.0 if step < 4 else 4 / (step * last)

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def grouped(decayed: str) -> Callable[[Any], torch.optim.Optimizer]:
    def make(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for n, p in named_parameters if (n == decayed) is chosen], "lr": lr}
            for chosen, lr in ((True, 0.1), (False, 0.2))
        ]
        return torch.optim.SGD([group for group in groups if group["params"]])

    return make


def with_optimizers(model: nn.Module) -> dict[str, str]:
    """Optimizers and schedulers that depend on the rank, and an optimizer changed later."""
    kinds: Mapping[str, dict[str, Any]] = {
        "kind": {"optimizer": adam(0.1) if RANK else sgd},
        "lr": {"optimizer": adam(0.1 + RANK)},
        "betas": {"optimizer": adam(0.1, betas=(0.9, 0.99 + 0.009 * RANK))},
        "groups": {"optimizer": grouped(f"{2 * RANK}.weight")},
        "scheduler": {"scheduler": falling(1) if RANK else None},
        "rates": {"scheduler": falling(1 + RANK)},
    }
    told = {what: refused(compiled(model, 2, **kind)) for what, kind in kinds.items()}
    kept: list[torch.optim.Optimizer] = []

    def keeping(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        kept.append(sgd(parameters))
        return kept[-1]

    program = compiled(model, 2, optimizer=keeping)
    with piper.launch(program, on="torchrun", timeout=30, check_weights=False) as trainer:
        trainer.step(*batch(1))
        for group in kept[-1].param_groups:
            group["lr"] /= 1 + RANK
        try:
            trainer.step(*batch(2))
        except piper.PiperError as error:
            told["lr, later"] = str(error)
    return told


def with_values(trainer: piper.Trainer) -> dict[str, str]:
    """Each process loads its own values; then one loads a tensor that the other lacks."""
    told = {}
    before = trainer.state_dict()
    others = {**before, "2.bias": before["2.bias"] + RANK}
    some = {name: x for name, x in before.items() if RANK or name != "0.weight"}
    for what, state in (("loaded", others), ("loaded, some", some)):
        try:
            trainer.load_state_dict(state, strict=False)
        except piper.PiperError as error:
            told[what] = str(error)
    after = trainer.state_dict()
    told["loaded, nothing"] = str(all(torch.equal(x, after[name]) for name, x in before.items()))
    trainer.load_state_dict({name: x.clone() for name, x in before.items()})
    return told


def with_rows(trainer: piper.Trainer) -> dict[str, str]:
    """Each process gives its own rows; then one of them omits ``rows=True``."""
    told = {}
    x, y = batch(1)
    mine = trainer.rows
    whole = trainer.evaluate(x, y).loss
    try:
        trainer.evaluate(*((x, y) if RANK else (x[mine], y[mine])), rows=not RANK)
    except piper.PiperError as error:
        told["rows, mixed"] = str(error)
    try:
        trainer.evaluate(x, y, rows=True)
    except piper.PiperError as error:
        told["rows, all"] = str(error)
    evaluated = trainer.evaluate(x[mine], y[mine], rows=True).loss
    first = trainer.step(x[mine], y[mine], rows=True)
    (second,) = trainer.iterate([(x[mine], y[mine])], progress=False, rows=True)
    third = trainer.step(x[mine], y[mine], rows=True)  # step 10, which is compared
    told["rows"] = (
        f"{len(mine)} {torch.equal(evaluated, whole)} {torch.equal(first.loss, whole)} "
        f"{float(third) < float(second) < float(first)} {first.tokens}"
    )
    return told


def write(folder: Path, told: dict[str, str]) -> None:
    (folder / f"told.{RANK}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
