"""The effect of GPU shares (SM partitions): matrix products beside memory-bound work.

Pairs of large products in bf16 run on one stream; on another, additions over tensors larger than
any cache. Both are queued while the GPU waits, so that host time does not matter:

    one after the other              alone, with the whole GPU: the base of all ratios
    together                         on two plain streams
    together, shares                 the additions on some SMs, the products on the rest

The ways take turns. The table has medians: until the products end, until the additions end, and
until both end, each beside the same work alone.

    python bench/shares.py [--sms 32] [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from options import File, Rounds
from rich.console import Console
from rich.table import Table

from piper.ir.rules import Rest, StreamRule
from piper.runtime.streams.sm_shares import Shares

WAIT = 20_000_000
"""Cycles that the GPU waits until everything is queued: about 10 ms."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work on each of the two streams."""

    products: Callable[[], None]
    additions: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds until each ends, and until both do."""

    products: float
    additions: float
    both: float


def work(size: int, pairs: int, gib: float, additions: int) -> Work:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    first, second = torch.empty_like(a), torch.empty_like(a)
    source = torch.zeros(int(gib * 2**30) // 4, device="cuda")
    target = torch.empty_like(source)

    def multiply() -> None:
        for _ in range(pairs):
            torch.mm(a, b, out=first)
            torch.mm(b, a, out=second)

    def add() -> None:
        for _ in range(additions):
            torch.add(source, 1, out=target)

    return Work(multiply, add)


def measured(what: Work, products: torch.cuda.Stream, additions: torch.cuda.Stream) -> Times:
    """Times of both on two streams; one after the other if both are the same stream."""
    torch.cuda.synchronize()
    begin, *ends = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda._sleep(WAIT)
    begin.record()
    for stream, queue, end in zip(
        (products, additions), (what.products, what.additions), ends, strict=True
    ):
        stream.wait_event(begin)
        with torch.cuda.stream(stream):
            queue()
        end.record(stream)
    torch.cuda.synchronize()
    first, second = (begin.elapsed_time(end) for end in ends)
    return Times(first, second - first if products == additions else second, max(first, second))


def main(
    sms: Annotated[int, typer.Option(min=1, help="SMs of the additions.")] = 32,
    size: Annotated[int, typer.Option(help="Rows and columns of a matrix.")] = 8192,
    pairs: Annotated[int, typer.Option(help="Pairs of products.")] = 8,
    gib: Annotated[float, typer.Option(help="GiB of a tensor to add to.")] = 1.0,
    additions: Annotated[int, typer.Option(help="Additions.")] = 40,
    rounds: Rounds = 15,
    file: File = None,
) -> None:
    """Print a table."""
    if not torch.cuda.is_available():
        typer.echo("skipped: no CUDA device here")
        raise typer.Exit
    device = torch.device("cuda", torch.cuda.current_device())
    rules = {"products": StreamRule(sms=Rest.REST), "additions": StreamRule(sms=sms)}
    shares = Shares(device, rules)
    plain = torch.cuda.Stream(), torch.cuda.Stream()
    alone = "one after the other"
    divided = f"together, shares of {shares.sms_of('products')} and {shares.sms_of('additions')}"
    ways = {
        alone: (plain[0], plain[0]),
        "together": plain,
        divided: (shares.stream("products", 0), shares.stream("additions", 0)),
    }
    what = work(size, pairs, gib, additions)
    found: dict[str, list[Times]] = {name: [] for name in ways}
    for number in range(-2, rounds):  # two warm-up rounds
        for name in list(ways)[:: -1 if number % 2 else 1]:
            times = measured(what, *ways[name])
            if number >= 0:
                found[name].append(times)
    medians = {name: _median(rows) for name, rows in found.items()}
    table = Table(title=f"{torch.cuda.get_device_name()}: ms, and beside the same alone")
    for column in ("", "products", "", "additions", "", "both", ""):
        table.add_column(column, justify="right" if column or table.columns else "left")
    for name, mine in medians.items():
        pairs_of = zip(asdict(mine).values(), asdict(medians[alone]).values(), strict=True)
        table.add_row(name, *(cell for x, y in pairs_of for cell in (f"{x:.2f}", f"{x / y:.2f}")))
    Console(width=110).print(table)
    if file is not None:
        file.write_text(json.dumps({name: asdict(mine) for name, mine in medians.items()}))


def _median(rows: list[Times]) -> Times:
    return Times(
        statistics.median(row.products for row in rows),
        statistics.median(row.additions for row in rows),
        statistics.median(row.both for row in rows),
    )


if __name__ == "__main__":
    typer.run(main)
