"""Equal modules are traced once, and the captured step is the same as if each had been traced."""

import types
from collections import defaultdict
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import piper
from piper.capture.model import Captured, capture
from piper.capture.repeats.equal_modules import Found
from tests.training import assert_same as assert_equal_runs
from tests.training import compiled, pipeline, plain, train

LAYERS = 6
ONE_BY_ONE = Found(unequal="a test wants it so")


class Block(nn.Module):
    """A block with a number of its own, as in models of transformers."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("mlp"):
            return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class ReadsNumber(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.index == 3 else 1.0)


class Flagged(Block):
    """Reads a number that few of them have."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.doubles = int(index == 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.doubles else 1.0)


class Counts(Block):
    """Changes a buffer."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


class Writes(Block):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x.mul_(0.5)
        return y


class Constant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor(0.5)


class NoGrad(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.mean()
        return super().forward(x) * scale


class Configured(Block):
    """Has an object of its own."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.config = object()


class Appends(Block):
    """Gives a tensor to the model past its result."""

    losses: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.losses.append(y.square().mean())
        return y


class Model(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(kind(i) for i in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        losses: list[Tensor] = []
        for layer in self.layers:
            layer.losses = losses
            x = layer(x)
        return x + sum(losses)


class Alternating(Model):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__(kind)
        self.layers = nn.ModuleList(kind(i) for i in range(10))
        for i, layer in enumerate(self.layers):
            layer.norm.eps = 1e-5 if i % 2 else 1e-6


class Frozen(Model):
    """Its last blocks are not trained."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__(kind)
        for layer in self.layers[-2:]:
            layer.requires_grad_(False)


class Tied(Model):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__(kind)
        for layer in self.layers[1:]:
            layer.up.weight = self.layers[0].up.weight


class Penalized(Model):
    """Reads the weights of all its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(x.square().sum() for x in self.parameters())


class Holding(Model):
    """Reads a weight of a block from a list."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__(kind)
        self.held = [self.layers[3].up.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.held[0].square().sum()


class Numbers(Model):
    """Calls each block with a number of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, scale=float(i))
        return x


class Converting(Block):
    """A conversion that changes nothing renames its input for all that follows."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        bias = bias.to(x.dtype)
        return super().forward(x) + bias


class Converts(Model):
    """Its first block and its loss read what all others convert."""

    def forward(self, x: Tensor) -> Tensor:
        bias = self.first(x)
        for layer in self.layers:
            x = layer(x, bias)
        return x + bias


class Scales(Block):
    def forward(self, x: Tensor, scale: float) -> Tensor:
        return super().forward(x) * scale


class Passes(Model):
    """Its blocks return a tensor that they are given, as T5 does."""

    def forward(self, x: Tensor) -> Tensor:
        x = bias = self.first(x)
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x


class Biased(Block):
    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x) + bias, bias


class Collects(Model):
    """Reads the results of all its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        seen = []
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return torch.stack(seen).sum(0)


class Skips(Model):
    """Each block but the first also gets what the one before the last returned."""

    def forward(self, x: Tensor) -> Tensor:
        x = before = self.first(x)
        for layer in self.layers:
            x, before = layer(x, before)[0], x
        return x


class Scaled(Model):
    """Computes between its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) * 2.0
        return x


class Holds(Model):
    """A later block reads what an earlier one returned."""

    def forward(self, x: Tensor) -> Tensor:
        seen = [self.first(x)]
        for i, layer in enumerate(self.layers):
            seen.append(layer(seen[-1], seen[1 if i > 3 else 0])[0])
        return seen[-1]


class Masked(Block):
    """Returns another mask."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x) + mask.sum(-1), mask + 1.0


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a block tells of its rows, as the routers of mixtures of experts do."""

    place: Tensor
    weights: tuple[Tensor, str]


@dataclass
class Marks:
    chosen: Chosen | None
    mean: Tensor


class Choosing(Block):
    """Returns whole numbers, which need no gradient, in a dataclass."""

    def forward(self, x: Tensor) -> tuple[Tensor, Marks]:
        weights, place = super().forward(x).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        chosen = Chosen(place.t(), (weights, "normalized"))
        return x + weights.to(x.dtype).mean(), Marks(chosen, x.mean())


class MarksDataclass(Choosing):
    """An attribute that is no field."""

    def forward(self, x: Tensor) -> tuple[Tensor, Marks]:
        x, marks = super().forward(x)
        marks.scale = 2.0
        return x, marks


class KeepsDataclass(Choosing):
    def forward(self, x: Tensor) -> tuple[Tensor, Marks]:
        x, self.marks = super().forward(x)
        return x, self.marks


class Ignores(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x, marks = layer(x)
        return x * getattr(marks, "scale", 1.0) + marks.mean


class Unneeded(Choosing):
    """Gets a tensor that it does not read."""

    def forward(self, x: Tensor, mean: Tensor) -> tuple[Tensor, Marks]:
        return super().forward(x)


class HandsOn(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        mean = x.mean()
        for layer in self.layers:
            x, marks = layer(x, mean)
            mean = marks.mean
        return x


class Balances(Model):
    """Reads the dataclass of each block before it calls the next."""

    def forward(self, x: Tensor) -> Tensor:
        x, balance = self.first(x), 0.0
        for layer in self.layers:
            x, marks = layer(x)
            assert type(marks) is Marks
            assert type(marks.chosen) is Chosen
            balance = balance + (marks.chosen.place * marks.chosen.weights[0].t()).sum()
            marks.chosen = None
        return x + balance


class Scaling(Model):
    """Writes, between its blocks, into a tensor that all are given."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.mean(-1, keepdim=True)
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, scale)[0]
            scale.mul_(0.5)
        return x


