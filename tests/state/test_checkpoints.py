"""Checkpoints: every device writes its part of a folder, and reads its slices from one."""

from __future__ import annotations

import enum
import functools
import itertools
import json
import math
import os
import random
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

import piper
from piper import Mesh, PiperError, annotate, place, replicate, shard, split
from piper.base.errors import PiperWarning
from piper.state.checkpoint import tensor_files as files
from piper.state.checkpoint.boxes import Box, boxes_of_range, tile
from piper.state.checkpoint.index import Index
from piper.state.checkpoint.plain_values import from_json, to_json
from piper.state.checkpoint.slices import all_slices
from piper.state.device import checkpoint_parts as parts
from piper.strategies.directives import Directive
from tests.scripts.mutations import sealed
from tests.training import (
    Batch,
    adamw,
    compiled,
    data_parallel,
    one_f_one_b,
    pipeline,
    shared_captures,
    zero_bubble,
)

WIDTH, ROWS, STEPS = 8, 64, 5


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


class Net(nn.Module):
    """A tensor of each kind: fused, with permuted strides, of experts, tied, a scalar, frozen,
    unused, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(4))
        self.turned = nn.Parameter(torch.randn(WIDTH, 3, 5).permute(2, 0, 1))
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.3)
        self.tied = self.down[0].bias
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("table", torch.randn(WIDTH))
        self.unused = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            with annotate("layer"):
                gate, value = up(x).chunk(2, -1)
                x = x + down(F.silu(gate) * value)
                if i == 1:
                    rows = x.unflatten(0, (-1, 4)).transpose(0, 1)
                    with annotate("EP"):
                        rows = torch.tanh(torch.bmm(rows, self.experts))
                    x = x + rows.transpose(0, 1).flatten(0, 1)
                if i == 2:
                    x = x * self.table + self.shift + self.turned.sum((0, 2)) + self.tied
                if i == 3:
                    x = x * self.gain
        return x


class Small(nn.Module):
    """For tests that do not depend on the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with annotate("layer"):
                x = F.dropout(torch.tanh(layer(x)), 0.2, self.training)
        return x


