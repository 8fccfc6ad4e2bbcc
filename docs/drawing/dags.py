"""A drawing of a directive's effect on a DAG: the DAGs before and after go in, an SVG comes out.

Each column is a chunk, each row a pass of a microbatch. Nodes that lowering adds are drawn between
the passes they serve. Boxes, arrows and the names of values come from the DAG.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from piper.ir.dag.dag import Dag, Node
from piper.ir.ops import Add, Collective, Compute, Transfer, Update
from piper.ir.passes import Pass

from .svg import Picture

BOX_W, BOX_H = 92, 34
PILL_W, PILL_H = 78, 24
PITCH_X, PITCH_Y = 156, 64
Spot = tuple[float, float]
"""The center of a box."""


@dataclass(frozen=True)
class Edge:
    source: int
    target: int
    value: str


@dataclass
class Drawn:
    """One DAG in a picture, with the position of each node."""

    dag: Dag
    spots: dict[int, Spot]
    bands: list[tuple[str, float, float, float, float]] = field(default_factory=list)
    """Frames behind boxes: name, left, top, right and bottom."""
    notes: dict[int, str] = field(default_factory=dict)
    """The second line of a box."""
    rows: list[tuple[str, float]] = field(default_factory=list)
    """Row names at the left, with their y position."""
    wanted: Callable[[Edge], bool] = lambda edge: True
    strong: Callable[[Edge], bool] = lambda edge: False
    named: Callable[[Edge], bool] = lambda edge: True

    @property
    def right(self) -> float:
        frames = [band[3] for band in self.bands]
        return max([x + BOX_W / 2 for x, _ in self.spots.values()] + frames)

    @property
    def bottom(self) -> float:
        frames = [band[4] for band in self.bands]
        return max([y + BOX_H / 2 for _, y in self.spots.values()] + frames)


def edges(dag: Dag) -> list[Edge]:
    """Data edges from producer to reader, with the value names that the DAG prints."""
    reads, writes = [], []
    for line in dag.text().splitlines():
        if not line.startswith("#"):
            given, made = re.sub(r"  #.*$| after [\d ]+$", "", line).split(":", 1)[1].split("->")
            made = re.sub(r" after [\d ]+$", "", made.rstrip())
            reads.append(given.split())
            writes.append(made.split())
    makers = {value: i for i, row in enumerate(writes) for value in row}
    return [
        Edge(makers[value], i, value)
        for i, row in enumerate(reads)
        for value in row
        if value in makers
    ]


def orders(dag: Dag) -> list[Edge]:
    """Order edges: dependencies besides data."""
    return [Edge(b, i, "") for i, node in enumerate(dag.nodes) for b in node.after]


def columns(
    dag: Dag,
    numbers: Sequence[int],
    *,
    left: float = 0.0,
    top: float = 0.0,
    pitch: float = PITCH_X,
    first: int = 0,
) -> dict[int, Spot]:
    """Positions of passes, by chunk and microbatch; forwards above backwards."""
    found: dict[int, Spot] = {}
    for number in numbers:
        op = dag.nodes[number].op
        if isinstance(op, Compute):
            row = 2 * op.microbatch + (op.which is not Pass.F)
            gap = 14 * op.microbatch
            x = left + BOX_W / 2 + (op.chunk - first) * pitch
            found[number] = x, top + BOX_H / 2 + row * PITCH_Y + gap
    return found


def between(dag: Dag, spots: dict[int, Spot], numbers: Sequence[int]) -> dict[int, Spot]:
    """Positions of communications: halfway between the producer of a value and its first reader."""
    known = edges(dag)
    found = {}
    for number in numbers:
        makers = [spots[e.source] for e in known if e.target == number and e.source in spots]
        readers = [spots[e.target] for e in known if e.source == number and e.target in spots]
        same = [spot for spot in readers if spot[1] == makers[0][1]] or readers
        found[number] = (makers[0][0] + same[0][0]) / 2, makers[0][1]
    return found


def label(node: Node) -> tuple[str, str]:
    """The text of a box in two parts: the operation and its region."""
    tags = [f"{n} {t}" for n, t in node.tags.items() if n not in ("PASS", "PP", "MB")]
    match node.op:
        case Compute(which=which):
            return which.value, tags[-1] if tags else ""
        case Transfer():
            return "send", ""
        case Collective(kind=kind):
            return kind.value, ""
        case Update():
            return "update", ""
        case Add():
            return "add", ""
    raise AssertionError(node.op)


def draw(picture: Picture, one: Drawn, x: float, y: float) -> None:
    """Draw a DAG into a picture, its top left corner at (x, y)."""
    spots = {n: (a + x, b + y) for n, (a, b) in one.spots.items()}
    for name, left, top, right, bottom in one.bands:
        look = "tint" if name.startswith("stream") else "band"
        picture.rect(x + left, y + top, right - left, bottom - top, look, 8)
        picture.text(x + left + 10, y + top + 16, name, "quiet small strong")
    for name, height in one.rows:
        picture.text(x - 14, y + height + 4, name, "quiet small", anchor="end")
    known = [e for e in edges(one.dag) if e.source in spots and e.target in spots]
    seen: set[tuple[int, int]] = set()
    for edge in known:
        if one.wanted(edge) and (edge.source, edge.target) not in seen:
            seen.add((edge.source, edge.target))
            _edge(picture, one, spots, edge)
    for edge in orders(one.dag):
        if edge.source in spots and edge.target in spots and one.strong(edge):
            _arrow(picture, one, spots, edge, "bold")
    for number, spot in spots.items():
        _box(picture, one.dag.nodes[number], spot, one.notes.get(number))


def _box(picture: Picture, node: Node, spot: Spot, note: str | None) -> None:
    verb, what = label(node)
    x, y = spot
    if isinstance(node.op, Compute):
        picture.rect(x - BOX_W / 2, y - BOX_H / 2, BOX_W, BOX_H, node.op.which.value, 5)
        light = "on" if node.op.which in (Pass.F, Pass.B) else "ink"
        shift = -3 if note else 4
        words = f"{verb} {what}".strip()
        picture.text(x, y + shift, words, f"{light} strong", "middle")
        if note:
            picture.text(x, y + 11, note, f"{light} small", "middle")
        return
    look = "state" if isinstance(node.op, Update) else "talk"
    width = max(PILL_W, 7.2 * len(verb) + 14)
    picture.rect(x - width / 2, y - PILL_H / 2, width, PILL_H, look, 12)
    picture.text(x, y + 4, verb, "small", "middle")


def half(node: Node) -> Spot:
    """Half the width and height of a node's box."""
    if isinstance(node.op, Compute):
        return BOX_W / 2, BOX_H / 2
    return max(PILL_W, 7.2 * len(label(node)[0]) + 14) / 2, PILL_H / 2


