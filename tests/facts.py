"""Facts of small models, written by hand: no capture, no tensors, no waiting.

Each function returns the ``Model`` that capture gives for the model of the same name in
``tests/strategies/test_directives.py``; a test there compares them. Batches are [8, 4] tokens from
a vocabulary of 16; activations are [8, 4, 8] in fp32. ``changing``, ``reading``, ``tying`` and
``mixed`` modify a model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from piper.ir.dag.facts import (
    ChunkFacts,
    Model,
    OpCost,
    ParameterFacts,
    PassCost,
    PassFacts,
    ValueFacts,
    Variant,
)
from piper.ir.passes import Kind, Pass, Ref, RematPolicy
from piper.ir.shards import SortedRows

BATCH, SEQ, DIM, VOCAB = 8, 4, 8, 16
TOKENS = BATCH * SEQ
ROWS = 4 * TOKENS * DIM
"""Bytes of an activation."""
MATMUL = 2 * TOKENS * DIM * DIM
"""Flops of a square matrix product over all tokens."""


@dataclass
class _Writer:
    """Builds a model: values and weights, then the chunks that use them."""

    chunks: list[ChunkFacts] = field(default_factory=list)
    values: list[ValueFacts] = field(default_factory=list)
    parameters: dict[str, ParameterFacts] = field(default_factory=dict)

    def value(self, name: str, *shape: int, width: int = 4) -> int:
        size = width
        for n in shape:
            size *= n
        self.values.append(ValueFacts(name, shape, size))
        return len(self.values) - 1

    def weight(self, name: str, *shape: int, trained: bool = True) -> tuple[str, ...]:
        size = 4
        for n in shape:
            size *= n
        self.parameters[name] = ParameterFacts(shape, size, trained)
        return (name,)

    def chunk(
        self,
        tags: Mapping[str, int],
        parameters: tuple[str, ...],
        inputs: Sequence[int],
        outputs: Sequence[int],
        variants: Mapping[RematPolicy, Variant],
    ) -> None:
        self.chunks.append(
            ChunkFacts(
                index=len(self.chunks),
                tags=tags,
                parameters=parameters,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                variants=variants,
                detached=tuple(p for p in parameters if not self.parameters[p].trained),
            )
        )

    def model(self, loss: int, count: int | None = None) -> Model:
        chunks, values, parameters = tuple(self.chunks), tuple(self.values), dict(self.parameters)
        return Model(chunks, values, parameters, loss, BATCH, RematPolicy.NONE, count)


def _pass(written: str, flops: int = 0, *, weights: bool = False, workspace: int = 0) -> PassFacts:
    """Pass facts from ``"input0 -> output0 saved0"``."""
    reads, writes = written.split("->")
    return PassFacts(_refs(reads), _refs(writes), PassCost((OpCost(1, flops),)), weights, workspace)


def _refs(written: str) -> tuple[Ref, ...]:
    found = re.findall(r"([a-z_]+)(\d+)(?:\+(\d+))?", written)
    return tuple(Ref(Kind(kind), int(index), int(term or 0)) for kind, index, term in found)


def _same(passes: Mapping[Pass, PassFacts], bi_saved: int = 0) -> dict[RematPolicy, Variant]:
    """A chunk that saves no activations under any policy."""
    return dict.fromkeys(RematPolicy, Variant(passes, 0, 0, bi_saved))


def _embed(trained: bool) -> dict[RematPolicy, Variant]:
    passes = {Pass.F: _pass("input0 -> output0", weights=True)}
    if trained:  # no BI: tokens have no gradient
        backward = _pass("input0 output_grad0 -> parameter_grad0")
        passes |= {Pass.B: backward, Pass.BW: backward}
    return _same(passes)


def _layer(
    trained: bool,
    *,
    extra_input: bool = False,
    outputs: int = 1,
    read_later: bool = False,
    masked: bool = False,
) -> dict[RematPolicy, Variant]:
    """``x + relu(w x)``: the relu is saved. If ``x`` is ``read_later``, its gradient has a separate
    term for each of its two uses."""
    reads = "input0 input1" if extra_input or masked else "input0"
    makes = "output0 output1" if outputs == 2 else "output0"
    if not trained:
        return _same({Pass.F: _pass(f"{reads} -> {makes}", MATMUL, weights=True, workspace=ROWS)})
    mask = " input1" if masked else ""
    grads = "output_grad0 output_grad1" if outputs == 2 else "output_grad0"
    gives = "input_grad0 input_grad1" if extra_input else "input_grad0"
    gives += " input_grad0+1" if read_later else ""
    weight = _pass("bi_saved0 input0 -> parameter_grad0", MATMUL)
    behind = ROWS * (2 if outputs == 2 else 1)

    def variant(saved: str, again: int, ahead: int, at_once: int = 0) -> Variant:
        first = (saved or "input0") + mask
        kept = (f"{saved} input0" if saved else "input0") + mask
        return Variant(
            passes={
                Pass.F: _pass(f"{reads} -> {makes} {saved}", MATMUL, weights=True, workspace=ahead),
                Pass.B: _pass(
                    f"{kept} {grads} -> {gives} parameter_grad0",
                    2 * MATMUL + again,
                    weights=True,
                    workspace=at_once or behind,
                ),
                Pass.BI: _pass(
                    f"{first} {grads} -> {gives} bi_saved0",
                    MATMUL + again,
                    weights=True,
                    workspace=0 if read_later else behind,
                ),
                Pass.BW: weight,
            },
            saved_bytes=ROWS if saved else 0,
            saved_for_bw_bytes=0,
            bi_saved_bytes=ROWS,
        )

    # MIN_CUT saves the relu's input. A mask is then multiplied before the weight's gradient is
    # made, and the gradient takes the memory of the product
    at_once = 2 * ROWS - 4 * DIM * DIM if masked else 0
    return {
        RematPolicy.NONE: variant("saved0", 0, ROWS if extra_input or masked else 0),
        RematPolicy.MIN_CUT: variant("saved0", 0, ROWS, at_once),
        RematPolicy.ALL: variant("", MATMUL, ROWS, at_once),
    }


def _experts() -> dict[RematPolicy, Variant]:
    """``relu(bmm(rows, w))``: nothing is saved; the backward reads the input and the output."""
    return _same(
        {
            Pass.F: _pass("input0 -> output0", MATMUL, weights=True, workspace=ROWS),
            Pass.B: _pass(
                "output0 input0 output_grad0 -> input_grad0 parameter_grad0",
                2 * MATMUL,
                weights=True,
                workspace=ROWS,
            ),
            Pass.BI: _pass("output0 output_grad0 -> input_grad0 bi_saved0", MATMUL, weights=True),
            Pass.BW: _pass("bi_saved0 input0 -> parameter_grad0", MATMUL),
        },
        bi_saved=ROWS,
    )


def _combine() -> dict[RematPolicy, Variant]:
    """``x + rows``: nothing to save, no weight, no BW."""
    backward = _pass("output_grad0 -> input_grad0 input_grad1")
    return _same({Pass.F: _pass("input0 input1 -> output0"), Pass.B: backward, Pass.BI: backward})


def _head(trained_below: bool) -> dict[RematPolicy, Variant]:
    cost = MATMUL * VOCAB // DIM
    weight = _pass("input0 output_grad0 -> parameter_grad0", cost)
    forward = _pass("input0 -> output0", cost, weights=True)
    if not trained_below:
        return _same({Pass.F: forward, Pass.B: weight, Pass.BW: weight})
    whole = _pass("input0 output_grad0 -> input_grad0 parameter_grad0", 2 * cost, weights=True)
    inner = _pass("output_grad0 -> input_grad0", cost, weights=True)
    return _same({Pass.F: forward, Pass.B: whole, Pass.BI: inner, Pass.BW: weight})


def _loss(counted: bool) -> dict[RematPolicy, Variant]:
    """Cross entropy: the mean or, if ``counted``, the sum and the number of targets."""
    scores = 4 * TOKENS * VOCAB
    # workspace: the loss of each target before the mean or, counted, a mask of the targets that
    # count
    makes, counting = ("output0 output1", TOKENS) if counted else ("output0", 4 * TOKENS)
    backward = _pass("saved0 input1 output_grad0 -> input_grad0", workspace=scores)
    again = _pass("input0 input1 output_grad0 -> input_grad0", workspace=2 * scores)
    forward = _pass(f"input0 input1 -> {makes} saved0", workspace=counting)
    keeping = Variant({Pass.F: forward, Pass.B: backward, Pass.BI: backward}, scores + 4, 0, 0)
    # beside the scores: the losses, or their sum; the count is made later
    lean = _pass(f"input0 input1 -> {makes}", workspace=scores + (-4 if counted else counting))
    passes = {Pass.F: lean, Pass.B: again, Pass.BI: again}
    return {
        RematPolicy.NONE: keeping,
        RematPolicy.MIN_CUT: keeping,
        RematPolicy.ALL: Variant(passes, 0, 0, 0),
    }


def _start(trained: bool, *, masked: bool = False) -> tuple[_Writer, int, int]:
    """A model with its batch and embedding; the values of the targets and the embedded tokens."""
    writer = _Writer()
    tokens = writer.value("inputs[0]", BATCH, SEQ, width=8)
    if masked:
        writer.value("inputs[1]", BATCH, SEQ, 1)
    targets = writer.value("targets[0]", BATCH, SEQ, width=8)
    weight = writer.weight("embed.weight", VOCAB, DIM, trained=trained)
    x = writer.value("embedded", BATCH, SEQ, DIM)
    writer.chunk({"embed": 0}, weight, [tokens], [x], _embed(trained))
    return writer, targets, x


def _end(
    writer: _Writer,
    x: int,
    targets: int,
    *,
    below: bool = True,
    tie: str = "",
    counted: bool = False,
) -> Model:
    """The model, with its head and loss."""
    weight = (tie,) if tie else writer.weight("head.weight", VOCAB, DIM)
    logits = writer.value("logits", BATCH, SEQ, VOCAB)
    writer.chunk({"head": 0}, weight, [x], [logits], _head(below))
    loss = writer.value("loss")
    count = writer.value("count", width=8) if counted else None
    outputs = [loss] if count is None else [loss, count]
    writer.chunk({"loss": 0}, (), [logits, targets], outputs, _loss(counted))
    return writer.model(loss, count)


def _dense(
    writer: _Writer, x: int, layers: int, *, trained: bool = True, skip: int | None = None
) -> int:
    for i in range(layers):
        weight = writer.weight(f"layers.{i}.weight", DIM, DIM, trained=trained)
        last = skip is not None and i == layers - 1
        inputs = [x, skip] if last and skip is not None else [x]
        x = writer.value(f"layer{i}", BATCH, SEQ, DIM)
        variants = _layer(trained, extra_input=last, read_later=skip is not None and i == 0)
        writer.chunk({"layer": i}, weight, inputs, [x], variants)
    return x


def chain(layers: int, *, trained: bool = True, counted: bool = False) -> Model:
    """embed, layers, head, loss. ``trained=False`` freezes all but the head."""
    writer, targets, x = _start(trained)
    x = _dense(writer, x, layers, trained=trained)
    return _end(writer, x, targets, below=trained, counted=counted)


def skip(layers: int, *, counted: bool = False) -> Model:
    """A chain whose last layer adds the embedding again: two chunks contribute to its gradient, the
    first of them with two terms."""
    assert layers > 1
    writer, targets, x = _start(trained=True)
    x = _dense(writer, x, layers, skip=x)
    return _end(writer, x, targets, counted=counted)


def tied(layers: int, *, counted: bool = False) -> Model:
    """A chain whose head uses the embedding's weight."""
    writer, targets, x = _start(trained=True)
    x = _dense(writer, x, layers)
    return _end(writer, x, targets, tie="embed.weight", counted=counted)