@functools.cache
def net(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


@functools.cache
def batches() -> tuple[Batch, ...]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, STEPS, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return tuple(((a,), (b,)) for a, b in zip(x, y, strict=True))


def given(step: int) -> tuple[Tensor, Tensor]:
    (x,), (y,) = batches()[step]
    return x, y


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


COLUMNS = {"up.*": "column", "down.*": "row"}


def in_stages(devices: list[list[int]], *more: Directive) -> list[Directive]:
    stages = len(devices)
    return [*pipeline(devices, 2, *one_f_one_b(stages, 2), by=[4 // stages] * stages), *more]


STRATEGIES: dict[str, list[Directive]] = {
    "one": data_parallel(1, 2),
    "dp4": [
        split({}, into="MB", parts=2),
        place({}, devices=[0, 1, 2, 3]),
        replicate({}, bucket_mb=1e-3),
    ],
    "zero1": [place({}, devices=[0, 1]), split({}, into="MB", parts=2), replicate({}, zero=1)],
    "zero2": [place({}, devices=[0, 1, 2, 3]), replicate({}, zero=2, bucket_mb=1e-3)],
    "zero3": [place({}, devices=[0, 1, 2, 3]), replicate({}, zero=3)],
    "zero3-hsdp": [place({}, devices=[0, 1, 2, 3]), replicate({}, zero=3, within=2)],
    "pp2": in_stages([[0], [1]]),
    "pp4-zb": [*pipeline([[0], [1], [2], [3]], 4, *zero_bubble(4, 4), by=[1, 1, 1, 1])],
    "pp2-zero1": in_stages([[0, 1], [2, 3]], replicate({}, zero=1)),
    "pp2-zero3": in_stages([[0, 1], [2, 3]], replicate({}, zero=3, bucket_mb=1e-3)),
    "ep2": [place({}, devices=[0, 1]), shard({"EP": "*"}), replicate({"EP": "-"}, zero=1)],
    "ep4-zero3": [
        place({}, devices=[0, 1, 2, 3]),
        shard({"EP": "*"}),
        replicate({"EP": "-"}, zero=3),
    ],
    "tp2": [
        place({}, devices=Mesh([0, 1], tp=2), batch=()),
        shard({"layer": 0}, axis="tp", parameters=COLUMNS),
    ],
    "dp2-tp2-zero1": [
        place({}, devices=Mesh(range(4), dp=2, tp=2), batch="dp"),
        shard({"layer": [0, 3]}, axis="tp", parameters=COLUMNS),
        replicate({}, zero=1),
    ],
}
"""Pipelines, data, tensor and expert parallelism, and ZeRO."""


@functools.cache
def made(name: str, kind: type[nn.Module] = Net, **options: Any) -> piper.Program:
    options = {"optimizer": adamw, "scheduler": halving, **options}
    return compiled(net(kind), STRATEGIES[name], F.mse_loss, batches(), **options)


def contents(trainer: piper.Trainer, path: Path) -> dict[str, Tensor]:
    """All tensors of the training state, with the optimizer's, assembled from a new checkpoint."""
    trainer.save(path)
    index = Index.from_bytes((path / "index.json").read_bytes())
    found = {}
    for table, tensors in index.tables.items():
        for name, slices in tensors.items():
            whole = torch.zeros(slices[0].shape, dtype=slices[0].dtype)
            seen = torch.zeros(slices[0].shape, dtype=torch.int8)
            for one in slices:
                with safe_open(path / one.location.file, framework="pt") as file:
                    one.box.of(whole).copy_(file.get_tensor(one.location.key))
                one.box.of(seen).add_(1)
            assert bool((seen == 1).all()), f"{name} is not there once"
            found[f"{table} {name}"] = whole
    return found


# any strategy to any other


def assert_goes_on(before: str, after: str, tmp_path: Path, **options: Any) -> None:
    """Run two steps under one strategy and the rest under another, and compare with all steps under
    the first: equal bit for bit if the strategies are the same, else up to reduction order."""
    with piper.launch(made(before, **options)) as trainer:
        for step in range(2):
            trainer.step(*given(step))
        saved = contents(trainer, tmp_path / "saved")
        expected = [trainer.step(*given(step)).loss for step in range(2, STEPS)]
        last = contents(trainer, tmp_path / "last")
    with piper.launch(made(after, **options)) as trainer:
        trainer.load(tmp_path / "saved")
        assert trainer.steps == 2
        again = contents(trainer, tmp_path / "again")
        assert again.keys() == saved.keys()
        assert all(torch.equal(x, again[name]) for name, x in saved.items())
        losses = [trainer.step(*given(step)).loss for step in range(2, STEPS)]
        found = contents(trainer, tmp_path / "found")
    exact = before == after
    close = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), **close)
    for name, x in last.items():
        torch.testing.assert_close(found[name], x, msg=lambda text, n=name: f"{n}: {text}", **close)


PAIRS = list(itertools.product(STRATEGIES, STRATEGIES))
random.Random(0).shuffle(PAIRS)
ALWAYS = PAIRS[:12]


@pytest.mark.cases(fast=0, slow=7)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(*pair, id="-to-".join(pair), marks=() if i < 4 else pytest.mark.slow)
        for i, pair in enumerate(PAIRS[:72])
    ],
)
def test_going_on_under_another_strategy(before: str, after: str, tmp_path: Path) -> None:
    assert_goes_on(before, after, tmp_path)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", ["zero3-hsdp", "pp2-zero1"])
def test_going_on_under_the_same_strategy_is_bit_for_bit(name: str, tmp_path: Path) -> None:
    assert_goes_on(name, name, tmp_path)