class Twice(Model):
    """Calls each block twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(layer(x))
        return x


class Untrained(Model):
    """Calls its blocks without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self.layers:
                x = layer(x)
        return self.first(x)


class Defaults(Block):
    """Reads a number that its items do not show."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.scales: dict[str, float] = defaultdict(lambda: 2.0 if index == 3 else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scales.default_factory()


class Place:
    """Where a model is, for its blocks."""

    index = 0


PLACE = Place()


class Telling(Model):
    """Tells its blocks their number."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for PLACE.index, layer in enumerate(self.layers):
            x = layer(x)
        return x


class Restarting(Model):
    def forward(self, x: Tensor) -> Tensor:
        PLACE.index = 0
        return super().forward(x)


class AskingGlobal(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if PLACE.index == 3 else 1.0)


class AskingShared(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.place = PLACE

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.place.index == 3 else 1.0)


class Counting(AskingShared):
    def forward(self, x: Tensor) -> Tensor:
        self.place.index += 1
        return super().forward(x)


class Finding(Block):
    """Finds its place in the model."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.parents: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.parents[0].layers[3] is self else 1.0)


class Parental(Model):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__(kind)
        for layer in self.layers:
            layer.parents.append(self)


class Growing(Model):
    """Each block reads a mask that takes one more operation on the batch than that before."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__(kind)
        self.requires_grad_(False)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mask = x.unsqueeze(-1).repeat(1, 1, 4)
        x = self.first(x)
        for layer in self.layers:
            x, mask = layer(x, mask)
        return self.last(x)


class AskingType(Block):
    """Python's ``type`` tells the number from what stands for it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if type(self.index) is int else 1.0)


class Marked(Block):
    """One weight has an attribute that decides."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        if index == 3:
            self.up.weight.gain = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self.up.weight, "gain", 1.0)


class Counted:
    calls = 0


counts = types.ModuleType("counts")
COUNTS = np.zeros(1)
CALLS: ContextVar[int] = ContextVar("calls")


