"""Files from outside: those that are not Piper's are refused by name, and nothing is run."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import resource
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import piper
from piper import PiperError
from piper.base.reading import parsed
from piper.capture.operators.registry import check_arguments, operator_named
from piper.cli.app import main as cli
from piper.cost import cluster_toml as toml
from piper.cost.cluster import Cluster
from piper.cost.presets import LINKS
from piper.ir.plan.plan import Plan
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


class Rotated(nn.Module):
    """Multiplies by complex numbers; its backward conjugates them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * (1 + 0.1j) - 2j).abs()


def test_complex_numbers_in_a_model(tmp_path: Path) -> None:
    model, x = Rotated(), torch.randn(4, 4)
    made = piper.compile(
        model,
        piper.Strategy([piper.place({}, devices=[0])]),
        inputs=(x,),
        targets=(x,),
        loss=nn.functional.mse_loss,
        optimizer=sgd,
    )
    made.save(tmp_path / "program")
    source = piper.Source(model)
    loaded = piper.Program.load(tmp_path / "program", source=source, optimizer=sgd)
    expected = nn.functional.mse_loss(model(x), x)
    expected.backward()
    for program in (made, loaded):
        with piper.launch(program) as trainer:
            torch.testing.assert_close(trainer.step(x, x).loss, expected.detach())
            state = trainer.state_dict()
        for name, p in model.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(state[name], p.detach() - 0.1 * p.grad)


@contextmanager
def edited(folder: Path, name: str) -> Iterator[Any]:
    """The data of a file, to be changed; its checksum is updated."""
    data = json.loads((folder / name).read_text())
    yield data
    content = json.dumps(data).encode()
    (folder / name).write_bytes(content)
    sums = json.loads((folder / "checksums.json").read_text())
    sums["sha256"][name] = hashlib.sha256(content).hexdigest()
    (folder / "checksums.json").write_text(json.dumps(sums))


def first_call(graphs: Any) -> list[Any]:
    """The first operation of the first forward that takes a positional argument."""
    graph = graphs[0]["functions"]["F"]["graph"]
    return next(node for node in graph if node[0] == "call_function" and node[3])


HARM = "__import__('pathlib').Path('harm').touch()"


def in_placeholder(graphs: Any) -> None:
    graphs[0]["functions"]["F"]["graph"][0][2] = f"primals_1={HARM}"


def in_default(graphs: Any) -> None:
    graphs[0]["functions"]["F"]["graph"][0][3] = [HARM]


def in_name(graphs: Any) -> None:
    graphs[0]["functions"]["F"]["graph"][0][1] = f"a={HARM}"


def in_keyword(graphs: Any) -> None:
    first_call(graphs)[4] = {f"alpha=1 if {HARM} else 1, beta": 1}


