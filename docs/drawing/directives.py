"""The picture of each directive, drawn from the DAGs of its documentation page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import piper
from piper.capture.captured_facts import facts_of
from piper.capture.model import capture
from piper.ir.dag.build import build
from piper.ir.dag.dag import Dag
from piper.ir.dag.facts import Model
from piper.ir.ops import Collective, Compute, Transfer
from piper.lower.lower import lower
from piper.strategies.directives import Directive

from .dags import (
    BOX_H,
    BOX_W,
    PITCH_X,
    PITCH_Y,
    Drawn,
    Edge,
    before_and_after,
    between,
    columns,
    edges,
    half,
)

PAD, HEAD = 14, 26
"""The padding of a frame around boxes, and the room above them for its name."""


class Net(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            with piper.annotate("layer"):
                x = x + torch.relu(layer(x))
        return x


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 64)
        self.router = nn.Linear(64, 4)
        self.experts = nn.Parameter(torch.randn(4, 64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        with piper.annotate("layer"):
            weights = self.router(x).softmax(-1)
            rows = x.expand(4, *x.shape)
            with piper.annotate("EP"):
                rows = torch.bmm(rows, self.experts)
            return x + (weights.t().unsqueeze(-1) * rows).sum(0)


@cache
def facts(mixture: bool = False, group: int = 1) -> Model:
    model = Mixture() if mixture else Net(nn.Linear(64, 64), nn.Linear(64, 64))
    batch = {"inputs": (torch.randn(8, 64),), "targets": (torch.randint(64, (8,)),)}
    captured = capture(model, **batch, loss=cross_entropy, microbatches=2 * group)
    return facts_of(captured, captured.remat)


def applied(*directives: Directive) -> Dag:
    return piper.Strategy(directives).apply(build(facts()))


STAGES = piper.partition("layer", into="PP", parts=2)
SPLIT = piper.split(parts=2)
PLACES = (piper.place({"PP": 0}, devices=[0]), piper.place({"PP": 1}, devices=[1]))


def passes(dag: Dag) -> list[int]:
    return [i for i, node in enumerate(dag.nodes) if isinstance(node.op, Compute)]


def flow(dag: Dag) -> Callable[[Edge], bool]:
    """Accepts edges between neighbours: values forward, gradients backward, saved activations."""

    def wanted(edge: Edge) -> bool:
        source, target = dag.nodes[edge.source].op, dag.nodes[edge.target].op
        if not isinstance(source, Compute) or not isinstance(target, Compute):
            return True
        same_side = (source.which.value == "F") == (target.which.value == "F")
        return same_side or source.chunk == target.chunk

    return wanted


def plain(dag: Dag) -> Drawn:
    found = Drawn(dag, columns(dag, passes(dag), left=PAD, top=HEAD))
    found.wanted = flow(dag)
    if dag.microbatches:
        found.rows = [
            (f"MB {m}", HEAD + BOX_H / 2 + PITCH_Y / 2 + m * (2 * PITCH_Y + 14))
            for m in range(dag.microbatches[1])
        ]
        found.named = lambda edge: False
    return found


def framed(found: Drawn, frames: Sequence[tuple[str, Sequence[int]]]) -> Drawn:
    """Add named frames around boxes."""
    for name, numbers in frames:
        xs = [found.spots[n][0] for n in numbers]
        ys = [spot[1] for spot in found.spots.values()]
        found.bands.append(
            (
                name,
                min(xs) - BOX_W / 2 - PAD,
                min(ys) - BOX_H / 2 - HEAD,
                max(xs) + BOX_W / 2 + PAD,
                max(ys) + BOX_H / 2 + PAD,
            )
        )
    return found


def by_tag(dag: Dag, tag: str) -> list[tuple[str, list[int]]]:
    values = sorted({n.tags[tag] for n in dag.nodes if tag in n.tags and isinstance(n.op, Compute)})
    return [
        (f"{tag} {v}", [i for i in passes(dag) if dag.nodes[i].tags.get(tag) == v]) for v in values
    ]


def partition() -> str:
    dag, after = applied(), applied(STAGES)
    second = framed(plain(after), by_tag(after, "PP"))
    return before_and_after("partition groups regions into stages", str(STAGES), plain(dag), second)


def split() -> str:
    dag, after = applied(), applied(SPLIT)
    return before_and_after(
        "split copies every pass for each microbatch", str(SPLIT), plain(dag), plain(after)
    )


def place() -> str:
    dag = applied(STAGES, SPLIT)
    lowered = lower(applied(STAGES, SPLIT, *PLACES), {1: facts()}).dag
    spots = columns(lowered, passes(lowered), left=PAD, top=HEAD, pitch=PITCH_X)
    spots = {n: (x + (110 if lowered.nodes[n].tags["PP"] else 0), y) for n, (x, y) in spots.items()}
    sends = [i for i, n in enumerate(lowered.nodes) if isinstance(n.op, Transfer)]
    second = plain(lowered)
    second.spots = {**spots, **between(lowered, spots, sends)}
    follows = flow(lowered)

    def wanted(edge: Edge) -> bool:
        if isinstance(lowered.nodes[edge.source].op, Transfer):
            return second.spots[edge.source][1] == second.spots[edge.target][1]
        return follows(edge)

    second.wanted = wanted
    groups = [
        (f"device {device}", [i for i in passes(lowered) if lowered.nodes[i].devices == (device,)])
        for device in (0, 1)
    ]
    framed(second, groups)
    first = framed(plain(dag), by_tag(dag, "PP"))
    title = "place puts stages on devices; what flows between them is sent"
    return before_and_after(title, "  ".join(map(str, PLACES)), first, second)


def replicate() -> str:
    two = facts(group=2)

    def drawn(rule: Directive) -> Drawn:
        """The backwards that produce gradients, one below the other, and the nodes that follow."""
        strategy = piper.Strategy([SPLIT, piper.place({}, devices=[0, 1]), rule])
        dag = lower(strategy.apply(build(two)), {2: two}).dag
        makers = [i for i in passes(dag) if any(e.source == i for e in _summed(dag))]
        spots = {n: (PAD + BOX_W / 2, HEAD + BOX_H / 2 + 44 * i) for i, n in enumerate(makers)}
        pills = [
            (i, 2 * half(node)[0])
            for i, node in enumerate(dag.nodes)
            if not isinstance(node.op, Compute) and node.stream != "scalars"
        ]
        bottom = HEAD + BOX_H + 44 * 3 + PAD

        def row(left: float, wanted: bool) -> float:
            """Place the gathers, or the other nodes, from ``left`` on; returns the right end."""
            for i, width in pills:
                if (dag.nodes[i].stream == "gather") == wanted:
                    spots[i] = left + width / 2, HEAD + BOX_H / 2 + 66
                    left += width + 34
            return left - 34 + PAD

        right = row(PAD + BOX_W + 56, wanted=False)
        bands = [("devices 0, 1", 0, 0, right, bottom)]
        if any(dag.nodes[i].stream == "gather" for i, _ in pills):
            after = right + 20
            bands.append(("next step", after, 0, row(after + PAD, wanted=True), bottom))
        found = Drawn(dag, spots, wanted=lambda edge: edge.target not in makers)
        found.notes = {n: f"MB {dag.nodes[n].compute.microbatch}" for n in makers}
        found.named = lambda edge: False
        found.bands = bands
        return found

    rules = piper.replicate({}, zero=0), piper.replicate({}, zero=1)
    title = "replicate with zero=1: each device updates its part of the state"
    return before_and_after(title, "  →  ".join(map(str, rules)), *map(drawn, rules))


def _summed(dag: Dag) -> list[Edge]:
    """Edges of parameter gradients into a reduction."""
    return [
        e
        for e in edges(dag)
        if isinstance(dag.nodes[e.target].op, Collective) and e.value[:2] == "dw"
    ]


def shard() -> str:
    two = facts(mixture=True, group=2)
    group, rule = piper.place({}, devices=[0, 1]), piper.shard({"EP": "*"})

    def drawn(*directives: Directive, pitch: float) -> Drawn:
        dag = lower(piper.Strategy(directives).apply(build(two)), {2: two}).dag
        spots = columns(dag, passes(dag), left=PAD, top=HEAD, pitch=pitch, first=0)
        narrow = pitch - PITCH_X  # no all-to-all before the loss
        spots = {
            n: (x - (narrow if dag.nodes[n].compute.chunk == 3 else 0), y)
            for n, (x, y) in spots.items()
        }
        talks = [
            i
            for i, n in enumerate(dag.nodes)
            if isinstance(n.op, Collective) and n.op.kind.value == "all_to_all"
        ]
        spots |= between(dag, spots, talks)
        found = Drawn(dag, spots)
        follows = flow(dag)

        def wanted(edge: Edge) -> bool:
            a, b = found.spots[edge.source], found.spots[edge.target]
            level = a[1] == b[1]
            source, target = dag.nodes[edge.source].op, dag.nodes[edge.target].op
            if isinstance(source, Collective) or isinstance(target, Collective):
                return level
            near = abs(a[0] - b[0]) <= pitch + 1
            return follows(edge) and (not level or near)

        found.wanted = wanted
        found.named = lambda edge: False
        return framed(found, [("devices 0, 1", passes(dag))])

    first, second = drawn(group, pitch=PITCH_X), drawn(group, rule, pitch=214)
    ways = {n: "2 of 4 experts" for n in passes(second.dag) if "EP" in second.dag.nodes[n].tags}
    first.notes = {n: "4 experts" for n in passes(first.dag) if "EP" in first.dag.nodes[n].tags}
    second.notes = ways
    title = "shard divides experts over a group, with exchanges before and after them"
    return before_and_after(title, str(rule), first, second, below=True)


ORDER = piper.order(
    [{"PP": 1, "MB": 0, "PASS": "F"}],
    [{"PP": 1, "MB": 1, "PASS": "F"}, {"PP": 1, "MB": 0, "PASS": "B"}],
    [{"PP": 1, "MB": 1, "PASS": "B"}],
)


def order() -> str:
    def drawn(dag: Dag, later: int) -> Drawn:
        """A row per microbatch, from left to right; the second starts ``later`` columns on."""
        mine = [i for i in passes(dag) if dag.nodes[i].devices == (1,)]
        found = plain(dag)
        for i in mine:
            op = dag.nodes[i].compute
            step = {("F", 1): 0, ("F", 2): 1, ("B", 2): 2, ("B", 1): 3}[op.which.value, op.chunk]
            x = PAD + BOX_W / 2 + (step + later * op.microbatch) * 128
            found.spots[i] = x, HEAD + BOX_H / 2 + op.microbatch * 72
        found.spots = {i: found.spots[i] for i in mine}
        found.strong = lambda edge: True
        found.rows = [(f"MB {m}", HEAD + BOX_H / 2 + 72 * m) for m in (0, 1)]
        return framed(found, [("device 1", mine)])

    placed = (STAGES, SPLIT, *PLACES)
    first, second = drawn(applied(*placed), 0), drawn(applied(*placed, ORDER), 2)
    written = "order([F0], [F1, B0], [B1])   on stage 1"
    title = "order adds what must be done before; F1 and B0 overlap"
    return before_and_after(title, written, first, second, below=True)


def stream() -> str:
    rule = piper.stream({"PASS": "F"}, "ahead", priority=-1)

    def drawn(dag: Dag) -> Drawn:
        lanes = sorted({n.stream for n in dag.nodes})
        spots = {
            i: (PAD + BOX_W / 2 + i * 124, HEAD + BOX_H / 2 + lanes.index(n.stream) * 84)
            for i, n in enumerate(dag.nodes)
        }
        found = Drawn(dag, spots)
        right = PAD + 5 * 124 + BOX_W + PAD
        found.bands = [
            (f"stream {lane}", 0, i * 84, right, i * 84 + HEAD + BOX_H + PAD)
            for i, lane in enumerate(lanes)
        ]
        follows = flow(dag)
        found.wanted = lambda edge: follows(edge) and edge.value not in ("saved0", "saved1")
        found.named = lambda edge: False
        return found

    before = applied(piper.place({}, devices=[0]))
    after = applied(piper.place({}, devices=[0]), rule)
    title = "stream moves forwards to a stream of their own"
    return before_and_after(title, str(rule), drawn(before), drawn(after), below=True)


def remat() -> str:
    rule = piper.remat({"layer": 1}, "all")

    def drawn(dag: Dag) -> Drawn:
        found = plain(dag)
        follows = flow(dag)
        found.wanted = lambda edge: follows(edge) or edge.target == 4
        found.named = lambda edge: edge.target == 4
        return found

    first, second = drawn(applied()), drawn(applied(rule))
    second.notes = {4: "runs F again"}
    title = "remat: the backward computes again what the forward no longer keeps"
    return before_and_after(title, str(rule), first, second)


ALL = {
    "partition": partition,
    "split": split,
    "place": place,
    "replicate": replicate,
    "shard": shard,
    "order": order,
    "stream": stream,
    "remat": remat,
}
