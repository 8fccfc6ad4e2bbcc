"""Regions: how they are counted and matched, and that a capture leaves everything as it was."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import piper
from piper.base.errors import CaptureError
from piper.capture.model import Captured, capture
from piper.capture.regions import Region
from piper.strategies import mesh
from tests.training import plain, sgd

X, Y = torch.randn(4, 3), torch.randn(4, 3)


def record(model: nn.Module, **options: Any) -> Captured:
    options = {"inputs": (X,), "targets": (Y,), "loss": F.mse_loss, **options}
    return capture(model, **options)


def names(captured: Captured) -> list[str]:
    return [chunk.name for chunk in captured.chunks]


class Model(nn.Module):
    """Two linear layers and the test's own ``forward``."""

    def __init__(self, forward: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def two_regions(model: Model, x: Tensor) -> Tensor:
    with piper.annotate("layer"):
        x = model.a(x)
    with piper.annotate("layer"):
        return model.b(x)


class Stack(nn.Module):
    """Layers in a list, each with an inner part, as in most models."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# --- counting and nesting


def test_indices_count_per_name_in_order_of_entry() -> None:
    def forward(model: Model, x: Tensor) -> Tensor:
        for name in ("a", "b", "a", "a", "b"):
            with piper.annotate(name):
                x = model.a(x)
        return x

    assert names(record(Model(forward))) == ["a[0]", "b[0]", "a[1]", "a[2]", "b[1]", "loss[0]"]


def test_regions_nest_outermost_first() -> None:
    def forward(model: Model, x: Tensor) -> Tensor:
        with piper.annotate("layer"), piper.annotate("EP"):
            x = model.a(x)
        with piper.annotate("EP"), piper.annotate("layer"):
            return model.b(x)

    found = record(Model(forward)).chunks
    assert found[0].tags == (Region("layer", 0), Region("EP", 0))
    assert found[1].tags == (Region("EP", 1), Region("layer", 1))


def test_one_annotate_object_is_reentrant() -> None:
    region = piper.annotate("r")

    def forward(model: Model, x: Tensor) -> Tensor:
        with region:
            x = model.a(x)
            with region:
                x = model.b(x)
            return x + 1

    assert names(record(Model(forward))) == ["r[0]", "r[0]/r[1]", "r[0]", "loss[0]"]


def test_recursion_nests() -> None:
    def dive(model: Model, x: Tensor, depth: int) -> Tensor:
        with piper.annotate("r"):
            x = model.a(x)
            return dive(model, x, depth - 1) if depth else x

    expected = ["r[0]", "r[0]/r[1]", "r[0]/r[1]/r[2]", "loss[0]"]
    assert names(record(Model(lambda m, x: dive(m, x, 2)))) == expected


def test_an_exception_caught_by_the_model_closes_its_region() -> None:
    def forward(model: Model, x: Tensor) -> Tensor:
        x = model.a(x)
        try:
            with piper.annotate("tried"):
                x = x * 2
                raise KeyError
        except KeyError:
            x = x * 3
        with piper.annotate("layer"):
            return model.b(x)

    assert names(record(Model(forward))) == ["tried[0]", "layer[0]", "loss[0]"]


# --- tags by module path


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ({"layers.*": "layer"}, ["layer[0]", "layer[1]"]),
        ({"layers.1": "layer"}, ["layer[0]"]),
        ({"layers.*.0": "lin"}, ["lin[0]", "lin[1]"]),
        ({"**.0.0": "lin"}, ["lin[0]"]),
        ({"**.0": "zero"}, ["zero[0]/zero[1]", "zero[0]", "zero[2]"]),
        ({"layers.**": "m"}, ["m[0]/m[1]", "m[0]/m[2]", "m[3]/m[4]", "m[3]/m[5]"]),
        ({"he*": "head"}, ["head[0]"]),
        ({"*": "top"}, ["top[0]"]),
        (
            {"layers.*": "layer", "layers.*.0": "EP"},
            ["layer[0]/EP[0]", "layer[0]", "layer[1]/EP[1]", "layer[1]"],
        ),
    ],
    ids=str,
)
def test_a_star_is_one_step_and_two_stars_any_number(
    tags: dict[str, str], expected: list[str]
) -> None:
    assert names(record(Stack(), tags=tags)) == [*expected, "loss[0]"]


def test_star_alone_matches_children_and_not_the_model_itself() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert names(record(model, tags={"*": "layer"})) == ["layer[0]", "layer[1]", "loss[0]"]


def test_a_module_called_twice_enters_twice() -> None:
    captured = record(Model(lambda m, x: m.a(m.a(x))), tags={"a": "layer"})
    assert names(captured) == ["layer[0]", "layer[1]", "loss[0]"]
    assert captured.chunks[0].parameters == captured.chunks[1].parameters == ("a.weight", "a.bias")


def test_a_module_at_two_paths_enters_once_for_each_call() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model.append(model[0])
    assert names(record(model, tags={"?": "step"})) == ["step[0]", "step[1]", "step[2]", "loss[0]"]


def test_two_patterns_on_one_module_nest_in_the_order_given() -> None:
    captured = record(Stack(), tags={"layers.*": "layer", "layers.1": "last"})
    assert names(captured) == ["layer[0]", "layer[1]/last[0]", "loss[0]"]
    captured = record(Stack(), tags={"layers.1": "last", "layers.*": "layer"})
    assert names(captured) == ["layer[0]", "last[0]/layer[1]", "loss[0]"]


def test_tags_and_annotate_mix() -> None:
    model = Model(two_regions)
    assert names(record(model, tags={"b": "EP"})) == ["layer[0]", "layer[1]/EP[0]", "loss[0]"]
    assert names(record(model, tags={"b": "layer"})) == ["layer[0]", "layer[1]/layer[2]", "loss[0]"]


# --- outside a capture


def test_annotate_outside_a_capture_changes_nothing() -> None:
    model = Model(two_regions)
    assert torch.equal(model(X), model.b(model.a(X)))


def test_annotate_disappears_under_torch_compile() -> None:
    model = Model(two_regions)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(X), model(X))


@pytest.mark.parametrize("name", ["layer", "MB", ""])
def test_an_exception_passes_through_and_leaves_nothing(name: str) -> None:
    with pytest.raises(ZeroDivisionError), piper.annotate(name):
        raise ZeroDivisionError
    assert names(record(Model(two_regions))) == ["layer[0]", "layer[1]", "loss[0]"]


def test_annotate_before_a_capture_does_not_count() -> None:
    model = Model(two_regions)
    model(X)
    with piper.annotate("layer"):
        captured = record(model)
    assert names(captured) == ["layer[0]", "layer[1]", "loss[0]"]


def test_other_threads_are_not_recorded() -> None:
    """The threads share one ``annotate`` object; the other uses it during the capture."""
    region = piper.annotate("layer")
    entered, finished = threading.Event(), threading.Event()

    def run_elsewhere() -> None:
        assert entered.wait(60)
        with region:
            pass
        finished.set()

    def forward(model: Model, x: Tensor) -> Tensor:
        with region:
            x = model.a(x)
            entered.set()
            assert finished.wait(60)
        return model.b(x)

    other = threading.Thread(target=run_elsewhere)
    other.start()
    try:
        captured = record(Model(forward))
    finally:
        entered.set()
        other.join()
    assert names(captured) == ["layer[0]", "loss[0]"]


# --- where a capture can be made


def in_thread(work: Callable[[], Captured]) -> Captured:
    found: list[Captured] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_a_capture_within_a_thread() -> None:
    captured = in_thread(lambda: record(Model(two_regions)))
    assert names(captured) == ["layer[0]", "layer[1]", "loss[0]"]


def test_captures_in_two_threads_at_once() -> None:
    """The second begins while the first is inside the model; both must be complete."""
    inside, second_runs = threading.Event(), threading.Event()
    found: dict[str, Captured | Exception] = {}

    def first(model: Model, x: Tensor) -> Tensor:
        inside.set()
        second_runs.wait(0.5)  # a capture that waits for the first never sets it
        return two_regions(model, x)

    def second(model: Model, x: Tensor) -> Tensor:
        second_runs.set()
        return two_regions(model, x)

    def run(key: str, forward: Callable[[Model, Tensor], Tensor]) -> None:
        try:
            found[key] = record(Model(forward))
        except CaptureError as error:
            found[key] = error

    stderr = sys.stderr
    one = threading.Thread(target=run, args=("first", first))
    one.start()
    assert inside.wait(60)
    two = threading.Thread(target=run, args=("second", second))
    two.start()
    one.join()
    two.join()
    assert sys.stderr is stderr
    for result in found.values():
        assert isinstance(result, Captured), result
        assert names(result) == ["layer[0]", "layer[1]", "loss[0]"]


def fake(x: Tensor) -> Tensor:
    return FakeTensorMode().from_tensor(x)


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("convert", [fake, lambda x: x.to("meta"), Tensor.clone])
@pytest.mark.parametrize("meta_model", [False, True], ids=["cpu-model", "meta-model"])
def test_examples_and_models_need_no_data(
    convert: Callable[[Tensor], Tensor], meta_model: bool
) -> None:
    model = Model(two_regions).to("meta") if meta_model else Model(two_regions)
    captured = record(model, inputs=(convert(X),), targets=(convert(Y),))
    expected = record(Model(two_regions))
    assert captured.device == torch.device("cpu")
    assert describe(captured) == describe(expected)


def test_a_capture_inside_the_users_fake_mode() -> None:
    with FakeTensorMode():
        model = Model(two_regions)
        x, y = torch.empty(4, 3), torch.empty(4, 3)
        captured = record(model, inputs=(x,), targets=(y,))
    assert names(captured) == ["layer[0]", "layer[1]", "loss[0]"]


@pytest.mark.parametrize("ambient", [torch.no_grad, lambda: torch.device("meta")])
def test_the_ambient_mode_does_not_matter(ambient: Callable[[], Any]) -> None:
    model = Model(two_regions)
    with ambient():
        captured = record(model)
    assert describe(captured) == describe(record(model))


def describe(captured: Captured) -> list[Any]:
    return [
        (c.index, c.tags, c.parameters, c.buffers, c.inputs, c.outputs, c.updates, c.body.key)
        for c in captured.chunks
    ]


def test_two_captures_in_a_row_are_equal() -> None:
    model = Stack()
    tags = {"layers.*": "layer"}
    assert describe(record(model, tags=tags)) == describe(record(model, tags=tags))


# --- side effects of a capture


class Stateful(nn.Module):
    """Changing buffers, dropout, attributes set in forward, a user's hook."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Linear(3, 3).requires_grad_(False).eval()
        self.fails = fails
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_forward_pre_hook(_users_hook)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.last = x
        with piper.annotate("layer"):
            x = self.drop(self.norm(self.frozen(x)))
            if self.fails:
                raise ValueError("as it does")
        return x


def _users_hook(module: nn.Module, args: object) -> None:
    return None


def snapshot(model: nn.Module) -> list[Any]:
    """All state of ``model`` and torch that a capture could change."""
    hooks = [
        (path, key, list(value))
        for path, m in model.named_modules()
        for key, value in vars(m).items()
        if "hooks" in key
    ]
    return [
        hooks,
        [(path, id(m), m.training, sorted(vars(m))) for path, m in model.named_modules()],
        [(n, id(p), p.requires_grad, p.grad) for n, p in model.named_parameters()],
        [(n, p.tolist()) for n, p in model.state_dict().items()],
        [(n, id(b), b.tolist()) for n, b in model.named_buffers()],
        torch.get_rng_state().tolist(),
        (torch.is_grad_enabled(), type(torch.empty(1)), id(sys.stderr), id(sys.stdout)),
    ]


@pytest.mark.parametrize("fails", [False, True], ids=["captured", "failed"])
def test_the_model_is_left_exactly_as_it_was(fails: bool) -> None:
    model = Stateful(fails)
    before = snapshot(model)
    try:
        record(model, tags={"norm": "EP"})
        assert not fails
    except CaptureError:
        assert fails
    assert snapshot(model) == before
    assert model.calls == 0


def test_the_example_is_left_as_it_was() -> None:
    x, y = X.clone(), Y.clone()
    record(Model(two_regions), inputs=(x,), targets=(y,))
    assert not x.requires_grad
    assert torch.equal(x, X)
    assert torch.equal(y, Y)


def test_an_interrupt_passes_through_and_leaves_nothing() -> None:
    def forward(model: Model, x: Tensor) -> Tensor:
        with piper.annotate("layer"):
            raise KeyboardInterrupt

    model = Model(forward)
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        record(model, tags={"a": "EP"})
    assert snapshot(model) == before
    assert names(record(Model(two_regions))) == ["layer[0]", "layer[1]", "loss[0]"]


# models without regions


class Feed(nn.Module):
    """A feed-forward network on sequences, without regions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


TENSOR = {"up.*": 0, "down.weight": 1}
WITHOUT: list[dict[str, Any]] = [
    {"dp": 2},
    {"dp": 4, "zero": 3, "within": 2, "microbatches": 2},
    {"dp": 2, "tp": 2, "zero": 3, "parameters": TENSOR},
    {"dp": 2, "cp": 2, "zero": 1},
]


@pytest.mark.slow
def test_a_model_without_regions_trains_as_on_one_device_unless_it_is_cut_into_stages() -> None:
    torch.manual_seed(0)
    model = Feed().double()
    x, y = torch.randn(2, 8, 2, 4, dtype=torch.float64)
    expected = plain(model, F.mse_loss, [((x,), (y,))] * 2, microbatches=1)
    captured = piper.capture(model, inputs=(x,), targets=(y,), loss=F.mse_loss, optimizer=sgd)
    for axes in WITHOUT:
        with piper.launch(captured.compile(mesh(**axes))) as trainer:
            losses = torch.stack([trainer.step(x, y).loss for _ in range(2)])
            state = trainer.state_dict()
        torch.testing.assert_close(losses, torch.stack(expected.losses), msg=str(axes))
        torch.testing.assert_close(state, expected.state, rtol=1e-12, atol=1e-12, msg=str(axes))
    with pytest.raises(piper.DirectiveError, match="no region 'layer', nor any other, to make 2"):
        captured.compile(mesh(pp=2))


def test_evaluation_of_a_model_without_regions() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    captured = piper.capture(model, inputs=(X,), targets=(Y,), loss=F.mse_loss)
    with piper.launch(captured.compile(mesh(dp=2))) as trainer:
        loss = trainer.evaluate(X, Y).loss
    torch.testing.assert_close(loss, F.mse_loss(model.eval()(X), Y).detach())