@pytest.mark.slow
def test_tensors_larger_than_the_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, parts of rows, and tensors that are not stored row by row."""
    monkeypatch.setattr(files, "BLOCK", 96)
    assert_goes_on("dp2-tp2-zero1", "zero3", tmp_path)


@pytest.mark.slow
def test_processes_write_and_read_for_themselves(tmp_path: Path) -> None:
    program = made("pp2-zero1", kind=Small)
    with piper.launch(program) as virtual:
        virtual.step(*given(0))
        virtual.save(tmp_path / "a")
        loss = virtual.step(*given(1)).loss
        after = contents(virtual, tmp_path / "after")
    with piper.launch(program, on="processes", timeout=120) as trainer:
        trainer.load(tmp_path / "a")
        assert torch.equal(trainer.step(*given(1)).loss, loss)
        found = contents(trainer, tmp_path / "b")
        assert all(torch.equal(x, after[name]) for name, x in found.items())
        flip(tmp_path / "b", "device-00002.safetensors", -9)
        with pytest.raises(PiperError, match=r"device-00002\.safetensors: .* checksum"):
            trainer.load(tmp_path / "b")
        trainer.step(*given(2))  # the workers still run, with their old state


# the content of a folder


def test_files_are_safetensors_and_the_index_is_json(tmp_path: Path) -> None:
    with piper.launch(made("pp2-zero3")) as trainer:
        trainer.step(*given(0))
        trainer.save(tmp_path / "state")
        state = trainer.state_dict()
        found = contents(trainer, tmp_path / "again")
    index = json.loads((tmp_path / "state" / "index.json").read_text())
    assert index["format"] == "piper checkpoint 2"
    assert index["steps"] == 1
    assert index["keys"]["down.0.bias"] == "tied"
    assert "replicate({}, zero=3" in index["strategy"]
    names = {path.name for path in (tmp_path / "state").iterdir()}
    assert names == {
        "index.json",
        "rest.safetensors",
        *(f"device-0000{i}.safetensors" for i in range(4)),
    }
    for key, tensor in state.items():
        assert torch.equal(found[f"model {index['keys'][key]}"], tensor)
    for name, entry in index["model"].items():
        for start, shape, file, key, offset, _ in entry["slices"]:
            with safe_open(tmp_path / "state" / file, framework="pt") as content:
                tensor = content.get_tensor(key)
            raw = (tmp_path / "state" / file).read_bytes()[offset : offset + tensor.nbytes]
            assert raw == tensor.numpy().tobytes(), name
            assert list(tensor.shape) == shape
            assert len(start) == len(shape)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", ["dp4", "zero1", "zero3-hsdp"])
def test_copies_write_a_share_each(name: str, tmp_path: Path) -> None:
    """Nothing is written twice, and all devices write about the same amount."""
    with piper.launch(made(name)) as trainer:
        trainer.step(*given(0))
        trainer.save(tmp_path / "state")
    index = Index.from_bytes((tmp_path / "state" / "index.json").read_bytes())
    sizes = [facts.bytes - facts.header for name, facts in index.files.items() if "device" in name]
    assert len(sizes) == (2 if name == "zero1" else 4)
    assert max(sizes) < 1.25 * min(sizes)


def test_a_range_is_a_few_boxes() -> None:
    for shape in ((), (1,), (7,), (3, 4), (2, 3, 4), (2, 1, 3, 2)):
        numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
        for low in range(numbers.numel() + 1):
            for high in range(low, numbers.numel() + 1):
                boxes = list(boxes_of_range(shape, low, high))
                found = [n for box in boxes for n in box.of(numbers).flatten().tolist()]
                assert found == list(range(low, high))
                assert len(boxes) <= max(1, 2 * len(shape) - 1)


# damage


def flip(folder: Path, name: str, place: int, bit: int = 0) -> None:
    content = bytearray((folder / name).read_bytes())
    content[place] ^= 1 << bit
    (folder / name).write_bytes(content)


def test_boxes_that_are_all_of_a_tensor() -> None:
    """``tile`` accepts exactly the boxes that cover each element once."""
    choose = random.Random(0)
    seen = set()
    for _ in range(2000):
        shape = [choose.randint(0, 3) for _ in range(choose.randint(0, 3))]
        cuts = sorted(choose.randint(0, math.prod(shape)) for _ in range(choose.randint(0, 2)))
        ends = itertools.pairwise([0, *cuts, math.prod(shape)])
        boxes = [box for low, high in ends for box in boxes_of_range(shape, low, high)]
        if choose.random() < 0.7 and boxes:
            other = choose.choice(boxes)
            boxes.remove(choose.choice(boxes))
            if choose.random() < 0.7:
                boxes.append(other)
        counted = torch.zeros(shape)
        for box in boxes:
            box.of(counted).add_(1)
        expected = bool((counted == 1).all())
        assert tile(boxes, shape) == expected
        seen.add(expected)
    assert len(seen) == 2


def test_boxes_of_many_dimensions() -> None:
    """Each box has 2**48 corners."""
    first, second, third = (Box((0,) * 47 + (low,), (1,) * 47 + (1,)) for low in range(3))
    assert tile([first, second, third], (1,) * 47 + (3,))
    assert not tile([first, second, second], (1,) * 47 + (3,))


@pytest.fixture(scope="module")
def trainer() -> Iterator[piper.Trainer]:
    with piper.launch(made("pp2-zero1")) as found:
        found.step(*given(0))
        yield found


def test_any_flipped_bit_is_found_and_named(tmp_path: Path, trainer: piper.Trainer) -> None:
    folder = tmp_path / "state"
    before = contents(trainer, folder)
    index = Index.from_bytes((folder / "index.json").read_bytes())
    rng = random.Random(0)
    for path in sorted(folder.iterdir()):
        size = path.stat().st_size
        for at in {0, 9, size - 1, *(rng.randrange(size) for _ in range(12))}:
            bit = rng.randrange(8)
            flip(folder, path.name, at, bit)
            with pytest.raises(PiperError) as caught:
                trainer.load(folder)
            flip(folder, path.name, at, bit)
            assert path.name in str(caught.value)
            for one in all_slices(index.tables):
                if one.location.file == path.name and 0 <= at - one.location.offset < one.nbytes:
                    assert f"{one.table} {one.name}[" in str(caught.value)
    after = contents(trainer, tmp_path / "after")
    assert all(torch.equal(x, before[name]) for name, x in after.items())
    trainer.load(folder)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_truncated_file_is_found_and_named(
    tmp_path: Path, trainer: piper.Trainer, share: float
) -> None:
    for name in ("index.json", "device-00001.safetensors", "rest.safetensors"):
        trainer.save(tmp_path / name)
        path = tmp_path / name / name
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])
        with pytest.raises(PiperError, match=re.escape(name)):
            trainer.load(tmp_path / name)


def changed(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Change the index, and give it a correct checksum."""

    def harm(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        change(index)
        (folder / "index.json").write_bytes(sealed(index))

    return harm


def as_file(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    torch.save({"format": "piper training state 1"}, folder)


def renamed(index: Any) -> None:
    index["model"] = {f"other.{name}": x for name, x in index["model"].items()}
    index["keys"] = {f"other.{key}": f"other.{name}" for key, name in index["keys"].items()}


def overlapping(index: Any) -> None:
    """One slice twice, in place of another of the same size."""
    entry = next(x for x in index["model"].values() if len(x["slices"]) > 1)
    slices = sorted(entry["slices"], key=lambda one: math.prod(one[1]))
    slices[0][:2] = slices[1][:2] = slices[0][:2]


def at_the_same_place(index: Any) -> None:
    """Two tensors in the same bytes of a file."""
    by_file: dict[tuple[str, int], Any] = {}
    for entry in index["model"].values():
        for one in entry["slices"]:
            other = by_file.setdefault((one[2], math.prod(one[1])), one)
            if other is not one:
                one[4] = other[4]
                return


def misnamed(index: Any) -> None:
    averages = index["optimizer"]["exp_avg"]
    averages["b"] = averages.pop("gain")


def linked(folder: Path) -> None:
    (folder / "rest.safetensors").rename(folder / "moved")
    (folder / "rest.safetensors").symlink_to("moved")


def piped(name: str) -> Callable[[Path], None]:
    """Replace a file by a pipe. A thread opens the write end, so that a reader does not block."""

    def harm(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)
        threading.Thread(target=(folder / name).open, args=("wb",), daemon=True).start()

    return harm


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda p: p.rename(p.parent / "moved"), "there is no checkpoint at"),
        (changed(overlapping), "they overlap or leave something out"),
        (changed(at_the_same_place), "are said to lie in the same bytes"),
        (linked, "rest.safetensors: it is a link, or no file at all"),
        (piped("rest.safetensors"), "rest.safetensors: it is a link, or no file at all"),
        (piped("index.json"), "index.json: it is not a file, but a pipe"),
        (changed(lambda c: c.update(values=[])), "optimizer: it lacks step of "),
        (changed(lambda c: c["optimizer"].pop("exp_avg")), "optimizer: it lacks exp_avg of "),
        (changed(lambda c: c["model"]["gain"].update(shape=[1] * 65)), "the shape of a tensor"),
        (as_file, "is a file: a checkpoint is a folder"),
        (lambda p: (p / "index.json").unlink(), "is no checkpoint: it has no index.json"),
        (lambda p: (p / "index.json").write_text("no"), "index.json: this is not JSON"),
        (lambda p: (p / "index.json").write_text("[1]"), "nothing that Piper wrote"),
        (lambda p: (p / "rest.safetensors").unlink(), "rest.safetensors: it is not there"),
        (changed(lambda c: c.update(format="piper checkpoint 9")), "this holds 'piper ch"),
        (changed(lambda c: c.pop("optimizer")), "missing required field `optimizer`"),
        (changed(renamed), "24 tensors are missing: turned (nearest: other.turned)"),
        (changed(lambda c: c["model"].pop("gain")), "keys.gain: there is no tensor 'gain'"),
        (
            changed(lambda c: c["model"]["gain"].update(shape=[4])),
            "model.gain: slices[0] is not of a tensor of shape [4]",
        ),
        (changed(lambda c: c.update(steps="2")), "steps: Expected `int`, got `str`"),
        (changed(lambda c: c.update(groups=[[[], {"params": []}, {}]])), "settings have no params"),
        (
            changed(lambda c: c.update(values=[[1, 2]])),
            "values[0]: Expected `array` of at least length 5",
        ),
        (changed(misnamed), "there is no parameter 'b'"),
        (changed(lambda c: c.update(kind=3)), "kind: Expected `str`, got `int`"),
        (changed(lambda c: c.update(kind="SGD")), "was saved with the optimizer SGD"),
        (changed(lambda c: c["scheduler"].pop("gamma")), "scheduler: it is not this program's"),
        (
            changed(lambda c: c["files"].update({"../x.safetensors": [0, 0, 0]})),
            "is not the name of a file",
        ),
        (
            changed(lambda c: c["values"][0].__setitem__(4, {"!os": 1})),
            "{'!os': 1} is not a plain value",
        ),
    ],
)  # fmt: skip
def test_checkpoints_that_are_refused(
    tmp_path: Path, trainer: piper.Trainer, harm: Callable[[Path], Any], words: str
) -> None:
    """The trainer keeps its state."""
    before = contents(trainer, tmp_path / "state")
    steps = trainer.steps
    harm(tmp_path / "state")
    with pytest.raises(PiperError) as caught:
        trainer.load(tmp_path / "state")
    assert words in str(caught.value)
    assert trainer.steps == steps
    after = contents(trainer, tmp_path / "after")
    assert all(torch.equal(x, before[name]) for name, x in after.items())