def calling(name: str, *arguments: Any) -> Callable[[Any], None]:
    def change(graphs: Any) -> None:
        node = first_call(graphs)
        node[2], node[3], node[4] = name, list(arguments), {}

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
        (calling("aten.mm.default", {"node": 0}), "missing value for argument 'mat2'"),
        (calling("aten.mm.default", {"node": 0}, "x"), "type 'Tensor' for argument 'mat2'"),
        (calling("aten.t.default", {"node": 99}), "is not the number of a node before"),
        (calling("aten.t.default", {"torch": "load"}), "is not a dtype"),
        (calling("aten.t.default", {"device": "harm"}), "is not a kind of device"),
    ],
)
def test_a_graph_can_only_call_operators_on_tensors(
    folder: Path, change: Callable[[Any], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad content is refused when the file is read, with its name and place."""
    monkeypatch.chdir(folder.parent)
    with edited(folder, "graphs.json") as graphs:
        change(graphs)
    with pytest.raises(PiperError, match=r"graphs\.json: .*functions\.F\.graph") as caught:
        piper.Program.load(folder)
    assert words in str(caught.value)
    assert not Path("harm").exists()


def test_a_missing_tensor_fits_an_operator() -> None:
    """On GPUs the gradient of attention has no bias argument, although its schema requires one."""
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
    ("kind", "context"),
    [
        (
            "collections.defaultdict",
            {
                "default_factory_module": "antigravity",
                "default_factory_name": "x",
                "dict_context": [],
            },
        ),
        ("builtins.dict", '[{"__enum__": true, "fqn": "antigravity:X", "name": "x"}]'),
        ("collections.namedtuple", "antigravity"),
    ],
)
def test_the_structure_of_a_batch_imports_nothing(folder: Path, kind: str, context: Any) -> None:
    with edited(folder, "program.json") as data:
        _, tree = data["example"]["tree"]
        leaf = {"type": None, "context": None, "children_spec": []}
        children = [leaf] if kind == "builtins.dict" else []
        tree["children_spec"][1] = {"type": kind, "context": context, "children_spec": children}
    with pytest.raises(PiperError, match=r"program.json: example.tree\[1\]"):
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
    """Any changed byte in any file."""
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


def facts(data: Any) -> dict[str, Any]:
    """The model's facts for groups of one device."""
    return data["training"]["models"]["1"]


def backward(data: Any) -> dict[str, Any]:
    """The facts of the second layer's backward."""
    return facts(data)["chunks"][1]["variants"]["none"]["passes"]["B"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(plans=[]), "contains unknown field `plans`"),
        (lambda d: d["strategy"][1].update(parts=4), "its tensor 0 is not what the code takes"),
        (lambda d: d["strategy"][1].update(parts=10**9), "not divide into 1000000000 microbatches"),
        (lambda d: d["strategy"][2].update(devices=[0, 2]), "no code for groups of 2 devices"),
        (
            lambda d: d["strategy"].append({"op": "remat", "where": {}, "policy": "all"}),
            "its parts do not fit together",
        ),
        (lambda d: d["settings"].update(clip=True), "settings.clip: it does not say whether"),
        (lambda d: d["training"].update(models={}), "training.models: there is no model"),
        (lambda d: facts(d).update(loss=0), "training: models[1].loss: the code says otherwise"),
        (lambda d: facts(d).update(batch=8), "models[1].batch: the code says otherwise"),
        (lambda d: facts(d)["chunks"].pop(), "models: they differ in what is recomputed"),
        (lambda d: facts(d)["chunks"][0].update(index=1), "models[1].chunks: the code says"),
        (lambda d: facts(d)["chunks"][0]["parameters"].reverse(), "models[1].chunks: the code"),
        (
            lambda d: facts(d)["chunks"][0]["detached"].append("layers.0.bias"),
            "models[1].chunks: the code says otherwise",
        ),
        (lambda d: facts(d)["values"][0].update(nbytes=0), "models[1].values: the code says"),
        (lambda d: facts(d)["parameters"].popitem(), "models[1].parameters: the code says"),
        (
            lambda d: facts(d)["parameters"]["layers.0.bias"].update(trained=False),
            "models[1].parameters: the code says otherwise",
        ),
        (lambda d: backward(d)["writes"].pop(), "the pass B is not what the strategy recomputes"),
        (lambda d: backward(d)["reads"].pop(0), "the pass B is not what the strategy recomputes"),
        (lambda d: d["names"]["keys"].popitem(), "keys and shapes are of different tensors"),
        (lambda d: d.update(seed="x"), "seed: Expected `int`, got `str`"),
        (lambda d: d.update(seed=2**63), "seed: Expected `int` <= 9223372036854775807"),
        (lambda d: d.update(precision="fp4"), "precision: Invalid enum value 'fp4'"),
        (lambda d: d.update(clip_norm=-1), "clip_norm=-1.0 must be a positive number"),
        (lambda d: d.update(compiler="gcc"), "compiler='gcc' is unknown"),
        (lambda d: d.update(device="disk"), "'disk' is not a kind of device"),
        (lambda d: d.update(default_dtype="int32"), "default_dtype: torch.int32 cannot be it"),
        (lambda d: d.update(default_dtype="whole"), "default_dtype: 'whole' is not a dtype"),
        (lambda d: facts(d).pop("batch"), "training.models[...]: Object missing required field"),
        (lambda d: d["settings"].update(costs={"Own": {}}), "is not a CostModel"),
        (
            lambda d: d["training"]["code"]["programs"]["1"].append(0),
            "its parts do not fit together (ValueError: zip()",
        ),
        (lambda d: d["training"]["code"].update(loss=0), "models[1].loss: the code says"),
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


class Mixed(nn.Module):
    """Has dropout, a layer of two experts and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("scale", torch.ones(4))
        self.experts = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("layer"):
            x = nn.functional.dropout(
                self.layers[0](x) * self.scale.to(x.dtype), 0.5, self.training
            )
        with piper.annotate("layer"):
            rows = x.unflatten(0, (2, -1))
            with piper.annotate("EP"):
                rows = torch.bmm(rows, self.experts)
            return self.layers[1](rows.flatten(0, 1))


MIXED = {
    "experts, remat and ZeRO": (
        piper.split(parts=2),
        piper.place({}, devices=[0, 1]),
        piper.replicate({"EP": "-"}, zero=3),
        piper.shard({"EP": "*"}),
        piper.remat({"layer": 1}, "all"),
    ),
    "stages of several sizes": (
        *pipeline([[0, 1], [2]], 2),
        piper.stream(None, "side", priority=1),
    ),
}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", MIXED)
def test_plans_are_made_again_as_they_were(name: str, tmp_path: Path) -> None:
    x = torch.randn(16, 4)
    made = piper.compile(
        Mixed(),
        piper.Strategy(MIXED[name]),
        inputs=(x,),
        targets=(x,),
        loss=nn.functional.mse_loss,
        optimizer=sgd,
        clip_norm=1.0,
        precision="bf16",
    )
    made.save(tmp_path)
    loaded = piper.Program.load(tmp_path, source=made.source, optimizer=sgd)
    for part in ("memory", "buckets", "streams", "microbatches"):
        assert getattr(loaded, part) == getattr(made, part), part
    for found, step in zip(loaded.steps, made.steps, strict=True):
        assert (found.plans, found.facts) == (step.plans, step.facts)
    assert loaded.text() == made.text()
    assert numbers(loaded, x) == numbers(made, x)


def numbers(program: piper.Program, x: Tensor) -> list[float]:
    with piper.launch(program) as trainer:
        losses = [trainer.step(x, x).loss.item() for _ in range(2)]
        return [*losses, trainer.evaluate(x, x).loss.item()]


class Turned(nn.Module):
    """Transposed parameters, and gradients that passes must copy: an expanded one, and a slice of
    another gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3).t())
        self.shift = nn.Parameter(torch.randn(4, 3).t())
        self.rows = nn.Parameter(torch.randn(16, 3).t()[:2].t())

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("layer"):
            y = x[:, :3] @ self.weight + self.shift.sum(0)
        with piper.annotate("layer"):
            return torch.cat([y, self.rows[: len(x)]], 1)[:, 1:5]


