"""Initial weights from files: every device reads its own slices, and gets the model's weights."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import piper
from piper import PiperError, annotate, place, replicate
from piper.base.tracking import Tracker
from piper.launch.device.device_programs import device_programs, first_weights
from piper.state.checkpoint import tensor_files as files
from piper.state.checkpoint.slices import MODEL, Slice
from piper.state.device.device_state import DeviceState
from piper.state.weights.matching import located
from piper.state.weights.source import Source, StateNames
from tests.state.test_checkpoints import STRATEGIES, Net, batches, given, net
from tests.training import adamw, compiled, shared_captures


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


def in_one_file(state: dict[str, Tensor], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: x.contiguous() for name, x in state.items()}, folder / "model.safetensors")
    return folder


def in_several_files(state: dict[str, Tensor], folder: Path) -> Path:
    """Write the state as three files and their index."""
    folder.mkdir(exist_ok=True)
    where = {key: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, key in enumerate(state)}
    for file in set(where.values()):
        mine = {key: x.contiguous() for key, x in state.items() if where[key] == file}
        save_file(mine, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def without(state: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: x for name, x in state.items() if name not in names}


@functools.cache
def meta_net() -> nn.Module:
    with torch.device("meta"):
        return Net().double()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of the model, without one of its tied names."""
    state = without(net(Net).state_dict(), "tied")
    return in_several_files(state, tmp_path_factory.mktemp("weights") / "files")


FAST = ("ep4-zero3", "dp2-tp2-zero1")


@pytest.mark.cases(fast=1, slow=5)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in STRATEGIES],
)
def test_a_model_on_the_meta_device_has_the_weights_of_the_files(name: str, folder: Path) -> None:
    """Fused, tensor-parallel, expert and ZeRO shards, ties, permuted strides, buffers, and tensors
    that no device holds."""
    options: dict[str, Any] = {"optimizer": adamw, "init": piper.weights(folder)}
    program = compiled(meta_net(), STRATEGIES[name], F.mse_loss, batches(), **options)
    with piper.launch(program) as trainer:
        state = trainer.state_dict()
        expected = net(Net).state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], x) for key, x in expected.items())
        found = trainer.step(*given(0))
    own = compiled(net(Net), STRATEGIES[name], F.mse_loss, batches(), optimizer=adamw)
    with piper.launch(own) as trainer:
        assert torch.equal(trainer.step(*given(0)).loss, found.loss)


class Wide(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, dtype=dtype) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with annotate("layer"):
                x = torch.tanh(layer(x))
        return x


def wide(folder: Path, strategy: list[Any], model: nn.Module | None = None, **how: Any) -> Any:
    """A program of a model on the meta device, with the weights in ``folder``."""
    if model is None:
        with torch.device("meta"):
            model = Wide()
    x = torch.zeros(4, 1024, dtype=next(model.parameters()).dtype, device="cpu")
    return piper.compile(
        model, piper.Strategy(strategy), inputs=(x,), targets=(x,), loss=F.mse_loss,
        init=piper.weights(folder), **how,
    )  # fmt: skip


ZERO3 = [place({}, devices=[0, 1, 2, 3]), replicate({}, zero=3)]


def test_a_device_reads_and_holds_its_shard_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Wide().state_dict()
    program = wide(in_one_file(state, tmp_path / "files"), ZERO3)
    read: list[int] = []
    filled = files._filled

    def counted(file: Any, buffer: memoryview) -> int:
        read.append(len(buffer))
        return filled(file, buffer)

    monkeypatch.setattr(files, "_filled", counted)
    total = sum(x.nbytes for x in state.values())
    for device in program.devices:
        with Tracker() as tracker:
            made = DeviceState(
                device_programs(program)(device), program.device, first_weights(program)
            )
        share = sum(held.flat.nbytes for held in made.held.values())
        assert share <= total / 4 + 4096
        assert tracker.peak <= share + 4096
    assert sum(read) == total


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_other_dtypes_are_converted(stored: torch.dtype, own: torch.dtype, tmp_path: Path) -> None:
    """Converted as a model that loads them would; the bf16 copies are made from the result."""
    torch.manual_seed(0)
    state = {name: x.to(stored) for name, x in Wide(torch.float64).state_dict().items()}
    source = Source(Wide(own).to("meta"))
    files = piper.weights(in_one_file(state, tmp_path / "files"))
    there = located(source, StateNames.of(source), files)
    for name, x in state.items():
        first = there[name]
        assert torch.equal(first.whole(), x.to(own))
        low = torch.zeros(x.shape, dtype=torch.bfloat16)
        first.fill(Slice.of(MODEL, name, low), torch.float32)
        assert torch.equal(low, x.to(own).float().bfloat16())


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_master_weights_and_their_low_precision_copies(zero: int, tmp_path: Path) -> None:
    folder = in_one_file(Wide().state_dict(), tmp_path / "files")
    strategy = [place({}, devices=[0, 1]), replicate({}, zero=zero)]
    real = Wide()
    real.load_state_dict(files_of(folder))
    programs = [wide(folder, strategy, precision="bf16", optimizer=adamw)]
    programs.append(wide(folder, strategy, real, precision="bf16", optimizer=adamw))
    x = torch.randn(4, 1024)
    losses = []
    for program in programs:
        with piper.launch(program) as trainer:
            losses.append(trainer.step(x, x).loss)
    assert torch.equal(*losses)


