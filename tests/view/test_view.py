"""The table of chunks, as text that a person can check by hand."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import piper
from piper.capture.model import Captured, capture
from piper.program.chunk_table import chunk_table, summary


class Tied(nn.Module):
    """Layers of 8 x 8 with an inner region, between an embedding and a head that share a weight."""

    def __init__(self, embeds: bool = True) -> None:
        super().__init__()
        self.embeds = embeds
        self.embedding = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.embeds:
            with piper.annotate("embed"):
                x = self.embedding(x)
        for layer in self.layers:
            with piper.annotate("layer"):
                h = torch.relu(x)
                with piper.annotate("inner"):
                    h = torch.sin(layer(h))
                x = x * h
        with piper.annotate("head"):
            return x @ self.embedding.weight


def captured(model: nn.Module) -> Captured:
    x = torch.empty(4, 8, device="meta")
    return capture(model, inputs=(x,), targets=(x,), loss=nn.functional.mse_loss, microbatches=2)


@pytest.fixture(scope="module")
def tied() -> Captured:
    return captured(Tied())


def text(table: Table) -> str:
    """The table without its caption."""
    table.caption = None
    stream = io.StringIO()
    Console(file=stream, width=100).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def test_every_chunk_has_a_line(tied: Captured) -> None:
    assert (
        text(chunk_table(tied))
        == """\
 # region            prog params bytes outputs saved held    F   BI   BW
────────────────────────────────────────────────────────────────────────
 0 embed[0]           A       64  256B     64B    0B  64B  256    –  256
 1 layer[0]           B        0    0B     64B    0B  64B    0    0    –
 2 layer[0]/inner[0]  C       64  256B     64B   64B  64B  256  256  256
 3 layer[0]           D        0    0B     64B    0B 128B    0    0    –
 4 layer[1]           B        0    0B     64B    0B  64B    0    0    –
 5 layer[1]/inner[1]  C       64  256B     64B   64B  64B  256  256  256
 6 layer[1]           D        0    0B     64B    0B 128B    0    0    –
 7 layer[2]           B        0    0B     64B    0B  64B    0    0    –
 8 layer[2]/inner[2]  C       64  256B     64B   64B  64B  256  256  256
 9 layer[2]           D        0    0B     64B    0B 128B    0    0    –
10 head[0]            E       64  256B     64B    0B  64B  256  256  256
11 loss[0]            F        0    0B      4B    0B 128B    0    0    –

   total                     256 1.0kB    708B  192B 832B 1.3k 1.0k 1.3k"""
    )


def test_folding_joins_repeated_layers(tied: Captured) -> None:
    assert (
        text(chunk_table(tied, fold=True))
        == """\
 # region                × prog params bytes outputs saved held    F   BI   BW
──────────────────────────────────────────────────────────────────────────────
 0 embed[0]                 A       64  256B     64B    0B  64B  256    –  256
 1 layer[0…2]            3  B        0    0B     64B    0B  64B    0    0    –
 2 layer[0…2]/inner[0…2] 3  C       64  256B     64B   64B  64B  256  256  256
 3 layer[0…2]            3  D        0    0B     64B    0B 128B    0    0    –
10 head[0]                  E       64  256B     64B    0B  64B  256  256  256
11 loss[0]                  F        0    0B      4B    0B 128B    0    0    –

   total                           256 1.0kB    708B  192B 832B 1.3k 1.0k 1.3k"""
    )


def test_folding_leaves_a_first_layer_that_differs() -> None:
    # Its input is the batch, which needs no gradient; the folded part still begins with a layer.
    assert (
        text(chunk_table(captured(Tied(embeds=False)), fold=True))
        == """\
 # region                × prog params bytes outputs saved held    F  BI   BW
─────────────────────────────────────────────────────────────────────────────
 0 layer[0]                 A        0    0B     64B    0B   0B    0   –    –
 1 layer[0]/inner[0]        B       64  256B     64B   64B  64B  256   –  256
 2 layer[0]                 C        0    0B     64B    0B  64B    0   0    –
 3 layer[1…2]            2  D        0    0B     64B    0B  64B    0   0    –
 4 layer[1…2]/inner[1…2] 2  E       64  256B     64B   64B  64B  256 256  256
 5 layer[1…2]            2  F        0    0B     64B    0B 128B    0   0    –
 9 head[0]                  G       64  256B     64B    0B  64B  256 256  256
10 loss[0]                  H        0    0B      4B    0B 128B    0   0    –

   total                           256 1.0kB    644B  192B 704B 1.0k 768 1.0k"""
    )


def test_the_summary_counts_all_microbatches(tied: Captured) -> None:
    assert summary(tied) == (
        "12 chunks, 6 unique programs, 192B saved per microbatch, 7.2kFLOP per step"
    )


def test_the_caption_fits_an_ordinary_terminal(tied: Captured) -> None:
    stream = io.StringIO()
    Console(file=stream, width=80).print(chunk_table(tied))
    assert "no such pass" in stream.getvalue()
    assert max(map(len, stream.getvalue().splitlines())) <= 80
