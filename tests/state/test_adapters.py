"""peft loads the adapter files that ``trainer.export`` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

import piper
from piper import PiperError
from tests.state.test_export import compiled, made

peft = pytest.importorskip("peft")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.norm(self.first(x)))


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def adapted(name: str = "default", **options: Any) -> Any:
    config = peft.LoraConfig(r=2, target_modules=["first"], **options)
    return peft.get_peft_model(Layers(), config, name)


def sharded(model: nn.Module) -> tuple[piper.Program, Tensor]:
    x = torch.randn(4, 4)
    strategy = piper.Strategy([piper.place({}, devices=[0, 1]), piper.replicate({}, zero=3)])
    program = piper.compile(
        model, strategy, inputs=(x,), targets=(x,), loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
    )  # fmt: skip
    return program, x


@pytest.mark.parametrize("name", ["default", "other"])
def test_peft_loads_the_adapter(name: str, tmp_path: Path) -> None:
    """Names and configuration are peft's own; the base weights are not written."""
    model = adapted(name, modules_to_save=["head"])
    program, x = sharded(model if name == "default" else Around(model))
    with piper.launch(program) as trainer:
        trainer.step(x, x)
        trainer.export(tmp_path / "out")
        (tmp_path / "out" / "tokenizer.json").touch()
        trainer.export(tmp_path / "out")
        state = {key.removeprefix("inner."): tensor for key, tensor in trainer.state_dict().items()}
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", "pt") as file:
        names = ("first.lora_A.weight", "first.lora_B.weight", "head.bias", "head.weight")
        assert sorted(file.keys()) == [f"base_model.model.{name}" for name in names]
    read = peft.PeftModel.from_pretrained(Layers(), tmp_path / "out", name).state_dict()
    assert read.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in read.items())


def test_a_frozen_base_keeps_its_dtype() -> None:
    """As with QLoRA: bf16 weights that are not trained, and adapters in fp32."""
    model = adapted()
    for name, parameter in model.named_parameters():
        if "lora" not in name:
            parameter.data = parameter.data.bfloat16()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    x = torch.randn(4, 4, dtype=torch.bfloat16)
    program = piper.compile(
        model, piper.strategies.mesh(dp=2, zero=2), inputs=(x,), targets=(x,),
        loss=lambda output, target: F.mse_loss(output.float(), target.float()),
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
    )  # fmt: skip
    with piper.launch(program) as trainer:
        trainer.step(x, x)
        trainer.step(x, x)
        state, made = trainer.state_dict(), trainer.model().state_dict()
    for name, tensor in state.items():
        assert (tensor.dtype, made[name].dtype) == (before[name].dtype, before[name].dtype)
        assert torch.equal(tensor, made[name])
        assert torch.equal(tensor, before[name]) == ("lora" not in name)


@pytest.mark.slow
def test_transformers_loads_adapters_that_it_added(tmp_path: Path) -> None:
    made("Llama").save_pretrained(tmp_path / "base")
    load = type(made("Llama")).from_pretrained
    model = load(tmp_path / "base").train()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    program, inputs, targets = compiled("Llama", model)
    with piper.launch(program) as trainer:
        trainer.step(inputs, targets)
        trainer.export(tmp_path / "out")
        state = trainer.state_dict()
    assert not list((tmp_path / "out").glob("model*")), "only adapters"
    read = load(tmp_path / "base")
    read.load_adapter(tmp_path / "out")
    assert read.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in read.state_dict().items())


def test_what_no_adapter_holds_is_not_lost(tmp_path: Path) -> None:
    model = adapted()
    model.base_model.model.norm.requires_grad_(True)
    program, _ = sharded(model)
    inner, _ = sharded(adapted().get_base_model())
    for one, words in (
        (
            program,
            "base_model.model.norm.weight is trained, and the files of peft's adapter do not hold "
            "it, nor 1 more: name its module in modules_to_save of the adapter's configuration, ",
        ),
        (inner, "first is a Linear of peft in a model that cannot write its adapter: compile "),
    ):
        with piper.launch(one) as trainer, pytest.raises(PiperError) as caught:
            trainer.export(tmp_path / "out")
        assert str(caught.value).startswith(words)
        assert not (tmp_path / "out").exists()