def files_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_files_replace_what_a_model_has(tmp_path: Path) -> None:
    state = Wide().state_dict()
    folder = in_one_file(state, tmp_path / "files")
    with piper.launch(wide(folder, ZERO3, Wide())) as trainer:
        assert all(torch.equal(x, state[name]) for name, x in trainer.state_dict().items())


@pytest.mark.slow
def test_processes_read_for_themselves(tmp_path: Path) -> None:
    state = Wide().state_dict()
    folder = in_one_file(state, tmp_path / "files")
    with piper.launch(wide(folder, ZERO3), on="processes", threads=1) as trainer:
        assert all(torch.equal(x, state[name]) for name, x in trainer.state_dict().items())


def test_what_trainers_write_can_be_read(tmp_path: Path) -> None:
    state = Wide().state_dict()
    folder = in_one_file(state, tmp_path / "files")
    with piper.launch(wide(folder, ZERO3)) as trainer:
        trainer.save(tmp_path / "saved")
        trainer.export(tmp_path / "exported", file_gb=1e-3)
    for name in ("saved", "exported"):
        with piper.launch(wide(tmp_path / name, ZERO3[:1])) as trainer:
            assert all(torch.equal(x, state[key]) for key, x in trainer.state_dict().items())


# buffers


class Turning(nn.Module):
    """One buffer that is not in the state dict, and one that is."""

    def __init__(self, *, resets: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("angles", torch.empty(4), persistent=False)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.resets = resets
        if not resets:
            self.reset_parameters = None  # type: ignore[assignment]

    def reset_parameters(self) -> None:
        self.angles.copy_(torch.arange(4) / 7)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("layer"):
            return self.linear(x) * self.angles.cos() * self.scale


@pytest.mark.parametrize("on", ["virtual", pytest.param("processes", marks=pytest.mark.slow)])
def test_buffers_that_no_state_dict_has_are_computed(on: str, tmp_path: Path) -> None:
    real, x = Turning(), torch.randn(4, 4)
    real.reset_parameters()
    state = {**real.state_dict(), "scale": torch.tensor([3.0])}
    real.load_state_dict(state)
    # a file of an earlier version may contain a buffer that is now computed
    folder = in_one_file({**state, "angles": torch.zeros(4)}, tmp_path / "files")
    with torch.device("meta"):
        model = Turning()
    program = piper.compile(
        model, piper.Strategy([place({}, devices=[0])]), inputs=(x,), targets=(x,),
        loss=F.mse_loss, init=piper.weights(folder),
    )  # fmt: skip
    with piper.launch(program, on=on) as trainer:
        torch.testing.assert_close(trainer.evaluate(x, x).loss, F.mse_loss(real(x), x))


def test_buffers_that_no_module_computes_need_init(tmp_path: Path) -> None:
    folder = in_one_file(Turning().state_dict(), tmp_path / "files")
    with torch.device("meta"):
        model = Turning(resets=False)
    x = torch.randn(4, 4)

    def launched(init: Any) -> piper.Trainer:
        program = piper.compile(
            model, piper.Strategy([place({}, devices=[0])]), inputs=(x,), targets=(x,),
            loss=F.mse_loss, init=piper.weights(folder, init=init),
        )  # fmt: skip
        return piper.launch(program)

    with pytest.raises(PiperError, match=r"angles is a buffer .* give piper.weights\(folder, init"):
        launched(None)
    seen = []

    def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        seen.append(name)
        tensor.zero_()

    with launched(fill):
        assert set(seen) == {"angles"}


# what is found and what is refused


class One(nn.Module):
    """A small model with a tie and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = nn.Linear(3, 4)
        self.b.weight = self.a.weight
        self.register_buffer("count", torch.tensor(0))


def one() -> dict[str, Tensor]:
    return {name: x.clone() for name, x in One().state_dict().items()}


def meta_one() -> Source:
    with torch.device("meta"):
        return Source(One())


def refused(state: dict[str, Tensor], folder: Path, **how: Any) -> str:
    source = meta_one()
    with pytest.raises(PiperError) as caught:
        located(source, StateNames.of(source), piper.weights(in_one_file(state, folder), **how))
    return str(caught.value)


CASES: dict[str, tuple[Callable[[], dict[str, Tensor]], str]] = {
    "missing": (lambda: without(one(), "b.bias"), "1 of the model's 5 tensors is missing: b.bias"),
    "tied": (lambda: without(one(), "a.weight", "b.weight"), "is missing: a.weight"),
    "extra": (
        lambda: {**one(), "c": torch.ones(1)},
        "1 tensor is not in the model: c (in model.safetensors)",
    ),
    "shape": (
        lambda: {**one(), "a.bias": torch.ones(5)},
        "1 tensor has another shape: a.bias, [5] instead of [4]",
    ),
    "kind": (
        lambda: {**one(), "count": torch.tensor(1.0)},
        "count is torch.float32 in {}/model.safetensors, but torch.int64 in the model",
    ),
    "ties": (
        lambda: {**one(), "b.weight": torch.ones(4, 3)},
        "a.weight and b.weight are tied in the model, but differ in {}/model.safetensors",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_files_of_another_model_are_refused(name: str, tmp_path: Path) -> None:
    state, words = CASES[name]
    assert words.replace("{}", str(tmp_path)) in refused(state(), tmp_path)


class Scaled(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))


def test_one_file_by_its_name_and_a_loss_that_is_not_in_it(tmp_path: Path) -> None:
    folder = in_one_file(one(), tmp_path / "files")
    save_file({"other": torch.ones(1)}, folder / "other.safetensors")
    source = Source(One(), Scaled())
    for path in (folder, folder / "model.safetensors"):
        found = located(source, StateNames.of(source), piper.weights(path))
        assert found.keys() == {"a.weight", "a.bias", "b.bias", "count"}


def test_tensors_that_are_to_be_ignored(tmp_path: Path) -> None:
    source = meta_one()
    state = {**without(one(), "b.weight"), "old.mask": torch.ones(2), "old": torch.ones(1)}
    folder = in_one_file(state, tmp_path / "files")
    found = located(source, StateNames.of(source), piper.weights(folder, ignore=["old*"]))
    assert found.keys() == {"a.weight", "a.bias", "b.bias", "count"}
    assert "1 tensor is not in the model: old (in" in refused(
        state, tmp_path / "files", ignore=["*.mask"]
    )


def damaged(folder: Path, change: Callable[[Path], object]) -> str:
    change(in_several_files(one(), folder))
    source = meta_one()
    with pytest.raises(PiperError) as caught:
        located(source, StateNames.of(source), piper.weights(folder))
    return str(caught.value)


def with_header(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Change the header of the first file."""

    def harm(folder: Path) -> None:
        content = (folder / FIRST).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        change({key: item for key, item in header.items() if key != "__metadata__"})
        written = json.dumps(header).encode()
        (folder / FIRST).write_bytes(len(written).to_bytes(8, "little") + written + content[end:])

    return harm


def at_the_same_place(tensors: Any) -> None:
    larger, *_, smaller = sorted(tensors.values(), key=lambda x: -x["data_offsets"][1])
    size = smaller["data_offsets"][1] - smaller["data_offsets"][0]
    smaller["data_offsets"] = [larger["data_offsets"][0], larger["data_offsets"][0] + size]


def piped(folder: Path) -> None:
    (folder / FIRST).unlink()
    os.mkfifo(folder / FIRST)
    threading.Thread(target=(folder / FIRST).open, args=("wb",), daemon=True).start()


FIRST = "model-00001-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda f: (f / FIRST).unlink(), f"{FIRST} cannot be read"),
    "empty": (lambda f: (f / FIRST).write_bytes(b""), "it is no safetensors file, or cut off"),
    "cut": (
        lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes()[:-1]),
        "its data_offsets do not fit its size or the file",
    ),
    "overlap": (with_header(at_the_same_place), "are said to lie in the same bytes"),
    "dimensions": (
        with_header(lambda h: next(iter(h.values())).update(shape=[1] * 65)),
        "is not the shape of a tensor",
    ),
    "a pipe": (piped, "it is not a file, but a pipe"),
    "no JSON": (
        lambda f: (f / FIRST).write_bytes(b"\x02" + bytes(7) + b"xx"),
        f"{FIRST} cannot be used",
    ),
    "a list": (
        lambda f: (f / FIRST).write_bytes(b"\x02" + bytes(7) + b"[]"),
        "it is no safetensors file",
    ),
    "no map": (lambda f: (f / INDEX).write_text("{}"), "it has no weight_map"),
    "elsewhere": (
        lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}})),
        "is not the name of a safetensors file of this folder",
    ),
    "another file": (
        lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"b.bias": FIRST, "z": FIRST}})),
        "says that",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_refused(name: str, tmp_path: Path) -> None:
    change, words = DAMAGE[name]
    assert words in damaged(tmp_path / "files", change)