class CountsOutside(Block):
    """The third call computes something else. The count is not where modules and globals are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.count() == 3 else 1.0)

    def count(self) -> int:
        Counted.calls += 1
        return Counted.calls


class CountsInModule(CountsOutside):
    def count(self) -> int:
        counts.calls += 1
        return counts.calls


class CountsInArray(CountsOutside):
    def count(self) -> int:
        COUNTS[0] += 1
        return int(COUNTS[0])


class CountsInContext(CountsOutside):
    def count(self) -> int:
        CALLS.set(CALLS.get() + 1)
        return CALLS.get()


class Recounting(Model):
    def forward(self, x: Tensor) -> Tensor:
        Counted.calls = counts.calls = COUNTS[0] = 0
        CALLS.set(0)
        return super().forward(x)


class MarksActivations(Block):
    """What it returns carries a number for the next one."""

    def forward(self, x: Tensor) -> Tensor:
        place = getattr(x, "place", 1.0)
        y = super().forward(x) * place
        y.place = place + 1.0
        return y


def captures(model: nn.Module, **options: object) -> tuple[Captured, Captured]:
    """``model`` captured with equal modules traced once, and one by one."""
    x = torch.randn(4, 8)
    how = {"inputs": (x,), "targets": (x,), "loss": F.mse_loss, "microbatches": 2, **options}
    once, each = (capture(model, **how, found=found) for found in (None, ONE_BY_ONE))
    assert each.repeated == 0
    return once, each


def assert_same(one: Captured, two: Captured) -> None:
    for a, b in zip(one.chunks, two.chunks, strict=True):
        ends = ("tags", "parameters", "buffers", "inputs", "outputs", "updates")
        assert [getattr(a, end) for end in ends] == [getattr(b, end) for end in ends]
        assert a.body.key == b.body.key
    assert one.cut.values == two.cut.values
    assert one.computation == two.computation
    numbers = [{id(p): i for i, p in enumerate(x.unique_programs)} for x in (one, two)]
    shared = [[n[id(p)] for p in x.programs] for n, x in zip(numbers, (one, two), strict=True)]
    assert shared[0] == shared[1]
    for a, b in zip(one.joints, two.joints, strict=True):
        assert str(a.graph) == str(b.graph)


@pytest.mark.parametrize(
    ("model", "kind", "repeated"),
    [
        (Model, Block, LAYERS - 2),
        (Alternating, Block, 6),
        (Passes, Biased, LAYERS - 3),
        pytest.param(Skips, Biased, LAYERS - 3, marks=pytest.mark.slow),
        pytest.param(Holds, Biased, LAYERS - 3, marks=pytest.mark.slow),
        pytest.param(Collects, Block, LAYERS - 2, marks=pytest.mark.slow),
        pytest.param(Growing, Masked, LAYERS - 2, marks=pytest.mark.slow),
        pytest.param(Scaling, Biased, LAYERS - 2, marks=pytest.mark.slow),
        pytest.param(Twice, Block, 2 * LAYERS - 3, marks=pytest.mark.slow),
        pytest.param(Untrained, Block, 0, marks=pytest.mark.slow),
        (Ignores, Choosing, LAYERS - 2),
        pytest.param(Balances, Choosing, LAYERS - 2, marks=pytest.mark.slow),
        pytest.param(HandsOn, Unneeded, LAYERS - 2, marks=pytest.mark.slow),
        pytest.param(Ignores, MarksDataclass, 0, marks=pytest.mark.slow),
        pytest.param(Ignores, KeepsDataclass, 0, marks=pytest.mark.slow),
        pytest.param(Model, Defaults, 0, marks=pytest.mark.slow),
        (Telling, AskingGlobal, 0),
        (Telling, AskingShared, 0),
        (Restarting, Counting, 0),
        pytest.param(Scaled, Block, LAYERS - 2, marks=pytest.mark.slow),
        pytest.param(Frozen, Block, 2, marks=pytest.mark.slow),
        pytest.param(Model, ReadsNumber, 0, marks=pytest.mark.slow),
        pytest.param(Model, Configured, 0, marks=pytest.mark.slow),
        (Model, Counts, 0),
        (Model, Writes, 0),
        pytest.param(Model, Constant, 0, marks=pytest.mark.slow),
        pytest.param(Model, NoGrad, 0, marks=pytest.mark.slow),
        pytest.param(Model, Appends, 0, marks=pytest.mark.slow),
        pytest.param(Tied, Block, 0, marks=pytest.mark.slow),
        pytest.param(Model, Flagged, 3, marks=pytest.mark.slow),
        (Converts, Converting, LAYERS - 3),
        (Parental, Finding, 0),
        (Model, AskingType, 0),
        (Model, Marked, LAYERS - 3),
        (Model, MarksActivations, 0),
        (Recounting, CountsOutside, 0),
        pytest.param(Recounting, CountsInModule, 0, marks=pytest.mark.slow),
        pytest.param(Recounting, CountsInArray, 0, marks=pytest.mark.slow),
        pytest.param(Recounting, CountsInContext, 0, marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
@pytest.mark.parametrize(
    "tags",
    [{}, pytest.param({"layers.*": "layer"}, marks=pytest.mark.thorough)],
    ids=["untagged", "tagged"],
)
def test_the_step_is_the_same(
    model: type[Model], kind: type[Block], repeated: int, tags: dict[str, str]
) -> None:
    once, each = captures(model(kind), tags=tags)
    assert_same(once, each)
    assert once.repeated == repeated


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(("model", "kind"), [(Model, Block), (Holds, Biased), (Scaling, Biased)])
def test_a_later_trace_does_not_compare_the_modules_again(
    model: type[Model], kind: type[Block]
) -> None:
    x = torch.randn(4, 8)
    how = {"inputs": (x,), "targets": (x,), "loss": F.mse_loss, "tags": {"layers.*": "layer"}}
    network = model(kind)
    first = capture(network, **how, microbatches=2)
    for microbatches in (1, 2):
        later = capture(network, **how, microbatches=microbatches, found=first.found)
        alone = capture(network, **how, microbatches=microbatches)
        assert_same(later, alone)
        assert later.traced == alone.traced
        assert later.repeated == alone.repeated + 1


def test_tags_inside_of_equal_modules_are_numbered_as_entered() -> None:
    tags = {"layers.*": "layer", "layers.*.up": "up"}
    once, each = captures(Model(Block), tags=tags)
    assert_same(once, each)
    assert once.repeated == LAYERS - 2


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
    "tags",
    [
        {"layers.*": "layer", "layers.3": "also"},
        {"layers.[0245]": "layer"},
        {"layers.[012]": "layer", "layers.[345]": "other"},
    ],
)
def test_regions_that_only_some_of_equal_modules_have(tags: dict[str, str]) -> None:
    once, each = captures(Model(Block), tags=tags)
    assert_same(once, each)
    assert once.repeated == LAYERS - 2


@pytest.mark.slow
def test_a_model_in_evaluation_mode() -> None:
    once, each = captures(Model(Block).eval())
    assert_same(once, each)
    assert once.repeated == LAYERS - 2


def test_a_change_between_calls_is_seen() -> None:
    """A block whose settings the model changes before it calls it is traced."""

    class Scaled(Block):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    class Changes(Model):
        def forward(self, x: Tensor) -> Tensor:
            self.layers[3].scale = 3.0
            return super().forward(x)

    once, each = captures(Changes(Scaled))
    assert_same(once, each)
    assert once.repeated == LAYERS - 3


def test_a_model_that_looks_into_its_blocks_before_it_calls_them() -> None:
    class Looks(Model):
        def forward(self, x: Tensor) -> Tensor:
            self.layers[3].norm.eps = 1e-3
            return super().forward(x)

    once, each = captures(Looks(Block))
    assert_same(once, each)
    assert once.repeated == 0


@pytest.mark.slow
def test_a_model_that_reads_the_weights_of_its_blocks() -> None:
    once, each = captures(Penalized(Block))
    assert_same(once, each)
    assert once.repeated == 0


@pytest.mark.parametrize("found", [None, ONE_BY_ONE])
def test_a_weight_held_in_a_list_is_refused(found: Found | None) -> None:
    x = torch.randn(4, 8)
    how = {"inputs": (x,), "targets": (x,), "loss": F.mse_loss, "found": found}
    with pytest.raises(piper.CaptureError, match=r"layers.3.up.weight is read from a list"):
        capture(Holding(Block), **how)


@pytest.mark.slow
def test_blocks_that_are_called_differently() -> None:
    once, each = captures(Numbers(Scales))
    assert_same(once, each)
    assert once.repeated == 0


def decoder(**options: object) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 32}
    kind = transformers.MistralConfig if "sliding_window" in options else transformers.LlamaConfig
    config = kind(num_hidden_layers=LAYERS, num_key_value_heads=1, **sizes, **options)
    return transformers.AutoModelForCausalLM.from_config(config)


def logits_loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def of_tokens(loss: Any) -> dict[str, Any]:
    x, y = torch.randint(32, (2, 4, 8), generator=torch.Generator().manual_seed(0))
    return {"inputs": (x,), "targets": (y,), "loss": loss, "tags": {"model.layers.*": "layer"}}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 4}], ids=["whole", "sliding"])
def test_a_cache_that_nobody_reads_changes_nothing(options: dict[str, int]) -> None:
    once, each = captures(decoder(**options), **of_tokens(logits_loss))
    assert_same(once, each)
    assert once.repeated == LAYERS - 2


@pytest.mark.slow
def test_a_step_with_a_cache_is_that_without() -> None:
    how = {"microbatches": 2, **of_tokens(logits_loss)}
    on, off = (capture(decoder(use_cache=cache), **how) for cache in (True, False))
    assert_same(on, replace(off, computation=on.computation))  # the masks are the same


@pytest.mark.slow
def test_a_cache_that_is_read_is_kept() -> None:
    def penalized(output: Any, targets: Tensor) -> Tensor:
        keys = output.past_key_values.layers[3].keys
        return logits_loss(output, targets) + keys.square().mean()

    once, each = captures(decoder(), **of_tokens(penalized))
    assert_same(once, each)
    assert once.repeated == 0


@pytest.mark.slow
def test_a_model_with_its_cache_on_trains_as_plain_torch() -> None:
    how = of_tokens(logits_loss)
    batches = [(how["inputs"], how["targets"])] * 2
    program = compiled(decoder(), pipeline([[0], [1]], 2), logits_loss, batches, tags=how["tags"])
    expected = plain(decoder(), logits_loss, batches, microbatches=2)
    assert_equal_runs(train(program, batches), expected)


def test_writing_into_cached_keys_is_refused() -> None:
    def writing(output: Any, targets: Tensor) -> Tensor:
        output.past_key_values.layers[0].keys.mul_(2.0)
        return logits_loss(output, targets)

    with pytest.raises(piper.CaptureError, match="turn the cache off"):
        capture(decoder(), microbatches=2, **of_tokens(writing))


@pytest.mark.slow
def test_parts_that_differ_in_the_graph_are_not_folded() -> None:
    tags = {"layers.*": "layer"}
    folded, _ = captures(Model(Block), tags=tags)
    grown, _ = captures(Growing(Masked), tags=tags)
    said = "their graphs differ, so that of each is made"
    assert said in grown.tracing
    assert said not in folded.tracing


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Block, "layers.0 to layers.5: 6 equal modules, 2 traced for all"),
        (Counts, "one by one: they change more than their results"),
        (Constant, "one by one: they change a mode, or hold tensors made from Python values"),
        (ReadsNumber, "every module is traced: no four are equal, for index is read"),
        (Configured, "every module is traced: no four are equal"),
    ],
)
def test_it_says_which_modules_were_traced(kind: type[Block], said: str) -> None:
    x = torch.randn(4, 8)
    made = capture(Model(kind), inputs=(x,), targets=(x,), loss=F.mse_loss)
    assert said in made.tracing