def test_an_optimizer_that_begins_anew_is_told(tmp_path: Path, trainer: piper.Trainer) -> None:
    trainer.save(tmp_path / "state")
    changed(lambda c: c.update(values=[], optimizer={}))(tmp_path / "state")
    with pytest.warns(PiperWarning, match="nothing of what AdamW keeps: the optimizer begins anew"):
        trainer.load(tmp_path / "state")
    trainer.step(*given(0))


def test_a_checkpoint_of_another_model_says_how_they_differ(
    tmp_path: Path, trainer: piper.Trainer
) -> None:
    trainer.save(tmp_path / "run" / "step-1")
    trainer.export(tmp_path / "weights")
    x = torch.zeros(4, 3)
    other = nn.ParameterDict({"gain": torch.zeros(2), "turn": torch.zeros(3)})
    captured = piper.capture(Scale(other), inputs=(x,), targets=(x,), loss=F.mse_loss)
    program = captured.compile(piper.Strategy([place({}, devices=[0])]))
    with piper.launch(program) as second:
        for path, words in (
            ("run/step-1", r"step-1 is not this model's. 2 of the model's 2 tensors are missing: "),
            ("run/step-1", r"own.gain \(nearest: gain\), own.turn\. 24 tensors are not in the mod"),
            ("weights", r"has the weights of a model, .* init=piper.weights\('.*weights'\)"),
            ("run", r"run is no checkpoint: .*, but checkpoints in it: load one of step-1$"),
        ):
            with pytest.raises(PiperError, match=words):
                second.load(tmp_path / path)


