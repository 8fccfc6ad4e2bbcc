"""Files from outside: what is no file of Piper's is refused by name, and nothing in one is run."""

from __future__ import annotations

import hashlib
import json
import resource
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import piper
from piper import PiperError
from piper.capture.operators import check_arguments, operator_named
from piper.cli import main as cli
from tests.scripts.mutations import OTHER, tally
from tests.training import pipeline


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("layer"):
                x = x + torch.tanh(layer(x))
        return x


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.fixture(scope="module")
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def program(model: Net) -> piper.Program:
    x = torch.zeros(4, 4)
    return piper.compile(
        model,
        piper.Strategy(pipeline([[0], [1]], 2)),
        inputs=(x,),
        targets=(x,),
        loss=nn.functional.mse_loss,
        optimizer=sgd,
    )


@pytest.fixture
def folder(program: piper.Program, tmp_path: Path) -> Path:
    program.save(tmp_path / "program")
    return tmp_path / "program"


@contextmanager
def edited(folder: Path, name: str) -> Iterator[Any]:
    """The data of a file, to be changed by someone who knows of the checksums."""
    data = json.loads((folder / name).read_text())
    yield data
    content = json.dumps(data).encode()
    (folder / name).write_bytes(content)
    sums = json.loads((folder / "checksums.json").read_text())
    sums["sha256"][name] = hashlib.sha256(content).hexdigest()
    (folder / "checksums.json").write_text(json.dumps(sums))


def first_call(graphs: Any) -> list[Any]:
    """The first operation of the first forward that takes an argument by its place."""
    graph = graphs[0]["functions"]["F"]["graph"]
    return next(node for node in graph if node[0] == "call_function" and node[3]["tuple"])


HARM = "__import__('pathlib').Path('harm').touch()"


def in_placeholder(graphs: Any) -> None:
    graphs[0]["functions"]["F"]["graph"][0][2] = f"primals_1={HARM}"


def in_default(graphs: Any) -> None:
    graphs[0]["functions"]["F"]["graph"][0][3] = {"tuple": [HARM]}


def in_name(graphs: Any) -> None:
    graphs[0]["functions"]["F"]["graph"][0][1] = f"a={HARM}"


def in_keyword(graphs: Any) -> None:
    first_call(graphs)[4] = {"dict": {f"alpha=1 if {HARM} else 1, beta": 1}}


