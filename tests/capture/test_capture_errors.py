"""User mistakes: the error messages, and that a failed capture leaves nothing half done."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention

from piper import annotate
from piper.base.errors import CaptureError, PiperError
from piper.capture.model import capture
from tests.one_device import SingleDevice

HERE = Path(__file__)
X, Y = torch.randn(8, 4), torch.randn(8, 4)


def line_of(code: str) -> str:
    """``file:line`` of the first line of this file that contains ``code``."""
    lines = HERE.read_text().splitlines()
    return f"{HERE}:{next(i for i, line in enumerate(lines, 1) if code in line)}"


class Net(nn.Module):
    """``a``, then the mistake, then ``b``."""

    def __init__(self, mistake: Callable[[Net, Tensor], Any] = lambda net, x: x) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.layers = nn.ModuleList([self.a, self.b])
        self._mistake = mistake

    def forward(self, x: Tensor) -> Tensor:
        with annotate("layer"):
            x = self.a(x)
        x = self._mistake(self, x)
        with annotate("layer"):
            return self.b(x)


# --- data-dependent control flow


def branches(net: Net, x: Tensor) -> Tensor:
    if x.sum() > 0:  # a branch
        return x * 2
    return x


def loops(net: Net, x: Tensor) -> Tensor:
    while x.norm() > 1:  # a loop
        x = x / 2
    return x


def counts(net: Net, x: Tensor) -> Tensor:
    for _ in range(int(x[0, 0])):  # a count
        x = x + 1
    return x


def asserts(net: Net, x: Tensor) -> Tensor:
    assert (x == x).all()  # an assertion
    return x


def shapes(net: Net, x: Tensor) -> Tensor:
    return x + x.new_zeros(int(x.sum().item())).sum()  # a shape


class Indexes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return x + x[x > 0].sum()  # an index


class Searches(Indexes):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + x.nonzero().sum()  # a search


class Reads(Indexes):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * x.sum().item()  # a read


class Conditions(Indexes):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.a(x),))


# --- regions that are not regions


def leaves_open(net: Net, x: Tensor) -> Tensor:
    annotate("EP").__enter__()  # left open
    return x * 2


def leaves_inner_open(net: Net, x: Tensor) -> Tensor:
    with annotate("outer"):
        annotate("inner").__enter__()  # inner left open
        return x * 2


def crosses(net: Net, x: Tensor) -> Tensor:
    left, right = annotate("left"), annotate("right")
    left.__enter__()
    x = x * 2
    right.__enter__()
    x = x * 3
    left.__exit__(None, None, None)
    x = x * 4
    right.__exit__(None, None, None)
    return x


def exits_twice(net: Net, x: Tensor) -> Tensor:
    region = annotate("EP")
    with region:
        x = x * 2
    region.__exit__(None, None, None)
    return x


def exits_unentered(net: Net, x: Tensor) -> Tensor:
    annotate("EP").__exit__(None, None, None)
    return x


def empty(net: Net, x: Tensor) -> Tensor:
    with annotate("EP"):  # nothing inside
        pass
    return x


def constant_only(net: Net, x: Tensor) -> Tensor:
    with annotate("EP"):  # a constant inside
        table = torch.arange(4)
    return x * table


def dead_only(net: Net, x: Tensor) -> Tensor:
    with annotate("EP"):  # dead code inside
        x * 2
    return x


def named(name: Any) -> Callable[[Net, Tensor], Tensor]:
    def mistake(net: Net, x: Tensor) -> Tensor:
        with annotate(name):  # a bad name
            return x * 2

    return mistake


# --- writes to read-only tensors


class WritesInput(Indexes):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        y.add_(1)
        return self.a(x) * y


def writes_parameter(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.a.weight.mul_(0.5)
    return x


class WritesTiedBuffer(Indexes):
    def __init__(self) -> None:
        super().__init__()
        shared = torch.ones(4)
        self.register_buffer("one", shared)
        self.register_buffer("two", shared)

    def forward(self, x: Tensor) -> Tensor:
        self.one.add_(1)
        return self.a(x) * self.two


# --- models that cannot be copied, placed or run


class Locked(Indexes):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Derived(Indexes):
    def __init__(self) -> None:
        super().__init__()
        self.doubled = self.a.weight * 2


class Unregistered(Indexes):
    def __init__(self) -> None:
        super().__init__()
        self.extra = [nn.Parameter(torch.ones(4))]

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.extra[0]


def on_two_devices() -> nn.Module:
    net = Net()
    with FakeTensorMode():
        elsewhere = torch.empty(4, 4, device="cuda")
    net.a.weight = nn.Parameter(elsewhere, requires_grad=False)
    return net


OWN_WORDS = "the kettle is cold\nheat it to 95 degrees"


def raises(net: Net, x: Tensor) -> Tensor:
    raise ValueError(OWN_WORDS)  # its own error


def mismatches(net: Net, x: Tensor) -> Tensor:
    return x @ torch.ones(5, 5)  # a mismatch


def loses_x(net: Net, x: Tensor) -> None:
    return None


@dataclass(frozen=True)
class Mistake:
    """A mistake, and the words that its message must contain."""

    name: str
    says: tuple[str, ...]
    mistake: Callable[[Net, Tensor], Any] | None = None
    model: Callable[[], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def wrong(name: str, *says: str, **given: Any) -> Any:
    mistake, model = given.pop("mistake", None), given.pop("model", None)
    return pytest.param(Mistake(name, says, mistake, model, given), id=name)


def mean(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean()


NO_TRAINABLE = ("the loss depends on no trainable parameter", "requires_grad")
DATA = ("Net", "torch.where")

MISTAKES = [
    wrong("a branch on data", *DATA, line_of("# a branch"), "if x.sum() > 0", mistake=branches),
    wrong("a loop on data", *DATA, line_of("# a loop"), "while x.norm() > 1", mistake=loops),
    wrong("a data-dependent count", *DATA, line_of("# a count"), "range(int", mistake=counts),
    wrong("an assert on data", *DATA, line_of("# an assertion"), "(x == x)", mistake=asserts),
    wrong("item in a shape", *DATA, line_of("# a shape"), ".item()", mistake=shapes),
    wrong("boolean indexing", str(HERE), "x[x > 0]", "mask", model=Indexes),
    wrong("nonzero", str(HERE), "x.nonzero()", "mask", model=Searches),
    wrong("item as a number", str(HERE), "x.sum().item()", model=Reads),
    wrong("torch.cond", "cond", "control flow", model=Conditions),
    wrong("a region left open", "EP[0]", "left open", line_of("# left open"), mistake=leaves_open),
    wrong(
        "an inner region left open",
        "inner[0]",
        "left open",
        line_of("# inner left open"),
        mistake=leaves_inner_open,
    ),
    wrong("regions that cross", "left[0]", "right[0]", mistake=crosses),
    wrong("a region exited twice", "'EP'", "exited", mistake=exits_twice),
    wrong("a region exited but not entered", "'EP'", "exited", mistake=exits_unentered),
    wrong("an empty region", "EP[0] is empty", line_of("# nothing inside"), mistake=empty),
    wrong(
        "only constants in a region",
        "EP[0] is empty",
        line_of("# a constant inside"),
        mistake=constant_only,
    ),
    wrong("only dead ops", "EP[0] is empty", line_of("# dead code inside"), mistake=dead_only),
    wrong("region MB", "'MB'", "choose another", line_of("# a bad name"), mistake=named("MB")),
    wrong("region PASS", "'PASS'", "choose another", mistake=named("PASS")),
    wrong("region ''", "''", "choose another", mistake=named("")),
    wrong("region 3", "3", "string", line_of("# a bad name"), mistake=named(3)),
    wrong("region None", "None", "string", line_of("# a bad name"), mistake=named(None)),
    wrong("tag named MB", "'MB'", "'layers.*'", tags={"layers.*": "MB"}),
    wrong("tag named 3", "3", "'layers.*'", "string", tags={"layers.*": 3}),
    wrong("tags as a list", "tags", "list", tags=["layers.*"]),
    wrong("a pattern near a module", "'layer.*'", "Net", "'layers.*'", tags={"layer.*": "EP"}),
    wrong("a pattern near nothing", "'zzz'", "Net", "'layers.*'", tags={"zzz": "EP"}),
    wrong("a pattern of a ModuleList", "'layers'", "'layers.*'", "called", tags={"layers": "EP"}),
    wrong("writing to an input", "inputs[1]", "in place", model=WritesInput, inputs=(X, X)),
    wrong("writing to a parameter", "'a.weight'", "in place", mistake=writes_parameter),
    wrong("writing to a tied buffer", "'one'", "'two'", model=WritesTiedBuffer),
    wrong("unequal batch", "inputs[0] has 8", "targets[0] has 4", targets=(Y[:4],)),
    wrong(
        "unequal batch by name",
        "inputs['x'] has 8",
        "targets[0]['y'] has 4",
        inputs={"x": X},
        targets=({"y": Y[:4]},),
    ),
    wrong("batch does not divide", "batch of 8", "3", "1, 2, 4, 8", microbatches=3),
    wrong("no microbatches", "microbatches=0", "1, 2, 4, 8", microbatches=0),
    wrong("negative microbatches", "microbatches=-2", "1, 2, 4, 8", microbatches=-2),
    wrong("microbatches=2.0", "microbatches=2.0", "int", microbatches=2.0),
    wrong("microbatches='2'", "microbatches='2'", "int", microbatches="2"),
    wrong("no batch dimension", "batch dimension", inputs=(torch.ones(()),), targets=()),
    wrong("nothing in the batch", "empty", inputs=(X[:0],), targets=(Y[:0],)),
    wrong("inputs not in a tuple", "inputs", "tuple", inputs=X),
    wrong("targets not in a tuple", "targets", "tuple", targets=Y),
    wrong("inputs=None", "inputs", "tuple", inputs=None),
    wrong("targets=None", "targets", "tuple", targets=None),
    wrong("targets of text", "targets[0]", "str", targets=("eight",)),
    wrong("targets of numpy", "targets[0]", "ndarray", targets=(Y.numpy(),)),
    wrong("too many inputs", "Net.forward()", "3 were given", inputs=(X, X)),
    wrong("an unknown keyword", "Net.forward()", "'z'", inputs={"z": X}),
    wrong("loss=None", "targets= needs a loss", loss=None),
    wrong("a loss of other arguments", "takes (out)", "1 target:", loss=lambda out: out.sum()),
    wrong("loss not scalar", "the loss", "scalar", "(8, 4)", loss=lambda o, y: o - y),
    wrong("loss of three", "the loss", "(sum, count)", loss=lambda o, y: (o.sum(),) * 3),
    wrong("loss a float", "the loss", "float", loss=lambda o, y: 1.0),
    wrong("loss None", "the loss", "NoneType", loss=lambda o, y: None),
    wrong("a count not a tensor", "(sum, count)", "'a number'", loss=lambda o, y: (o.sum(), 3)),
    wrong("a complex loss", "complex", loss=lambda o, y: o.sum().to(torch.complex64)),
    wrong("loss without gradient", *NO_TRAINABLE, loss=torch.no_grad()(mean)),
    wrong("loss of detached values", *NO_TRAINABLE, loss=lambda o, y: mean(o.detach(), y)),
    wrong("frozen model", *NO_TRAINABLE, model=lambda: Net().requires_grad_(False)),
    wrong("model without parameters", *NO_TRAINABLE, model=nn.Tanh),
    wrong("loss of targets alone", *NO_TRAINABLE, loss=lambda o, y: y.mean()),
    wrong(
        "loss of targets alone, without regions",
        *NO_TRAINABLE,
        model=lambda: nn.Linear(4, 4),
        loss=lambda o, y: y.mean(),
    ),
    wrong("loss of nothing", *NO_TRAINABLE, loss=lambda o, y: torch.ones(())),
    wrong("unknown compiler", "compiler='xla'", "eager, inductor", compiler="xla"),
    wrong("unknown remat", "remat='some'", "none, min-cut, all", remat="some"),
    wrong("unknown device", "device='gpu'", "cuda", device="gpu"),
    wrong("two devices", "several devices", "cpu", "cuda", model=on_two_devices),
    wrong(
        "the model's own error",
        "ValueError",
        OWN_WORDS,
        line_of("# its own error"),
        mistake=raises,
    ),
    wrong(
        "shapes that do not match",
        line_of("# a mismatch"),
        "x @ torch.ones(5, 5)",
        "[8, 4] X [5, 5]",
        mistake=mismatches,
    ),
    wrong("x lost on the way", str(HERE), "self.b(x)", "NoneType", mistake=loses_x),
    wrong(
        "shapes that do not match inside torch's modules",
        "Sequential",
        "'1'",
        "[8, 5] X [4, 4]",
        model=lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(4, 4)),
    ),
    wrong("a model that cannot be copied", "Locked", "cop", "lock", model=Locked),
    wrong("an attribute that cannot be copied", "Derived", "cop", model=Derived),
    wrong("a lazy model", "weight", "initialized", model=lambda: nn.LazyLinear(4)),
    wrong("a parameter not registered", "Parameter", "regist", model=Unregistered),
    wrong("not a model", "nn.Module", "function", model=lambda: mean),
    wrong("a class for a model", "nn.Module", "Net", model=lambda: Net),
]


def snapshot(model: Any) -> Any:
    """State of ``model`` and torch that a failed capture could change."""
    clean = (torch.is_grad_enabled(), type(torch.empty(1)), id(sys.stderr), len(warnings.filters))
    if not isinstance(model, nn.Module):
        return clean
    modules = [
        (path, id(m), m.training, sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks))
        for path, m in model.named_modules()
    ]
    state = [*model.named_parameters(), *model.named_buffers()]
    return clean, modules, [(n, id(x), x.requires_grad, x.grad, x._version) for n, x in state]


ALWAYS = MISTAKES[::3]
BY_HAND = [pytest.param(*p.values, id=p.id, marks=pytest.mark.slow) for p in MISTAKES]


@pytest.mark.cases(fast=20, slow=8)
@pytest.mark.parametrize(
    "case", [p if p in ALWAYS else slow for p, slow in zip(MISTAKES, BY_HAND, strict=True)]
)
def test_a_mistake_is_named_and_nothing_is_left_half_done(
    case: Mistake, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Net(case.mistake) if case.mistake else (case.model or Net)()
    options = {"inputs": (X,), "targets": (Y,), "loss": mean, **case.options}
    before = snapshot(model)
    capfd.readouterr()
    with pytest.raises(CaptureError) as caught:
        capture(model, **options)
    message = str(caught.value)
    for part in case.says:
        assert part in message, f"no {part!r} in:\n{message}"
    for internal in ("piper/capture", "_export_root", "site-packages", "pop from empty"):
        assert internal not in message, f"{internal!r} is not the user's, in:\n{message}"
    assert snapshot(model) == before
    good = capture(nn.Linear(4, 4), inputs=(X,), targets=(Y,), loss=mean)
    assert [chunk.name for chunk in good.chunks] == ["model", "loss[0]"]
    assert capfd.readouterr() == ("", "")


def test_inference_mode_and_autocast_are_named() -> None:
    model = Net()
    with torch.inference_mode(), pytest.raises(CaptureError, match="inference_mode"):
        capture(model, inputs=(X,), targets=(Y,), loss=mean)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(CaptureError, match=r'autocast\(\).* give precision="bf16"'),
    ):
        capture(model, inputs=(X,), targets=(Y,), loss=mean)


def flexible(net: Net, x: Tensor) -> Tensor:
    heads = x[:, None, None].expand(8, 1, 16, 4)
    return flex_attention(heads, heads, heads)[:, 0, 0]  # flexible


def seeded(net: Net, x: Tensor) -> Tensor:
    return x + torch.rand(4, generator=torch.Generator())  # a generator


INTEGERS, CLASSES = torch.ones(8, 4, dtype=torch.int64), torch.zeros(8, dtype=torch.int32)


@pytest.mark.parametrize(
    "case",
    [
        wrong(
            "a float64 batch",
            "inputs[0] is float64, and torch's linear cannot take float64[8, 4], float32[4, 4]",
            "give it as float32: inputs[0].to(torch.float32)",
            str(HERE),
            inputs=(X.double(),),
        ),
        wrong("an integer batch", "inputs[0] is int64", "as float32", inputs=(INTEGERS,)),
        wrong("a half batch", "inputs[0] is float16", "as float32", inputs=(X.half(),)),
        wrong(
            "classes of int32",
            "targets[0] is int32, and torch's cross_entropy_loss cannot take",
            "give it as int64: targets[0].to(torch.int64)",
            targets=(CLASSES,),
            loss=F.cross_entropy,
        ),
        wrong(
            "a softmax of integers",
            "inputs[1] is int64, and torch's softmax cannot take int64[8, 4]",
            "give it as float32",
            model=lambda: Weighted(),
            inputs=(X, INTEGERS),
        ),
        wrong("a batch that requires grad", "inputs[0] requires grad", "inputs[0].detach()",
              inputs=(X.clone().requires_grad_(),)),
        wrong("a sparse batch", "layout sparse_coo", "inputs[0].to_dense()",
              inputs=(X.to_sparse(),)),
        wrong("a class for a loss", "loss=MSELoss is a class", "MSELoss()", loss=nn.MSELoss),
        wrong("no targets", "the loss takes (out, y)", "0 targets: give targets=(y,)", targets=()),
        wrong("no loss and no targets", "no loss= is given", "[8, 4]", loss=None, targets=()),
        wrong("flex_attention", "Net uses FlexAttention", line_of("# flexible"),
              'attn_implementation="sdpa"', mistake=flexible),
        wrong("a generator", "a torch.Generator is used at", line_of("# a generator"), "seed=",
              mistake=seeded),
    ],
)  # fmt: skip
def test_what_fits_no_operation_is_refused_when_it_is_captured(case: Mistake) -> None:
    model = Net(case.mistake) if case.mistake else (case.model or Net)()
    with pytest.raises(CaptureError) as caught:
        capture(model, **{"inputs": (X,), "targets": (Y,), "loss": mean, **case.options})
    for part in case.says:
        assert part in str(caught.value), f"no {part!r} in:\n{caught.value}"


class Weighted(Net):
    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x) * weights.softmax(-1)


def test_what_the_model_says_is_not_swallowed(capfd: pytest.CaptureFixture[str]) -> None:
    def speaks(net: Net, x: Tensor) -> Tensor:
        print("to stdout")
        print("to stderr", file=sys.stderr)
        return branches(net, x)

    with pytest.raises(CaptureError):
        capture(Net(speaks), inputs=(X,), targets=(Y,), loss=mean)
    assert capfd.readouterr() == ("to stdout\n", "to stderr\n")


# --- in a subprocess: torch's log output bypasses pytest, and some mistakes end the process


def run(code: str) -> subprocess.CompletedProcess[str]:
    root = str(HERE.parents[2])
    program = f"""
