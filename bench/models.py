"""Which models of the ``transformers`` library train unmodified, and how exactly.

Small models with random weights, in fp64, with dict inputs that include labels. Each runs in two
pipeline stages with two microbatches on virtual devices, beside plain PyTorch. Dropout draws differ
between the two, so dropout is 0 where losses are compared; a model with its own dropout is only
compiled. From the root of the project: ``python -m bench.models``, or for some families
``python -m bench.models GPT-2 T5``.
"""

from __future__ import annotations

import copy
import time
import warnings
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import piper
from piper.capture.loss.own_loss import own_loss
from tests.hugging_face import FAMILIES, Family
from tests.training import Batch, adamw, compiled, pipeline, plain, sgd, train

STEPS = 3


class Mode(Enum):
    """How a model is captured."""

    EVALUATION = "evaluation, AdamW"
    TRAINING = "training, SGD"
    SHIPPED = "training, dropout"


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a model in one mode."""

    seconds: float
    """Compile time."""
    difference: float | None
    """The largest difference of a loss from PyTorch's, over all steps."""
    refusal: str = ""


def examine(family: Family, mode: Mode) -> Found:
    """Compile a model of ``family`` and, without dropout, train it with Piper and with PyTorch."""
    torch.manual_seed(0)
    model = family.make(dropout=mode is Mode.SHIPPED).double()
    model.train(mode is not Mode.EVALUATION)
    batches: list[Batch] = [(family.batch(seed=step), ()) for step in range(STEPS)]
    optimizer = adamw if mode is Mode.EVALUATION else sgd
    how = {"optimizer": optimizer, "tags": family.tags}
    start = time.perf_counter()
    try:
        program = compiled(model, pipeline([[0], [1]], 2), None, batches, **how)
    except piper.PiperError as error:
        return Found(time.perf_counter() - start, None, str(error))
    seconds = time.perf_counter() - start
    if mode is Mode.SHIPPED:
        return Found(seconds, None)
    mine = train(program, batches).losses
    whole = in_fp64(model)
    theirs = plain(whole, own_loss, batches, microbatches=2, optimizer=optimizer).losses
    pairs = zip(mine, theirs, strict=True)
    return Found(seconds, max(float((a - b).abs()) for a, b in pairs))


def in_fp64(model: nn.Module) -> nn.Module:
    """A copy for the fp64 reference: torch has no grouped products in fp64."""
    found = copy.deepcopy(model)
    found.config._experts_implementation = "batched_mm"  # type: ignore[union-attr]
    return found


def main(names: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Print a line for each family and mode."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore", piper.PiperWarning)
    console = Console(width=140)
    table = Table(title=f"transformers {transformers.__version__}, torch {torch.__version__}")
    for column in ("model", "mode", "captured", "seconds", "difference", "refused"):
        table.add_column(column)
    for name in names or FAMILIES:
        for mode in Mode:
            with console.status(f"{name}, {mode.value}"):
                found = examine(FAMILIES[name], mode)
            table.add_row(
                name,
                mode.value,
                "no" if found.refusal else "yes",
                f"{found.seconds:.1f}",
                "" if found.difference is None else f"{found.difference:.0e}",
                found.refusal.partition("\n")[0],
            )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