def calling(name: str, *arguments: Any) -> Callable[[Any], None]:
    def change(graphs: Any) -> None:
        node = first_call(graphs)
        node[2], node[3], node[4] = name, {"tuple": list(arguments)}, {"dict": {}}

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (in_placeholder, "is not a name of letters"),
        (in_default, "has no default"),
        (in_name, "is not a name of letters"),
        (in_keyword, "is not a name of letters"),
        (calling("load_library", "harm.so"), "is not the name of an operator"),
        (calling("import_module", "harm"), "is not the name of an operator"),
        (calling("ops.load_library.default", "harm.so"), "is unknown here"),
        (calling("aten.__class__.mro"), "is unknown here"),
        (calling("aten.save.default", "x", "harm"), "is unknown here"),
        (calling("aten.from_file.default", "harm", True, 1), "must not call the operation"),
        (calling("profiler._record_function_enter.default", "x"), "must not call the operation"),
        (calling("c10d.barrier.default"), "must not call the operation"),
        (calling("aten.add_.Tensor", {"node": 0}, {"node": 0}), "must not call the operation"),
        (calling("aten.mm.default", {"node": 0}), "lacks the argument mat2"),
        (calling("aten.mm.default", {"node": 0}, "x"), "the argument mat2 of aten.mm.default is"),
        (calling("aten.t.default", {"node": 99}), "is not the number of a node before"),
        (calling("aten.t.default", {"torch": "load"}), "is not a dtype"),
        (calling("aten.t.default", {"device": "harm"}), "is not a kind of device"),
    ],
)
def test_a_graph_can_only_call_operators_on_tensors(
    folder: Path, change: Callable[[Any], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands in the file is refused when it is read, by name and place."""
    monkeypatch.chdir(folder.parent)
    with edited(folder, "graphs.json") as graphs:
        change(graphs)
    with pytest.raises(PiperError, match=r"graphs\.json: .*functions\.F\.graph") as caught:
        piper.Program.load(folder)
    assert words in str(caught.value)
    assert not Path("harm").exists()


def test_a_missing_tensor_fits_an_operator() -> None:
    """The gradient of attention on GPUs is asked for without a bias, though its schema wants it."""
    operator = operator_named("aten._scaled_dot_product_efficient_attention_backward.default")
    graph = fx.Graph()
    x = graph.placeholder("x")
    check_arguments(operator, (x, x, x, x, None, x, x, x, x, 0.0, [True] * 4), {})


def test_the_command_line_runs_nothing_of_a_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.parent)
    with edited(folder, "graphs.json") as graphs:
        in_placeholder(graphs)
    monkeypatch.setattr(sys, "argv", ["piper", "check", str(folder)])
    with pytest.raises(SystemExit) as ended:
        cli()
    assert ended.value.code
    assert not Path("harm").exists()


@pytest.mark.parametrize(
    "tree",
    [
        ["default antigravity.x", [], []],
        ["collections.defaultdict", {"default_factory_module": "antigravity"}, []],
        ["namedtuple", ["antigravity"], []],
    ],
)
def test_the_structure_of_a_batch_imports_nothing(folder: Path, tree: Any) -> None:
    with edited(folder, "program.json") as data:
        data["example"]["tree"] = ["tuple", [["tuple", [None]], tree, ["tuple", [None]]]]
    with pytest.raises(PiperError, match=r"program.json: example.tree: "):
        piper.Program.load(folder)
    assert "antigravity" not in sys.modules


def test_batches_of_dicts_are_read_as_they_were(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, one: dict[str, Tensor], two: list[Any], flag: bool) -> Tensor:
            return self.layer(one["a"] + two[0]["b"] + two[1]["c"])

    x = torch.ones(4, 4)
    inputs = {
        "one": OrderedDict(a=x),
        "two": [{"b": x}, defaultdict(list, {"c": x}), (x,)],
        "flag": True,
    }
    made = piper.compile(
        Named(),
        piper.Strategy([piper.split(parts=2), piper.place({}, devices=[0])]),
        inputs=inputs,
        targets=(x,),
        loss=nn.functional.mse_loss,
    )  # fmt: skip
    made.save(tmp_path)
    loaded = piper.Program.load(tmp_path)
    assert loaded.example.spec == made.example.spec
    assert loaded.example.like(inputs, x).size == 4


# damage


def test_a_damaged_file_is_named(folder: Path) -> None:
    """Every file, wherever a byte of it is another."""
    for name in ("program.json", "graphs.json", "constants.pt"):
        content = (folder / name).read_bytes()
        for place in (0, len(content) // 2, len(content) - 1):
            other = bytearray(content)
            other[place] ^= 1
            (folder / name).write_bytes(other)
            with pytest.raises(PiperError, match=f"is damaged: {name} is not what was saved"):
                piper.Program.load(folder)
        (folder / name).write_bytes(content)
    piper.Program.load(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["plans"][0]["instructions"][0].__setitem__(8, [999]), "no slot 999"),
        (lambda d: d["plans"][0]["instructions"][0].__setitem__(0, "run"), "is not one of compute"),
        (lambda d: d["plans"][0].pop("given"), "plans[0]: it lacks given"),
        (lambda d: d["plans"][0].update(devices=[7]), "there is no device 0"),
        (lambda d: d["plans"][0]["ops"][0].__setitem__(1, 77), "there is no chunk 77"),
        (lambda d: d["plans"][0]["slot_bytes"].__setitem__(0, -1), "slot_bytes[0]: -1 is not"),
        (lambda d: d["plans"].pop(), "there is no device 1"),
        (lambda d: d["plans"][0]["instructions"].pop(), "never free slots"),
        (lambda d: d.update(microbatches=0), "microbatches: 0 is out of range"),
        (lambda d: d.update(microbatches=4), "example: its tensor 0 is not what the code takes"),
        (lambda d: d.update(seed="x"), "seed: 'x' is not a whole number"),
        (lambda d: d.update(precision="fp4"), "precision: 'fp4' is unknown"),
        (lambda d: d.update(clip_norm=-1), "clip_norm=-1 must be a positive number"),
        (lambda d: d.update(compiler="gcc"), "compiler: compiler='gcc' is unknown"),
        (lambda d: d.update(device="disk"), "device: 'disk' is not a kind of device"),
        (lambda d: d.update(more=1), "it has 'more', which nobody reads"),
        (lambda d: d["buckets"][0].__setitem__(3, 3), "buckets[0].rule: 3 is not a list"),
        (lambda d: d["code"]["programs"][0][1].append(0), "3 pieces, but 4 programs"),
        (lambda d: d["code"].update(loss=0), "its loss is not the loss of the model"),
        (lambda d: d["strategy"][0].update(op="exec"), "has no 'op' that is known"),
    ],
)
def test_what_a_program_says_must_fit(
    folder: Path, change: Callable[[Any], Any], words: str
) -> None:
    with edited(folder, "program.json") as data:
        change(data)
    with pytest.raises(PiperError, match=r"cannot be used: program\.json: ") as caught:
        piper.Program.load(folder)
    assert words in str(caught.value)


def test_a_program_of_an_earlier_format_is_told_so(folder: Path) -> None:
    (folder / "checksums.json").unlink()
    with pytest.raises(PiperError, match="a program of an earlier Piper"):
        piper.Program.load(folder)


# saving


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
def test_a_full_disk_leaves_the_earlier_program(program: piper.Program, folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    size = min(len(before["program.json"]), len(before["graphs.json"]))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))
    try:
        with pytest.raises(PiperError, match=r"cannot be saved to .* is untouched"):
            program.save(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert piper.Program.load(folder).plans == program.plans


# everything at random


def test_mutations_of_every_kind_of_file() -> None:
    """Refused, or what is read can be used; ``PiperError`` is the only error."""
    found = tally(300, seed=1)
    assert sum(found.values()) == 300
    assert not found["program, damaged", OTHER]
    assert not found["checkpoint, damaged", OTHER]


@pytest.mark.slow
def test_many_mutations_of_every_kind_of_file() -> None:
    """``-s`` prints how they ended."""
    found = tally(20_000, seed=2)
    for (kind, outcome), count in sorted(found.items()):
        print(f"{kind:>20} {outcome:>10} {count:>6}")
    assert sum(found.values()) == 20_000


def test_a_damaged_checkpoint_is_refused(program: piper.Program, tmp_path: Path) -> None:
    """Torch itself reads whatever the numbers have become."""
    path = tmp_path / "state"
    x = torch.ones(4, 4)
    with piper.launch(program) as trainer:
        trainer.step(x, x)
        trainer.save(path)
        weight = trainer.state_dict()["layers.0.weight"].numpy().tobytes()
        content = bytearray(path.read_bytes())
        content[content.index(weight) + 3] ^= 1
        path.write_bytes(content)
        with pytest.raises(PiperError, match=r"is damaged: the checksum of .* differs"):
            trainer.load(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(steps="2"), "steps: '2' is not a whole number from 0 on"),
        (lambda c: c.update(groups=[{"params": []}]), "groups[0]: settings have no params"),
        (lambda c: c.update(numbers=[(1, 2)]), "numbers[0]: (1, 2) is not a parameter, a name"),
        (lambda c: c.update(optimizer={"a": {"b": torch.ones(1)}}), "there is no parameter 'b'"),
        (lambda c: c.update(tensors=torch.ones(1)), "tensors: tensor([1.]) is not a table"),
        (lambda c: c.update(kind=3), "kind: 3 is not a string"),
    ],
)
def test_what_a_checkpoint_says_must_fit(
    program: piper.Program, tmp_path: Path, change: Callable[[Any], Any], words: str
) -> None:
    path = tmp_path / "state"
    with piper.launch(program) as trainer:
        trainer.save(path)
        content = torch.load(path)
        change(content)
        torch.save(content, path)
        with pytest.raises(PiperError, match="cannot be used: ") as caught:
            trainer.load(path)
    assert words in str(caught.value)