class Scale(nn.Module):
    def __init__(self, own: nn.ParameterDict) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        return x * self.own["turn"] + self.own["gain"].sum()


# the folder


def test_a_save_replaces_the_former_one(tmp_path: Path, trainer: piper.Trainer) -> None:
    """It replaces nothing else."""
    folder = tmp_path / "state"
    trainer.save(folder)
    parts = {path.name for path in folder.iterdir()}
    (folder / "note").touch()
    trainer.save(folder)
    assert (folder / "note").exists()
    assert len(list(folder.iterdir())) == len(parts) + 1
    trainer.load(folder)
    trainer.save(folder)
    assert {path.name for path in folder.iterdir()} == {*parts, "note"}
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_save_makes_the_folder_and_those_above_it(tmp_path: Path, trainer: piper.Trainer) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis").touch()
    for path in (tmp_path / "some" / "where" / "state", tmp_path / "other"):
        trainer.save(path)
        trainer.load(path)
    assert (tmp_path / "other" / "thesis").exists()


def test_paths_that_cannot_be_saved_to(tmp_path: Path, trainer: piper.Trainer) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.json").write_text("{}")
    for path, words in (
        ("file", "there is a file"),
        ("file/state", "File exists|Not a directory"),
        ("site", "there is a file index.json that Piper did not write"),
    ):
        with pytest.raises(PiperError, match=f"cannot be saved to .*({words})"):
            trainer.save(tmp_path / path)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "index.json", "site"]