@pytest.mark.parametrize("zero", [0, 3])
def test_parameters_and_gradients_of_any_strides(zero: int, tmp_path: Path) -> None:
    x = torch.randn(16, 4)
    made = piper.compile(
        Turned(),
        piper.Strategy([piper.place({}, devices=[0, 1]), piper.replicate({}, zero=zero)]),
        inputs=(x,),
        targets=(x,),
        loss=nn.functional.mse_loss,
        optimizer=sgd,
    )
    made.save(tmp_path)
    loaded = piper.Program.load(tmp_path, source=made.source, optimizer=sgd)
    assert numbers(loaded, x) == numbers(made, x)


class Counting(torch.optim.SGD):
    """Takes a smaller step at each call, whichever parameters it is called for."""

    calls = 0

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.calls
        return super().step(closure)


class Normed(Counting):
    """Clips by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        return super().step(closure)


def test_plans_are_for_the_optimizer_that_is_given(model: Net, folder: Path) -> None:
    """It may differ from the optimizer that the program was compiled with."""
    x = torch.randn(4, 4)
    buckets = piper.replicate({}, bucket_mb=1e-6)
    strategy = [piper.split(parts=2), piper.place({}, devices=[0, 1]), buckets]
    first, made = (
        piper.compile(
            model,
            piper.Strategy(strategy),
            inputs=(x,),
            targets=(x,),
            loss=nn.functional.mse_loss,
            optimizer=optimizer,
        )
        for optimizer in (sgd, Counting)
    )
    first.save(folder)
    loaded = piper.Program.load(folder, source=first.source, optimizer=Counting)
    assert loaded.plans == made.plans != first.plans
    assert numbers(loaded, x) == numbers(made, x)


def test_an_optimizer_for_which_a_program_cannot_be_used(folder: Path) -> None:
    with pytest.raises(PiperError, match="Normed looks at all parameters together"):
        piper.Program.load(folder, optimizer=Normed)


def test_plans_that_were_changed_are_not_saved(program: piper.Program, tmp_path: Path) -> None:
    plan = program.plans[0]
    changed = replace(plan, instructions=plan.instructions[:-1])
    with pytest.raises(PiperError, match="not the plans of its strategy"):
        program.with_plans((changed, *program.plans[1:])).save(tmp_path)


@pytest.mark.parametrize("head", ["piper program 7", "piper plan 1", 7, None])
def test_files_of_another_version_or_kind_are_told_so(folder: Path, head: Any) -> None:
    sums = json.loads((folder / "checksums.json").read_text())
    (folder / "checksums.json").write_text(json.dumps(sums | {"format": head}))
    words = r"this holds ('piper p|nothing that Piper).*, not 'piper program 15': write it again"
    with pytest.raises(PiperError, match=words):
        piper.Program.load(folder)


def test_a_plan_is_read_as_it_was_written(program: piper.Program) -> None:
    for plan in (plan for step in program.steps for plan in step.plans):
        assert Plan.parse(str(plan)) == plan


def test_a_program_of_an_earlier_format_is_told_so(folder: Path) -> None:
    (folder / "checksums.json").unlink()
    with pytest.raises(PiperError, match="a program of an earlier Piper"):
        piper.Program.load(folder)


# not a regular file, too large, or nested too deeply


def pipe(path: Path) -> Path:
    """A FIFO with a writer: a blocking reader gets an end of file instead of hanging forever."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    threading.Thread(target=path.open, args=("wb",), daemon=True).start()
    return path


