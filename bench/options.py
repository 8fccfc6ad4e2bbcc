"""Command-line options that the comparisons share."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

Layers = Annotated[int, typer.Option(help="Blocks of the model, a multiple of 4.")]
Dim = Annotated[int, typer.Option(help="Its width, a multiple of 64.")]
Seq = Annotated[int, typer.Option(help="Tokens of a sequence.")]
Vocab = Annotated[int, typer.Option(help="Tokens of the vocabulary.")]
Fused = Annotated[bool, typer.Option(help="Whether AdamW is fused, for all.")]
Keep = Annotated[bool, typer.Option(help="Allocators of all keep memory as ours do.")]
Rounds = Annotated[int, typer.Option(min=2, help="How often each side has its turn.")]
Turn = Annotated[int, typer.Option(min=1, help="Steps of a turn.")]
Slow = Annotated[float | None, typer.Option(help="Mbit/s of the link, each way.")]
Warm = Annotated[int, typer.Option(min=1, help="Steps before anything is timed.")]
Ranks = Annotated[int, typer.Option(help="2 or 4: they share one GPU.")]
Device = Annotated[str, typer.Option(help="cuda (NCCL), or cpu (gloo): does it run?")]
Limit = Annotated[float, typer.Option(help="Seconds after which ranks are ended.")]
Inside = Annotated[bool, typer.Option(hidden=True)]
File = Annotated[Path | None, typer.Option("--json", help="Write the figures here.")]


def chosen(names: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    """The requested names, in the order of ``known``; all of them if none is requested."""
    known = list(known)
    wrong = [name for name in names or () if name not in known]
    if wrong:
        sys.exit(f"{wrong[0]!r} is unknown: one of {', '.join(known)}")
    return [name for name in known if not names or name in names]