def test_jobs_that_save_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job saves run2 while the other still writes run1."""
    writing, usual = threading.Event(), parts.write_file

    def held_up(path: Path, tensors: Any) -> Any:
        writing.wait()
        return usual(path, tensors)

    program = made("zero1", kind=Small)
    with piper.launch(program) as one, piper.launch(program) as other:
        with monkeypatch.context() as patched:
            patched.setattr(parts, "write_file", held_up)
            one.save(tmp_path / "run1", background=True)
            one.step(*given(0))
        other.save(tmp_path / "run2")
        writing.set()
        one.load(tmp_path / "run1")
        other.load(tmp_path / "run2")


def test_the_last_ones_are_kept(tmp_path: Path, trainer: piper.Trainer) -> None:
    (tmp_path / "step-1").mkdir()  # not a checkpoint
    trainer.save(tmp_path / "best-1")
    trainer.save(tmp_path / "step-2")
    (tmp_path / "step-2" / "note").touch()
    for step in (9, 10, 11):
        trainer.save(tmp_path / f"step-{step}", keep=2)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"step-1", "best-1", "step-2", "step-10", "step-11"}
    assert [path.name for path in (tmp_path / "step-2").iterdir()] == ["note"]
    with pytest.raises(PiperError, match="keep= keeps the last of several checkpoints"):
        trainer.save(tmp_path / "state", keep=2)
    with pytest.raises(PiperError, match="keep=0 must be a whole number"):
        trainer.save(tmp_path / "step-12", keep=0)


def test_one_that_cannot_be_removed_is_told(tmp_path: Path, trainer: piper.Trainer) -> None:
    trainer.save(tmp_path / "step-1")
    (tmp_path / "step-1" / "rest.safetensors").unlink()
    (tmp_path / "step-1" / "rest.safetensors").mkdir()
    (tmp_path / "step-1" / "note").touch()
    with pytest.warns(PiperWarning, match=r"keep=1: .*step-1 cannot be removed"):
        trainer.save(tmp_path / "step-2", keep=1)
    trainer.load(tmp_path / "step-2")


@pytest.mark.parametrize("keep", [1, 2])
def test_those_are_kept_that_can_be_loaded(
    keep: int, tmp_path: Path, trainer: piper.Trainer
) -> None:
    """After some were damaged, and the run restarted from an earlier one."""
    harm: list[Callable[[Path], Any]] = [
        lambda p: flip(p, "index.json", 200),
        lambda p: (p / "index.json").write_text(""),
        lambda p: (p / "rest.safetensors").unlink(),
        lambda p: (p / "device-00000.safetensors").write_bytes(b"short"),
    ]
    for step in (1, 2, 13, 14):
        trainer.save(tmp_path / f"step-{step}")
    for step, one in zip((3, 4, 11, 12), harm, strict=True):
        trainer.save(tmp_path / f"step-{step}")
        one(tmp_path / f"step-{step}")
    for step in (5, 6):
        trainer.save(tmp_path / f"step-{step}", keep=keep)
        kept = {int(path.name[5:]) for path in tmp_path.iterdir()}
        last = {1: {step}, 2: {2, 3, 4, 5} if step == 5 else {5, 6}}[keep]
        assert kept == {*last, 11, 12, 13, 14}
        trainer.load(tmp_path / f"step-{step}")


# plain values


class Kind(enum.Enum):
    COSINE = "cosine"


class Number(enum.IntEnum):
    TWO = 2


@pytest.mark.parametrize(
    "item",
    [
        None, True, 3, -0.0, 1e-300, "x", [1, (2, 3)], {"a": {1: 2}}, {"!a": 1}, {1, 2},
        float("inf"), b"\0x", 2 + 3j, torch.float16, Counter([3, 3]), deque([1], 4),
        {(1, 2): [None]},
    ],
    ids=repr,
)  # fmt: skip
def test_values_come_back_as_they_were(item: Any) -> None:
    found = from_json(json.loads(json.dumps(to_json(item), allow_nan=False)))
    assert found == item
    assert type(found) is type(item)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_small_tensors_come_back_as_they_were(dtype: torch.dtype) -> None:
    item = torch.tensor([[0.1, float("nan") if dtype.is_floating_point else 3.0]]).to(dtype)
    found = from_json(json.loads(json.dumps(to_json(item), allow_nan=False)))
    torch.testing.assert_close(found, item, rtol=0, atol=0, equal_nan=True)


def test_numbers_of_numpy_become_pythons() -> None:
    assert to_json([np.float64(0.5), np.int32(3), np.bool_(True), Number.TWO]) == [0.5, 3, True, 2]


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("item", "words"),
    [
        (Kind.COSINE, r"Kind\.COSINE is an enum: use its value, 'cosine'"),
        (np.zeros(3), "is a ndarray: a checkpoint holds"),
        (len, "is a builtin_function_or_method"),
    ],
)
def test_what_cannot_be_told_is_refused_when_saving(item: Any, words: str, tmp_path: Path) -> None:
    def odd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        found = torch.optim.SGD(parameters, lr=0.1)
        found.param_groups[0]["rule"] = [item]
        return found

    message = rf"param_groups\[0\]\.rule\[0\]: .*{words}"
    with (
        piper.launch(made("one", kind=Small, optimizer=odd)) as trainer,
        pytest.raises(PiperError, match=message),
    ):
        trainer.save(tmp_path / "state")
    assert not list(tmp_path.iterdir())


def with_numpy(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    found = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    found.factor = np.float64(0.25)  # type: ignore[attr-defined]
    return found


def in_sequence(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    kinds = torch.optim.lr_scheduler
    return kinds.SequentialLR(
        optimizer, [kinds.LinearLR(optimizer), kinds.ExponentialLR(optimizer, 0.5)], [1]
    )


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
    "scheduler",
    [
        with_numpy,
        in_sequence,
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 10),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    ],
)
def test_schedulers_go_on(scheduler: Any, tmp_path: Path) -> None:
    assert_goes_on("one", "one", tmp_path, kind=Small, scheduler=scheduler)


@pytest.mark.cases(fast=0, slow=4)
@pytest.mark.parametrize(
    "optimizer", ["SGD", "NAdam", "RAdam", "Adagrad", "ASGD", "Adafactor", "Rprop", "Adadelta"]
)
def test_optimizers_go_on(optimizer: str, tmp_path: Path) -> None:
    """Also those whose state has another shape than their parameters."""
    factory = functools.partial(getattr(torch.optim, optimizer), lr=0.01)
    assert_goes_on("pp2", "pp2", tmp_path, kind=Small, optimizer=factory, scheduler=None)


class Rowwise(torch.optim.Optimizer):
    """Scales each row by its own gradients: it can be sharded along the first dimension."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    rows = p.grad.square().flatten(1).sum(1) if p.dim() > 1 else p.grad.square()
                    kept = self.state[p].setdefault("rows", torch.zeros_like(rows))
                    kept.add_(rows)
                    scale = (kept + 1e-6).rsqrt()
                    shape = (*scale.shape, *(1,) * (p.dim() - 1))
                    p.sub_(p.grad * scale.view(shape), alpha=group["lr"])