READERS: dict[str, Callable[[Path], object]] = {
    "strategy.json": piper.Strategy.load,
    "cluster.toml": toml.read,
    "costs.json": piper.Recorded.load,
    "table.csv": piper.strategies.from_csv,
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    with pytest.raises(PiperError, match="cannot be read: it is not a file, but a pipe"):
        READERS[name](pipe(tmp_path / name))


@pytest.mark.parametrize("name", READERS)
def test_a_file_larger_than_any_is_not_read(name: str, tmp_path: Path) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(PiperError, match=r"it has 1099511627776 bytes, and at most 1\d* are read"):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize(
    "text", ["[" * 101 + "]" * 101, "[" * 10**6, '{"a":' * 300 + "1" + "}" * 300]
)
def test_json_that_is_nested_without_end(text: str) -> None:
    with pytest.raises(PiperError, match="nested too deeply"):
        parsed(text)


@pytest.mark.parametrize("digits", [40, 5000])
def test_numbers_of_many_digits(digits: int) -> None:
    number = "9" * digits
    for read, text in (
        (parsed, f"[{number}]"),
        (piper.Strategy.from_json, f'[{{"op": "split", "parts": {number}}}]'),
        (toml.parse, f"[[machines]]\ndevice = 'H100'\ncount = {number}"),
    ):
        with pytest.raises(PiperError, match="a number in it has too many digits"):
            read(text)
    with pytest.raises(PiperError, match="a number has at most 18 digits"):
        Plan.parse(f"plan of devices {number}")


def test_a_strategy_that_is_nested_without_end() -> None:
    deep: Any = 0
    for _ in range(2000):
        deep = [deep]
    for data in (deep, [{"op": "place", "filter": {"PP": deep}, "devices": [0]}]):
        with pytest.raises(PiperError, match="the strategy cannot be read: this is nested"):
            piper.Strategy.from_json(data)
    with pytest.raises(PiperError, match="nested too deeply"):
        toml.parse("name = " + "[" * 2000)


def test_what_is_no_path_is_refused(program: piper.Program) -> None:
    with piper.launch(program) as trainer:
        for act in (
            trainer.save, trainer.load, trainer.export, program.save, piper.Program.load,
            piper.Strategy.load, toml.read, piper.Recorded.load, piper.weights,
        ):  # fmt: skip
            for path in (None, 5, "a\0b"):
                with pytest.raises(PiperError, match=f"{re.escape(repr(path))} is not a path"):
                    act(path)  # type: ignore[operator]
            with pytest.raises(PiperError, match="has 5,000 characters, more than the file system"):
                act("n" * 5000)  # type: ignore[operator]
        with pytest.raises(PiperError, match="there is no checkpoint"):
            trainer.load("n" * 250)


def test_pages_that_cannot_be_written_are_refused(program: piper.Program, tmp_path: Path) -> None:
    simulation = program.simulate(piper.Cluster.of("H100", len(program.devices)))
    for write in (program.show_dag, simulation.show, simulation.trace):
        with pytest.raises(PiperError, match="cannot be written: Is a directory"):
            write(tmp_path)
        write(tmp_path / "new" / "page")
        assert (tmp_path / "new" / "page").stat().st_size > 1000


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


def test_a_program_that_is_saved_again_replaces_its_own_files_alone(
    program: piper.Program, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "folder"
    for _ in range(3):
        program.save(folder)
        (folder / "notes.json").write_text("mine")
        assert piper.Program.load(folder).plans == program.plans
        assert len(list(folder.iterdir())) == 5
    assert (folder / "notes.json").read_text() == "mine"


# random mutations


def test_mutations_of_every_kind_of_file() -> None:
    """Each file is refused, or its content can be used; ``PiperError`` is the only error."""
    ends, bad = tally(20, seed=1)
    assert not bad, bad[0]
    assert not ends["program, damaged"][OTHER]
    assert not ends["checkpoint, damaged"][OTHER]


def scrambled(text: str, rng: random.Random) -> str:
    """``text`` with parts removed, inserted, repeated or replaced, up to four times."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        start = rng.randrange(len(text) + 1)
        end = start + rng.choice((0, 1, 1, 2, 5, 40))
        other = rng.randrange(len(text) + 1)
        numbers = [found.span() for found in re.finditer(r"\d+", text)]
        lines = text.split("\n")
        place = rng.randrange(len(lines))
        match rng.randrange(6):
            case 0:
                text = text[:start] + text[end:]
            case 1:
                text = text[:start] + rng.choice(PIECES) + text[end:]
            case 2:
                text = text[:start] + text[other : other + rng.choice((1, 5, 30))] + text[end:]
            case 3 if numbers:
                first, last = rng.choice(numbers)
                text = text[:first] + rng.choice(NUMBERS) + text[last:]
            case 4:
                lines[place : place + rng.randrange(2)] = [rng.choice(lines)] * rng.randrange(2)
                text = "\n".join(lines)
            case _:
                text = text[:start]
    return text


NUMBERS = ("0", "7", "-3", "1.5", "1e999", "999999", "0-99999999999", "9" * 18, "9" * 5000)
PIECES = (*NUMBERS, *',|s+!: #[]{}"\\\n\0é', "->", "nan", "[[[[" * 300, "0-1000000,0-1000000")
TEXTS: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "plan": (Plan.parse, str),
    "strategy": (piper.Strategy.from_json, lambda strategy: strategy.to_json()),
    "cluster": (toml.parse, toml.write),
}
"""The reader and the writer of each."""


@pytest.mark.parametrize("kind", TEXTS)
def test_mutations_of_texts(kind: str, program: piper.Program) -> None:
    """Accepted content can be written and read again; ``PiperError`` is the only error."""
    read, write = TEXTS[kind]
    cluster = replace(Cluster.of("H100", 2, machines=2), between={(0, 1): LINKS["PCIe4"]})
    made = {"strategy": program.strategy, "cluster": cluster}
    written = write(made.get(kind, program.plans[0]))
    text = written if isinstance(written, str) else json.dumps(written)
    refused = 0
    for number in range(150):
        mutation = scrambled(text, random.Random(number))
        try:
            thing = read(mutation)
            assert read(write(thing)) == thing, mutation
        except PiperError:
            refused += 1
        except Exception as error:
            error.add_note(f"{kind}, mutation {number}")
            raise
    assert 0 < refused < 150


@pytest.mark.slow
def test_many_mutations_of_every_kind_of_file(request: pytest.FixtureRequest) -> None:
    """As many of each as ``--examples`` says; ``-s`` prints the outcomes."""
    ends, bad = tally(request.config.getoption("--examples"), seed=2)
    for kind, outcomes in ends.items():
        print(f"{kind:>20}", *(f"{outcome} {n}" for outcome, n in sorted(outcomes.items())))
    assert not bad, "\n".join(bad)