def test_links_of_a_cache_are_followed(tmp_path: Path) -> None:
    folder = in_several_files(one(), tmp_path / "files")
    (folder / FIRST).rename(tmp_path / "blob")
    (folder / FIRST).symlink_to(tmp_path / "blob")
    source = meta_one()
    assert located(source, StateNames.of(source), piper.weights(folder))


def test_folders_without_weights_are_refused(tmp_path: Path) -> None:
    source = Source(One())
    names = StateNames.of(source)
    with pytest.raises(PiperError, match="there is no folder of weights at"):
        located(source, names, piper.weights(tmp_path / "none"))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(PiperError, match="has no safetensors files: weights in another format"):
        located(source, names, piper.weights(tmp_path))
    with pytest.raises(PiperError, match="must be a list of patterns"):
        piper.weights(tmp_path, ignore="*.bias")
    with pytest.raises(PiperError, match="must be a function"):
        piper.weights(tmp_path, init=3)  # type: ignore[arg-type]


# launchers, and memory


@pytest.mark.slow
def test_ranks_of_torchrun_read_for_themselves(tmp_path: Path) -> None:
    from tests.launch.test_torchrun import LIMIT, torchrun

    folders = [in_one_file(Wide().state_dict(), tmp_path / name) for name in ("files", "others")]
    with torchrun(4, "read_weights.py", *folders) as run:
        printed, _ = run.communicate(timeout=LIMIT)
    lines = sorted(printed.splitlines())
    assert [line[:40] for line in lines if line.endswith("True")] == [f"{i} True" for i in range(4)]
    assert sum("the first weights differ between ranks" in line for line in lines) == 4, printed


