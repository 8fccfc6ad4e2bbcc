"""The way from a model to a step, in four cards, drawn from one real model and strategy."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import piper
from piper.capture.captured_facts import facts_of
from piper.capture.model import capture
from piper.ir.dag.build import build
from piper.ir.dag.dag import Dag
from piper.ir.passes import Pass
from piper.strategies import one_f_one_b, timed

from .directives import Net
from .svg import Picture

TOP, HEIGHT, GAP = 16, 236, 40


def home() -> str:
    model = Net(*(nn.Linear(8, 8) for _ in range(4)))
    batch = {"inputs": (torch.randn(8, 8),), "targets": (torch.randint(8, (8,)),)}
    captured = capture(model, **batch, loss=cross_entropy)
    strategy = piper.Strategy(
        [
            piper.partition("layer", into="PP", parts=2),
            piper.split(parts=4),
            piper.place({"PP": 0}, devices=[0]),
            piper.place({"PP": 1}, devices=[1]),
        ]
    )
    dag = strategy.apply(build(facts_of(captured, captured.remat)))
    picture = Picture()
    x = 16.0
    x = _card(picture, x, 128, "a model", "with named regions")
    _model(picture, x - 128 - GAP, [chunk.name for chunk in captured.chunks])
    x = _card(picture, x, 302, "a strategy", "a few directives")
    for i, directive in enumerate(strategy.directives):
        picture.text(x - 302 - GAP + 14, TOP + 74 + 26 * i, str(directive), "code")
    order = ["order([F0], [F1], [B0], [F2], [B1], ...)", "order([F0], [B0], [F1], [B1], ...)"]
    for i, words in enumerate(order):
        picture.text(x - 302 - GAP + 14, TOP + 74 + 26 * (4 + i), words, "code")
    x = _card(picture, x, 176, "one DAG", "the step, over all devices")
    _dag(picture, x - 176 - GAP, dag)
    x = _card(picture, x, 268, "one plan a device", "streams, messages, memory: known")
    _plans(picture, x - 268 - GAP)
    return picture.svg("A model with named regions and a strategy become a DAG and plans")


def _card(picture: Picture, x: float, width: float, title: str, note: str) -> float:
    """Draw a frame with a title and an arrow from the previous card; returns the next card's x."""
    if x > 16:
        picture.path(f"M{x - GAP + 8:g} {TOP + HEIGHT / 2:g}H{x - 8:g}", "edge")
    picture.rect(x, TOP, width, HEIGHT, "panel", 8)
    picture.text(x + 14, TOP + 24, title, "title")
    picture.text(x + 14, TOP + 42, note, "quiet small")
    return x + width + GAP


def _model(picture: Picture, x: float, names: list[str]) -> None:
    for i, name in enumerate(names):
        y = TOP + 58 + 34 * i
        picture.rect(x + 16, y, 96, 24, "F" if name.startswith("layer") else "state", 5)
        look = "on strong" if name.startswith("layer") else "strong"
        picture.text(x + 64, y + 16, name, look, "middle")
        if i:
            picture.path(f"M{x + 64:g} {y - 10:g}V{y - 2:g}", "edge")


def _dag(picture: Picture, x: float, dag: Dag) -> None:
    side, pitch = 13, 21
    left, top = x + 27, TOP + 60
    spots = {}
    for i, node in enumerate(dag.nodes):
        op = node.compute
        column = op.chunk + (1.2 if node.tags["PP"] else 0)
        row = 2 * op.microbatch + (op.which is not Pass.F)
        spots[i] = left + column * pitch, top + row * (side + 3) + op.microbatch * 7
    for stage, (first, last) in enumerate(((0, 1), (3.2, 5.2))):
        width = (last - first) * pitch + side + 12
        picture.rect(left + first * pitch - 6, top - 6, width, 8 * (side + 3) + 28, "band", 6)
        middle = left + first * pitch - 6 + width / 2
        picture.text(middle, TOP + HEIGHT - 10, f"device {stage}", "quiet small", "middle")
    for i, node in enumerate(dag.nodes):
        a, b = spots[i]
        picture.rect(a, b, side, side, node.compute.which.value, 3)
    for m in range(4):
        y = top + 2 * m * (side + 3) + m * 7 + side / 2
        picture.path(f"M{left + pitch + side + 7:g} {y:g}H{left + 3.2 * pitch - 8:g}", "edge")
        y += side + 3
        picture.path(f"M{left + 3.2 * pitch - 8:g} {y:g}H{left + pitch + side + 8:g}", "edge")


def _plans(picture: Picture, x: float) -> None:
    found = timed(one_f_one_b(2, 4))
    unit = 240 / found.grid.end
    for rank, row in enumerate(found.cells):
        y = TOP + 76 + 70 * rank
        picture.text(x + 14, y - 7, f"device {rank}", "quiet small")
        picture.rect(x + 14, y - 1, 240, 32, "paper", 4)
        for cell in row:
            width = (cell.end - cell.start) * unit - 1.5
            picture.rect(x + 14.75 + cell.start * unit, y, width, 30, cell.passes[0].value, 2.5)
            place = x + 14.75 + cell.start * unit + width / 2
            picture.text(place, y + 19, cell.labels[0][-1], "on small", "middle")
    y = TOP + HEIGHT - 18
    for i, (which, name) in enumerate((("F", "forward"), ("B", "backward"))):
        picture.rect(x + 14 + 80 * i, y - 10, 13, 12, which, 2.5)
        picture.text(x + 33 + 80 * i, y, name, "quiet small")
