"""``from_pretrained`` loads an export of ``trainer.export``: the same logits, bit for bit; and
``piper.weights`` reads the library's own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

import piper
from piper import PiperError, annotate
from piper.state.checkpoint.discover import stored_tensors
from piper.state.checkpoint.slices import MODEL, Slice
from piper.state.checkpoint.tensor_files import Reader
from tests.hugging_face import FAMILIES, VOCAB
from tests.training import data_parallel, pipeline

transformers = pytest.importorskip("transformers")

NAMES = ("Llama, tied", "GPT-2", "Llama", "Qwen 3", "Gemma 2", "Mistral")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)


def made(name: str) -> nn.Module:
    """A model of the library."""
    return FAMILIES[name].make(dropout=False)


def loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())


def compiled(
    name: str, model: nn.Module, **options: Any
) -> tuple[piper.Program, dict[str, Tensor], Tensor]:
    x, y = torch.randint(VOCAB, (2, 4, 8), generator=torch.Generator().manual_seed(0))
    strategy = [*pipeline([[0, 1], [2, 3]], 2, by=[1, 1]), piper.replicate({}, zero=3)]
    program = piper.compile(
        model,
        piper.Strategy(strategy),
        inputs={"input_ids": x},
        targets=(y,),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        tags=FAMILIES[name].tags,
        **options,
    )
    return program, {"input_ids": x}, y


@pytest.mark.cases(fast=1, slow=3)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if i < 2 else pytest.mark.slow) for i, n in enumerate(NAMES)],
)
def test_from_pretrained_loads_it(name: str, tmp_path: Path) -> None:
    model: Any = made(name)
    program, inputs, targets = compiled(name, model)
    with piper.launch(program) as trainer:
        trainer.step(inputs, targets)
        trainer.export(tmp_path / "out", file_gb=1e-5)
        trainer.export(tmp_path / "out", file_gb=1e-5)
        state = trainer.state_dict()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert ("lm_head.weight" in index["weight_map"]) == (not model.config.tie_word_embeddings)
    found, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    model.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(model.eval()(**inputs).logits, found.eval()(**inputs).logits)


class Inside(nn.Module):
    """A model of the library inside another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor) -> Any:
        return self.inner(input_ids=input_ids)


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return made(name)


SAVED: dict[str, Any] = {
    "several files": lambda model, folder: model.save_pretrained(folder, max_shard_size="10KB"),
    "without a head": lambda model, folder: model.base_model.save_pretrained(folder),
}


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(n, how, marks=() if (i, j) == (0, 0) else pytest.mark.slow)
        for i, n in enumerate(NAMES)
        for j, how in enumerate(SAVED)
    ],
)
def test_weights_of_the_library_fill_a_model_on_the_meta_device(
    name: str, how: str, tmp_path: Path
) -> None:
    """Rotary frequencies are in no file: they are computed as in the library."""
    model: Any = made(name)
    SAVED[how](model, tmp_path / "saved")
    init = piper.weights(tmp_path / "saved")
    if how == "without a head" and not model.config.tie_word_embeddings:
        with pytest.raises(PiperError, match=r"is missing: lm_head\.weight"):
            compiled(name, on_meta(name), init=init)
        return
    program, inputs, targets = compiled(name, on_meta(name), init=init)
    with piper.launch(program) as trainer:
        state, expected = trainer.state_dict(), model.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], x) for key, x in expected.items())
        found = trainer.evaluate(inputs, targets).loss
    own, *_ = compiled(name, model)
    with piper.launch(own) as trainer:
        assert torch.equal(trainer.evaluate(inputs, targets).loss, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama, tied", "GPT-2"])
def test_a_model_inside_another_reads_what_it_exports(name: str, tmp_path: Path) -> None:
    model = Inside(made(name))
    x, y = torch.randint(VOCAB, (2, 4, 8))

    def program(model: nn.Module, **options: Any) -> piper.Program:
        strategy = piper.Strategy(data_parallel(2, 1))
        how = {"inputs": (x,), "targets": (y,), "loss": loss, "tags": {"inner": "layer"}}
        return piper.compile(model, strategy, **how, **options)

    with piper.launch(program(model)) as trainer:
        trainer.export(tmp_path / "out")
    again = program(Inside(on_meta(name)), init=piper.weights(tmp_path / "out"))
    with piper.launch(again) as trainer:
        assert all(torch.equal(trainer.state_dict()[k], t) for k, t in model.state_dict().items())


class Wrapped(nn.Module):
    """A model with a parameter that no device uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        with annotate("layer"):
            return self.layer(x) * self.scale


@pytest.mark.parametrize("on", ["virtual", pytest.param("processes", marks=pytest.mark.slow)])
def test_models_without_a_configuration(on: str, tmp_path: Path) -> None:
    model, x = Wrapped(), torch.randn(4, 4)
    program = piper.compile(
        model, piper.Strategy(data_parallel(2, 1)), inputs=(x,), targets=(x,), loss=F.mse_loss
    )
    with piper.launch(program, on=on) as trainer:
        trainer.export(tmp_path / "out", dtype=torch.bfloat16)
        (tmp_path / "file").touch()
        with pytest.raises(PiperError, match=r"cannot be saved to .*there is a file"):
            trainer.export(tmp_path / "file")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    assert found.keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(found[key], tensor.bfloat16())


def test_an_export_replaces_the_former_one_and_nothing_else(tmp_path: Path) -> None:
    """Other files stay: a tokenizer and notes from before, and a license added later."""
    model, x = Wrapped(), torch.randn(4, 4)
    program = piper.compile(
        model, piper.Strategy(data_parallel(2, 1)), inputs=(x,), targets=(x,), loss=F.mse_loss
    )
    out = tmp_path / "runs" / "out"
    out.mkdir(parents=True)
    (out / "tokenizer.json").write_text("mine")
    (out / "notes").mkdir()
    several, one = 4e-9 * 5, 5.0
    with piper.launch(program) as trainer:
        for file_gb in (one, several, several, one, one):
            trainer.load_state_dict({k: t + 1 for k, t in trainer.state_dict().items()})
            trainer.export(out, file_gb=file_gb)
            (out / "LICENSE").write_text("mine")
            state = trainer.state_dict()
            _, found = stored_tensors(out)
            assert found.keys() == state.keys()
            files = {slices[0].location.file for slices in found.values()}
            index = {"model.safetensors.index.json"} if file_gb == several else set()
            others = {"tokenizer.json", "notes", "LICENSE"}
            assert {path.name for path in out.iterdir()} == files | index | others
            assert len(files) == (1 if file_gb == one else 3)
            with Reader(out) as reader:
                for key, slices in found.items():
                    tensor = torch.empty_like(state[key])
                    reader.fill(Slice.of(MODEL, key, tensor), slices)
                    assert torch.equal(tensor, state[key])
    assert (out / "tokenizer.json").read_text() == "mine"