import sys
import torch
from torch import nn
from piper.capture.model import capture
from piper.base.errors import CaptureError
torch.set_num_threads(1)
x = torch.ones(8, 4)

class Net(nn.Module):
    def __init__(self, mistake):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.mistake = mistake
    def forward(self, x):
        return self.mistake(self, self.a(x))

def attempt(mistake, **options):
    try:
        capture(Net(mistake), inputs=(x,), loss=lambda out: out.mean(), **options)
    except CaptureError as error:
        return str(error)
    return "captured"
{dedent(code)}"""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_torch_logs_nothing_of_a_users_mistake() -> None:
    done = run("""
        attempt(lambda net, x: x if x.sum() > 0 else -x)
        attempt(lambda net, x: [x for _ in range(int(x[0, 0]))][0])
        attempt(lambda net, x: x @ torch.ones(5, 5))
        attempt(lambda net, x: x[x > 0])
    """)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "says"),
    [
        pytest.param(
            "print(attempt(lambda net, x: (net.a.weight.data.mul_(0.5), x)[1]))",
            "a.weight",
            id="writing to parameter.data",
        ),
        pytest.param(
            "print(attempt(lambda net, x: x, device='cuda'))",
            "cuda",
            id="a device that is not there",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without"),
        ),
    ],
)
def test_the_process_survives(code: str, says: str) -> None:
    done = run(code)
    assert done.returncode == 0, f"ended by {done.returncode}"
    assert says in done.stdout


# --- at the step


def trainer(**options: Any) -> SingleDevice:
    model = Net()
    options = {"inputs": (X,), "targets": (Y,), "loss": mean, **options}
    captured = capture(model, **options)
    return SingleDevice(captured, model, lambda p: torch.optim.SGD(p, lr=0.1))


@pytest.fixture(scope="module")
def single() -> SingleDevice:
    return trainer()


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        pytest.param((X[:4], Y[:4]), ("inputs[0]", "[4, 4]", "[8, 4]"), id="shape"),
        pytest.param((X, Y[:, :2]), ("targets[0]", "[8, 2]", "[8, 4]"), id="target shape"),
        pytest.param((X.double(), Y), ("inputs[0]", "float64", "float32"), id="dtype"),
        pytest.param((X,), ("1 input", "1 target", "1 value given"), id="no target"),
        pytest.param((X, Y, Y), ("1 input", "1 target", "3 values given"), id="too many"),
        pytest.param((), ("0 values given",), id="nothing"),
        pytest.param((X, 3), ("targets[0]", "int"), id="not a tensor"),
        pytest.param(((X,), (Y,)), ("inputs[0]", "tuple"), id="tuples"),
        pytest.param((X.to("meta"), Y), ("inputs[0]", "meta"), id="meta"),
        pytest.param(({"x": X}, Y), ("inputs[0]", "dict"), id="a mapping"),
    ],
)
def test_a_batch_unlike_the_example_changes_nothing(
    single: SingleDevice, batch: tuple[Any, ...], says: tuple[str, ...]
) -> None:
    before = {name: p.detach().clone() for name, p in single.parameters.items()}
    steps = single.steps
    with pytest.raises(PiperError) as caught:
        single.step(*batch)
    for part in says:
        assert part in str(caught.value), f"no {part!r} in:\n{caught.value}"
    assert single.steps == steps
    assert all(torch.equal(p, before[name]) for name, p in single.parameters.items())
    assert single.step(X, Y).loss.isfinite()


def test_a_keyword_batch_must_have_the_same_keys() -> None:
    keyed = trainer(inputs={"x": X})
    with pytest.raises(PiperError, match="'z'"):
        keyed.step({"z": X}, Y)
    with pytest.raises(PiperError, match="mapping"):
        keyed.step(X, Y)
    assert keyed.step({"x": X}, Y).loss.isfinite()


def test_a_number_in_the_batch_cannot_change_silently() -> None:
    """A value that is not a tensor is part of the captured program."""
    fixed = trainer(targets=(3.0,), loss=lambda out, y: (out - y).square().mean())
    assert fixed.step(X, 3.0).loss < 100
    with pytest.raises(PiperError, match=r"targets\[0\].*300"):
        fixed.step(X, 300.0)


def test_strides_of_a_batch_do_not_matter() -> None:
    class Flattens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x.flatten().reshape(8, 4))

    model = Flattens()
    captured = capture(model, inputs=(X,), targets=(Y,), loss=mean)
    transposed = X.T.contiguous().T
    found = SingleDevice(captured, model).step(transposed, Y).loss
    torch.testing.assert_close(found, mean(model(X), Y).detach())


# --- state for the step


def test_a_meta_model_needs_init() -> None:
    model = Net().to("meta")
    captured = capture(model, inputs=(X,), targets=(Y,), loss=mean)
    with pytest.raises(PiperError, match=r"a\.weight.*meta.*init="):
        SingleDevice(captured, model)
    half = Net()
    half.b.to("meta")
    with pytest.raises(PiperError, match=r"b\.weight.*meta.*init="):
        SingleDevice(captured, half)
    assert all(p.is_meta for p in model.parameters())


def test_another_model_than_the_captured_one() -> None:
    captured = capture(Net(), inputs=(X,), targets=(Y,), loss=mean)
    with pytest.raises(PiperError, match=r"a\.weight"):
        SingleDevice(captured, nn.Linear(4, 4)).step(X, Y)
    wider = Net()
    wider.a = nn.Linear(4, 4, bias=False)
    with pytest.raises(PiperError, match=r"a\.bias"):
        SingleDevice(captured, wider).step(X, Y)


def test_a_loss_with_parameters_must_be_given_again() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(out, y) * self.scale

    model, loss = Net(), Scaled()
    captured = capture(model, inputs=(X,), targets=(Y,), loss=loss)
    with pytest.raises(PiperError, match="loss="):
        SingleDevice(captured, model).step(X, Y)
    assert SingleDevice(captured, model, loss=loss).step(X, Y).loss.isfinite()


# parameters that share memory


class TwoInOne(nn.Module):
    """Two parameters that ``views`` makes from one tensor."""

    def __init__(
        self, views: Callable[[Tensor], tuple[Tensor, Tensor]], train: bool = True
    ) -> None:
        super().__init__()
        first, second = views(torch.ones(2, 8))
        self.first = nn.Parameter(first, requires_grad=train)
        self.second = nn.Parameter(second, requires_grad=train)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.first.sum() + self.second.sum() + self.rest(x)

    def rest(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    "views",
    [lambda x: (x, x), lambda x: (x[0], x[0, 4:]), lambda x: (x, x.t())],
    ids=["same", "part", "transposed"],
)
def test_two_parameters_in_one_memory(views: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    x = torch.ones(4, 1)
    with pytest.raises(
        CaptureError, match=r"first and second are two tensors in one memory.*clone"
    ):
        capture(TwoInOne(views), inputs=(x,), loss=lambda y: y.sum())


@pytest.mark.parametrize(
    "views",
    [lambda x: (x[0], x[1]), lambda x: (x[:, ::2], x[:, 1::2]), lambda x: (x, x.clone())],
    ids=["rows", "in turn", "copy"],
)
def test_parameters_side_by_side_in_one_memory(
    views: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> None:
    x = torch.ones(4, 1)
    assert capture(TwoInOne(views), inputs=(x,), loss=lambda y: y.sum()).chunks


@pytest.mark.parametrize(
    "metric",
    [
        lambda out, y: (out.argmax(-1) == y).float().mean(),
        lambda out, y: out.detach().exp().sum(),
        lambda out, y: (out > 0).sum(),
    ],
    ids=["accuracy", "perplexity", "positives"],
)
def test_a_metric_is_not_a_count(metric: Callable[[Tensor, Tensor], Tensor]) -> None:
    def loss(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(out, y, reduction="sum"), metric(out, y)

    with pytest.raises(CaptureError, match=r"second value depends on a trained parameter .weight"):
        capture(
            nn.Linear(4, 4), inputs=(torch.randn(2, 4),), targets=(torch.tensor([1, 2]),), loss=loss
        )


def test_a_count_may_depend_on_the_batch_and_on_fixed_weights() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4), requires_grad=False)

        def forward(self, out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            total = F.cross_entropy(out, y, weight=self.weight, reduction="sum")
            return total, self.weight[y].sum()

    example = (torch.randn(2, 4),)
    capture(nn.Linear(4, 4), inputs=example, targets=(torch.tensor([1, 2]),), loss=Weighted())