@pytest.mark.slow
def test_an_optimizer_that_must_have_all_experts_is_refused() -> None:
    """Adafactor takes the root mean square over all experts."""
    strategy = [place({}, devices=[0, 1]), shard({"EP": "*"})]
    optimizer = functools.partial(torch.optim.Adafactor, lr=0.01)
    with pytest.raises(piper.DirectiveError, match=r"Adafactor.* must have the whole of 'experts'"):
        compiled(net(), strategy, F.mse_loss, batches(), optimizer=optimizer)


@pytest.mark.slow
def test_state_of_a_shard_that_is_not_the_parameters(tmp_path: Path) -> None:
    """State for the rows of two experts is not state for four."""
    strategy = [place({}, devices=[0, 1]), shard({"EP": "*"})]
    options: dict[str, Any] = {"optimizer": Rowwise}
    sharded = compiled(net(), strategy, F.mse_loss, batches(), **options)
    with piper.launch(sharded) as trainer:
        trainer.step(*given(0))
        trainer.save(tmp_path / "state")
        loss = trainer.step(*given(1)).loss
        trainer.load(tmp_path / "state")
        assert torch.equal(trainer.step(*given(1)).loss, loss)
    with (
        piper.launch(made("one", scheduler=None, **options)) as trainer,
        pytest.raises(PiperError, match=r"of experts was kept for each of 2 shards"),
    ):
        trainer.load(tmp_path / "state")


