"""Which models of the ``transformers`` library train unmodified, and how exactly.

Small models with random weights, in fp64, with dict inputs that include labels. Each runs in two
pipeline stages with two microbatches on virtual devices, beside plain PyTorch, and without tags on
four devices (pipeline stages, replicas, ZeRO-2) and in tensor parallelism on two, by the plan that
the model declares or one that is derived. Dropout draws differ
between the two, so dropout is 0 where losses are compared; a model with its own dropout is only
compiled. From the root of the project: ``python -m bench.models``, or for some families and modes
``python -m bench.models GPT-2 T5 --mode tp``.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import piper
from piper.capture.loss.own_loss import own_loss
from piper.strategies import mesh
from piper.strategies.directives import Directive
from tests.hugging_face import FAMILIES, Family
from tests.training import Batch, adamw, compiled, pipeline, plain, sgd, train

STEPS = 3


class Mode(Enum):
    """How a model is captured."""

    EVALUATION = "evaluation, AdamW"
    TRAINING = "training, SGD"
    SHIPPED = "training, dropout"
    UNNAMED = "no tags, pp 2, dp 2, ZeRO-2"
    TENSOR = "no tags, tp 2"

    @property
    def strategy(self) -> tuple[Directive, ...]:
        """Without tags for the last two, which take the regions that the model names itself."""
        if self is Mode.UNNAMED:
            return mesh(pp=2, dp=2, zero=2, microbatches=2).directives
        return mesh(tp=2).directives if self is Mode.TENSOR else tuple(pipeline([[0], [1]], 2))

    @property
    def parts(self) -> int:
        """How often the batch is cut."""
        return {Mode.UNNAMED: 4, Mode.TENSOR: 1}.get(self, 2)


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a model in one mode."""

    seconds: float
    """Compile time."""
    difference: float | None
    """The largest difference of a loss from PyTorch's, over all steps. Losses of language models
    are fp32 also in fp64 models."""
    state: float | None = None
    """The largest difference of an element of the final state from PyTorch's."""
    refusal: str = ""


def examine(family: Family, mode: Mode) -> Found:
    """Compile a model of ``family`` and, without dropout, train it with Piper and with PyTorch."""
    torch.manual_seed(0)
    model = family.make(dropout=mode is Mode.SHIPPED).double()
    model.train(mode is not Mode.EVALUATION)
    batches: list[Batch] = [(family.batch(seed=step), ()) for step in range(STEPS)]
    optimizer = adamw if mode is Mode.EVALUATION else sgd
    start = time.perf_counter()
    try:
        program = compiled(
            model,
            mode.strategy,
            None,
            batches,
            optimizer=optimizer,
            tags=None if mode in (Mode.UNNAMED, Mode.TENSOR) else family.tags,
        )
    except piper.PiperError as error:
        return Found(time.perf_counter() - start, None, refusal=str(error))
    seconds = time.perf_counter() - start
    if mode is Mode.SHIPPED:
        return Found(seconds, None)
    mine = train(program, batches)
    theirs = plain(in_fp64(model), own_loss, batches, microbatches=mode.parts, optimizer=optimizer)
    losses = zip(mine.losses, theirs.losses, strict=True)
    state = [(x, theirs.state[name]) for name, x in mine.state.items()]
    return Found(seconds, _largest(losses), _largest(state))


def _largest(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def in_fp64(model: nn.Module) -> nn.Module:
    """A copy for the fp64 reference: torch has no grouped products in fp64."""
    other: Any = copy.deepcopy(model)
    other.config._experts_implementation = "batched_mm"
    return other


def main(
    names: Annotated[list[str] | None, typer.Argument()] = None,
    mode: Annotated[list[str] | None, typer.Option(help="Modes, by a part of the name.")] = None,
) -> None:
    """Print a line for each family and mode."""
    modes = [x for x in Mode if not mode or any(part in x.value for part in mode)]
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore", piper.PiperWarning)
    console = Console(width=140)
    table = Table(title=f"transformers {transformers.__version__}, torch {torch.__version__}")
    for column in ("model", "mode", "captured", "seconds", "loss", "state", "refused"):
        table.add_column(column)
    for name in names or FAMILIES:
        for kind in modes:
            with console.status(f"{name}, {kind.value}"):
                found = examine(FAMILIES[name], kind)
            table.add_row(
                name,
                kind.value,
                "no" if found.refusal else "yes",
                f"{found.seconds:.1f}",
                *("" if x is None else f"{x:.0e}" for x in (found.difference, found.state)),
                found.refusal.partition("\n")[0],
            )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