def _edge(picture: Picture, one: Drawn, spots: dict[int, Spot], edge: Edge) -> None:
    held = edge.value.startswith(("saved", "bi_saved"))
    _arrow(picture, one, spots, edge, "soft" if held else "edge")


def _arrow(picture: Picture, one: Drawn, spots: dict[int, Spot], edge: Edge, look: str) -> None:
    (ax, ay), (bx, by) = spots[edge.source], spots[edge.target]
    aw, ah = half(one.dag.nodes[edge.source])
    bw, bh = half(one.dag.nodes[edge.target])
    name = edge.value if one.named(edge) else ""
    if ay == by:
        way = 1 if bx > ax else -1
        start, end = ax + way * aw, bx - way * (bw + 2)
        picture.path(f"M{start:g} {ay:g}H{end:g}", look)
        if name:
            picture.text((start + end) / 2, ay - 6, name, "quiet small", "middle")
        return
    down = 1 if by > ay else -1
    if ax == bx and abs(by - ay) <= PITCH_Y + 15:
        picture.path(f"M{ax:g} {ay + down * ah:g}V{by - down * (bh + 2):g}", look)
        if name:
            picture.text(ax + 6, (ay + by) / 2 + 4, name, "quiet small")
        return
    start_y, end_y = ay + down * ah, by - down * (bh + 2)
    passes = all(isinstance(one.dag.nodes[n].op, Compute) for n in (edge.source, edge.target))
    if look == "bold" or (passes and abs(by - ay) <= PITCH_Y + 15):
        sx = ax + (aw * 0.45 if bx > ax else -aw * 0.45 if bx < ax else 0)
        ex = bx + (bw * 0.45 if bx < ax else -bw * 0.45 if bx > ax else 0)
        middle = (start_y + end_y) / 2
        picture.path(
            f"M{sx:g} {start_y:g}C{sx:g} {middle:g} {ex:g} {middle:g} {ex:g} {end_y:g}", look
        )
    else:
        way = 1 if bx >= ax else -1
        start, end = ax + way * aw, bx - way * (bw + 2)
        bend = (start + end) / 2
        picture.path(f"M{start:g} {ay:g}C{bend:g} {ay:g} {bend:g} {by:g} {end:g} {by:g}", look)
    if name:
        picture.text((ax + bx) / 2, (ay + by) / 2 - 5, name, "quiet small", "middle")


def before_and_after(
    title: str, directive: str, first: Drawn, second: Drawn, *, below: bool = False
) -> str:
    """The picture: the directive on top, one DAG left (or above), one right (or below)."""
    picture = Picture()
    left = 16 + (34 if first.rows else 0)
    picture.text(16, 30, directive, "code strong")
    top = 62
    picture.text(left, top - 8, "before", "quiet small")
    draw(picture, first, left, top)
    if below:
        x, y = left, top + first.bottom + 48
        middle = left + 24
        picture.path(f"M{middle + 26:g} {y - 34:g}V{y - 10:g}", "edge")
        picture.text(x, y - 8, "after", "quiet small")
    else:
        x, y = left + first.right + 62 + (30 if second.rows else 0), top
        level = top + max(first.bottom, 0) / 2
        at = left + first.right + 14
        picture.path(f"M{at:g} {level:g}H{at + 26:g}", "edge")
        picture.text(x, y - 8, "after", "quiet small")
    draw(picture, second, x, y)
    picture.grow(x + second.right, y + second.bottom)
    picture.grow(left + first.right, top + first.bottom)
    return picture.svg(title)