@pytest.mark.slow
def test_another_seed_is_told(tmp_path: Path) -> None:
    with piper.launch(made("one", kind=Small, seed=3)) as trainer:
        trainer.save(tmp_path / "state")
    with (
        piper.launch(made("one", kind=Small)) as trainer,
        pytest.warns(PiperWarning, match=r"was saved with seed=3"),
    ):
        trainer.load(tmp_path / "state")


# in the background


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, usual = threading.Event(), parts.write_file

    def held_up(path: Path, tensors: Any) -> Any:
        writing.wait()
        return usual(path, tensors)

    with piper.launch(made("zero1", kind=Small)) as trainer:
        trainer.step(*given(0))
        expected = contents(trainer, tmp_path / "expected")
        monkeypatch.setattr(parts, "write_file", held_up)
        trainer.save(tmp_path / "saved", background=True)
        for step in range(1, 4):
            trainer.step(*given(step))
        assert not (tmp_path / "saved").exists()
        writing.set()
        trainer.load(tmp_path / "saved")
        assert trainer.steps == 1
        found = contents(trainer, tmp_path / "found")
        assert all(torch.equal(x, found[name]) for name, x in expected.items())
        trainer.save(tmp_path / "last", background=True)
    assert (tmp_path / "last" / "index.json").exists()


def test_a_failed_save_in_the_background_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, tensors: Any) -> Any:
        raise OSError("No space left on device")

    words = "cannot be saved to .*: No space left on device; what was there before is untouched"
    with piper.launch(made("zero1", kind=Small)) as trainer:
        trainer.step(*given(0))
        trainer.save(tmp_path / "saved")
        before = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
        trainer.step(*given(1))
        with monkeypatch.context() as patched:
            patched.setattr(parts, "write_file", full)
            trainer.save(tmp_path / "saved", background=True)
            with pytest.raises(PiperError, match=words):
                trainer.save(tmp_path / "other")
        assert not (tmp_path / "other").exists()
        found = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
        assert found == before
        trainer.step(*given(2))
        trainer.save(tmp_path / "other")
    monkeypatch.setattr(parts, "write_file", full)
    trainer = piper.launch(made("zero1", kind=Small))
    trainer.save(tmp_path / "saved", background=True)
    with pytest.raises(PiperError, match=words):
        trainer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "saved"]