def masked(layers: int, *, counted: bool = False) -> Model:
    """A chain in which every layer reads a mask from the batch (value 1)."""
    writer, targets, x = _start(trained=True, masked=True)
    for i in range(layers):
        weight = writer.weight(f"layers.{i}.weight", DIM, DIM)
        y = writer.value(f"layer{i}", BATCH, SEQ, DIM)
        writer.chunk({"layer": i}, weight, [x, 1], [y], _layer(True, masked=True))
        x = y
    return _end(writer, x, targets, counted=counted)


def moe(layers: int, experts: int, *, counted: bool = False) -> Model:
    """Each layer is three chunks: dense and dispatch; experts (``EP``); and combine, which adds the
    experts' rows to the residual."""
    writer, targets, x = _start(trained=True)
    for i in range(layers):
        weight = writer.weight(f"dense.{i}.weight", DIM, DIM)
        around = writer.value(f"around{i}", BATCH, SEQ, DIM)
        rows = writer.value(f"rows{i}", experts, TOKENS // experts, DIM)
        writer.chunk({"layer": i}, weight, [x], [around, rows], _layer(True, outputs=2))
        weight = writer.weight(f"experts.{i}", experts, DIM, DIM)
        done = writer.value(f"done{i}", experts, TOKENS // experts, DIM)
        writer.chunk({"layer": i, "EP": i}, weight, [rows], [done], _experts())
        x = writer.value(f"layer{i}", BATCH, SEQ, DIM)
        writer.chunk({"layer": i}, (), [done, around], [x], _combine())
    return _end(writer, x, targets, counted=counted)


def dropless(layers: int, experts: int, *, counted: bool = False) -> Model:
    """As ``moe``, with rows sorted by expert and the number of rows of each expert."""
    model = moe(layers, experts, counted=counted)
    values = [
        replace(v, shape=(TOKENS, DIM)) if v.name.startswith(("rows", "done")) else v
        for v in model.values
    ]
    chunks = []
    for chunk in model.chunks:
        added = next((v for v in chunk.outputs if values[v].name.startswith("rows")), None)
        if added is not None:
            values.append(ValueFacts(f"counts{chunk.index}", (experts, 1), 4 * experts))
            chunk = _forward(chunk, writes=Ref(Kind.OUTPUT, len(chunk.outputs)))
            chunk = replace(chunk, outputs=(*chunk.outputs, len(values) - 1))
        elif "EP" in chunk.tags:
            chunk = _forward(chunk, reads=Ref(Kind.INPUT, 1), last=Ref(Kind.INPUT, 1))
            found = SortedRows(1, experts, TOKENS)
            chunk = replace(chunk, inputs=(*chunk.inputs, len(values) - 1), sorted_rows=found)
        chunks.append(chunk)
    return replace(model, chunks=tuple(chunks), values=tuple(values))


def _forward(chunk: ChunkFacts, **more: Ref) -> ChunkFacts:
    """``chunk`` with additional reads or writes in its forward."""
    variants = {}
    for policy, variant in chunk.variants.items():
        before = variant.passes[Pass.F]
        after = replace(before, **{k: (*getattr(before, k), ref) for k, ref in more.items()})
        variants[policy] = replace(variant, passes={**variant.passes, Pass.F: after})
    return replace(chunk, variants=variants)


def changing(model: Model, name: str = "seen", **where: int) -> Model:
    """``model`` with a buffer that the regions with these tags read and change."""
    return _with_buffer(reading(model, name, **where), name, "changes", where)


def reading(model: Model, name: str = "seen", **where: int) -> Model:
    """``model`` with a buffer that the regions with these tags read."""
    return _with_buffer(model, name, "buffers", where)


def _with_buffer(model: Model, name: str, how: str, where: Mapping[str, int]) -> Model:
    found = [
        replace(c, **{how: (*getattr(c, how), name)}) if where.items() <= c.tags.items() else c
        for c in model.chunks
    ]
    return replace(model, chunks=tuple(found))


def tying(model: Model, kept: str, *others: str) -> Model:
    """``model`` with ``kept`` in place of the parameters ``others``."""
    chunks = [
        replace(c, parameters=tuple(kept if p in others else p for p in c.parameters))
        for c in model.chunks
    ]
    parameters = {name: p for name, p in model.parameters.items() if name not in others}
    return replace(model, chunks=tuple(chunks), parameters=parameters)


def mixed(model: Model, dtypes: Mapping[str, tuple[torch.dtype, torch.dtype]]) -> Model:
    """``model`` with other parameter dtypes: (to compute with, of gradient and update)."""
    parameters = dict(model.parameters)
    for name, (dtype, gradient) in dtypes.items():
        nbytes = math.prod(parameters[name].shape) * dtype.itemsize
        parameters[name] = replace(parameters[name], dtype=dtype, gradient=gradient, nbytes=nbytes)
    return replace(model, parameters=parameters)


def at(model: Model, group: int, whole: int = 1) -> Model:
    """``model`` as one device of a group of ``group`` sees it: ``whole / group`` times the rows."""

    def part(n: int) -> int:
        return n * whole // group

    values = []
    for value in model.values:
        rows = 0 if value.shape[:1] in ((BATCH,), (TOKENS,)) else 1  # else expert-major
        if len(value.shape) > rows and value.shape[1:] != (1,):  # not counts
            shape = list(value.shape)
            shape[rows] = part(shape[rows])
            value = replace(value, shape=tuple(shape), nbytes=part(value.nbytes))
        values.append(value)
    known: dict[int, Mapping[RematPolicy, Variant]] = {}
    chunks = []
    for chunk in model.chunks:
        if id(chunk.variants) not in known:
            known[id(chunk.variants)] = {
                policy: Variant(
                    passes={
                        which: replace(
                            p,
                            cost=PassCost((OpCost(1, part(p.flops)),)),
                            workspace=part(p.workspace),
                        )
                        for which, p in variant.passes.items()
                    },
                    saved_bytes=part(variant.saved_bytes),
                    saved_for_bw_bytes=part(variant.saved_for_bw_bytes),
                    bi_saved_bytes=part(variant.bi_saved_bytes),
                )
                for policy, variant in chunk.variants.items()
            }
        found = chunk.sorted_rows
        found = found and replace(found, rows=part(found.rows))
        chunks.append(replace(chunk, variants=known[id(chunk.variants)], sorted_rows=found))
    return replace(model, chunks=tuple(chunks), values=tuple(values))