def llama(layers: int, width: int, vocab: int) -> nn.Module:
    """A model shaped like Llama 7B, on the meta device, in bf16."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        use_cache=False,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).bfloat16()


def peaks(model: nn.Module, folder: Path) -> tuple[list[int], int]:
    """The peak memory of each of four processes after the start, and the bytes of the model."""
    folder.mkdir()
    state = model.state_dict()
    made = functools.partial(torch.full, fill_value=0.01, dtype=torch.bfloat16)
    slices = [
        Slice.whole(MODEL, name, x.shape, x.dtype, functools.partial(made, x.shape))
        for name, x in state.items()
    ]
    files.write_file(folder / "model.safetensors", slices)
    x = torch.zeros(4, 8, dtype=torch.long)
    program = piper.compile(
        model,
        piper.Strategy([place({}, devices=[0, 1, 2, 3]), replicate({}, zero=3)]),
        inputs={"input_ids": x},
        targets=(x,),
        loss=lambda output, y: F.cross_entropy(output.logits.flatten(0, 1).float(), y.flatten()),
        tags={"model.embed_tokens": "embed", "model.layers.*": "layer", "lm_head": "head"},
        init=piper.weights(folder),
    )
    with piper.launch(program, on="processes", threads=1) as trainer:
        group: Any = trainer._session.devices
        pids = [worker.process.pid for worker in group.workers.processes]
        status = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    found = [int(re.search(r"VmHWM:\s+(\d+) kB", text)[1]) * 1024 for text in status]  # type: ignore[index]
    return found, sum(x.nbytes for x in state.values())


MARGIN = 64 * 2**20
"""Bytes that a process may take beyond its share and its memory without a model."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_model_starts_in_its_share_of_the_memory(tmp_path: Path) -> None:
    """Two layers of Llama 7B, 1.3 GB, on four workers."""
    without_model, _ = peaks(llama(2, 64, 64), tmp_path / "small")
    found, total = peaks(llama(2, 4096, 32000), tmp_path / "large")
    assert total > 1.3e9
    for peak in found:
        assert peak <= max(without_model) + total / 4 + MARGIN, (peak, max(without_model), total)
