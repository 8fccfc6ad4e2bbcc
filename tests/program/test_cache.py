"""The cache of compiled programs: a change has another key, or is not kept; a program that is found
computes what was compiled."""

from __future__ import annotations

import functools
import os
import random
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.overrides import TorchFunctionMode

import piper
from piper.program.cache.entries import Entries
from piper.program.cache.key import Key, key_of
from piper.program.compile.digest import digest_of
from piper.runtime.torch_flags import Flags
from piper.strategies import mesh

SCALE = 2.0
TABLE = {"scale": [1.0]}
ARRAY = np.ones(3)
CONSTANT = torch.zeros(20_000)
settings = types.ModuleType("settings")
settings.__dict__.update(SCALE=3.0, OTHER=4.0)
computed = types.ModuleType("computed")
computed.SCALE = 3.0
PATTERN = re.compile("a" * 250)


class Masked(np.ndarray):
    pass


@functools.lru_cache
def used(n: int) -> float:
    return n * SCALE


@torch.library.custom_op("test_cache::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x * SCALE


@dataclass
class Options:
    scale: float = 1.0
    _hidden: int = 0
    inner: Any = None
    kinds: set[str] = field(default_factory=lambda: {"one", "two"})


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


def helper(x: Tensor) -> Tensor:
    return x * SCALE


def with_default(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * scale


def by_computed_name(x: Tensor) -> Tensor:
    return x * computed.__dict__["SCA" + "LE".strip()] if PATTERN.match("b") is None else x


def scaled_by(scale: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * scale


@functools.wraps(helper)
def wrapped(x: Tensor) -> Tensor:
    return helper(x)


@functools.lru_cache
def cached(n: int) -> float:
    return n * SCALE


class Base(nn.Module):
    factor = 1.0
    words = ("a", "b")

    def last(self, x: Tensor) -> Tensor:
        return x * self.factor


class Net(Base):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("ones", torch.ones(4))
        self.options = Options(
            inner=Options(inner=Options(inner=Options(inner=Options(inner=[1]))))
        )
        self.slotted = Slotted()
        self.scaled = scaled_by(2.0)
        self.constant = CONSTANT.clone()
        self.calls = [functools.partial(mse_loss, reduction="sum")]

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.one(wrapped(x))) * TABLE["scale"][0] + float(ARRAY[0])
        x = by_computed_name(with_default(self.scaled(x))) * settings.SCALE * settings.OTHER
        return self.last(self.two(x)) * self.options.scale * cached(2)


def job() -> list[Any]:
    torch.manual_seed(0)
    return [Net(), mse_loss, mesh(dp=2).to_json(), "fp32", {"layer": "*"}]


def halved(x: Tensor, *rest: Any) -> Tensor:
    return x / 2


def deep(net: Net) -> Any:
    return net.options.inner.inner.inner.inner.inner


class Mode(TorchFunctionMode):
    pass


class Asks(nn.Module):
    """Its forward asks for something from outside."""

    def __init__(self, how: Callable[[], float]) -> None:
        super().__init__()
        self.how = how


def generated() -> Iterator[int]:
    yield 1


Patch = pytest.MonkeyPatch
CHANGES: dict[str, Callable[[Patch, list[Any]], object]] = {
    "a global number": lambda m, _: m.setattr(sys.modules[__name__], "SCALE", 2.5),
    "a global dict": lambda m, _: m.setitem(TABLE, "scale", [1.5]),
    "a global array": lambda m, _: m.setattr(sys.modules[__name__], "ARRAY", np.zeros(3)),
    "a value of a module": lambda m, _: m.setattr(settings, "SCALE", 3.5),
    "a value by getattr": lambda m, _: m.setattr(settings, "OTHER", 4.5),
    "a function": lambda m, _: m.setattr(sys.modules[__name__], "helper", halved),
    "a function's code": lambda m, _: m.setattr(helper, "__code__", halved.__code__),
    "a default": lambda m, _: m.setattr(with_default, "__defaults__", (2.0,)),
    "a closure": lambda m, g: setattr(g[0], "scaled", scaled_by(3.0)),
    "a tensor in a closure": lambda m, g: setattr(g[0], "scaled", scaled_by(torch.ones(2))),
    "a class attribute": lambda m, _: m.setattr(Base, "factor", 1.5),
    "a tuple of a class": lambda m, _: m.setattr(Base, "words", ("a", "c")),
    "a method of a base": lambda m, _: m.setattr(Base, "last", lambda self, x: x),
    "a method of an object": lambda m, g: setattr(g[0], "last", lambda x: x),
    "a forward of an object": lambda m, g: setattr(g[0].one, "forward", halved),
    "an attribute": lambda m, g: setattr(g[0].options, "scale", 1.5),
    "a private attribute": lambda m, g: setattr(g[0].options, "_hidden", 1),
    "a set": lambda m, g: g[0].options.kinds.add("three"),
    "a deep list": lambda m, g: deep(g[0]).append(2),
    "an object's type": lambda m, g: setattr(g[0].options, "scale", 1),
    "a slot": lambda m, g: setattr(g[0].slotted, "value", 2),
    "the end of a large tensor": lambda m, g: g[0].constant[-1:].fill_(1),
    "a buffer": lambda m, g: g[0].ones[-1:].fill_(2),
    "a keyword of a partial": lambda m, g: g[0].calls[0].keywords.update(reduction="mean"),
    "torch's function": lambda m, _: m.setattr(F, "relu", halved),
    "torch's function by another": lambda m, _: m.setattr(F, "relu", F.gelu),
    "what torch's modules call": lambda m, _: m.setattr(F, "linear", F.bilinear),
    "a partial that they call": lambda m, _: m.setattr(
        F, "linear", functools.partial(F.linear, bias=None)
    ),
    "a value by a computed name": lambda m, _: m.setattr(computed, "SCALE", 4.0),
    "the end of a long pattern": lambda m, _: m.setattr(
        sys.modules[__name__], "PATTERN", re.compile("a" * 250 + "b")
    ),
    "a hook of a weight": lambda m, g: g[0].two.weight.register_hook(halved),
    "the fast path of attention": lambda m, _: m.setattr(
        torch.backends.mha, "_is_fastpath_enabled", False
    ),
    "torch's method": lambda m, _: m.setattr(nn.Linear, "forward", lambda self, x: x),
    "torch's inner function": lambda m, _: m.setattr(torch._tensor, "_convert", halved),
    "a builtin function": lambda m, _: m.setattr("builtins.float", lambda x: 2.0),
    "the mode": lambda m, g: g[0].two.eval(),
    "a frozen weight": lambda m, g: g[0].two.weight.requires_grad_(False),
    "a tied weight": lambda m, g: setattr(g[0].two, "weight", g[0].one.weight),
    "a dtype": lambda m, g: g[0].two.double(),
    "a hook": lambda m, g: g[0].register_forward_hook(lambda *_: None),
    "a global hook": lambda m, g: m.setitem(
        nn.modules.module._global_forward_hooks, 1, lambda *_: None
    ),
    "the default dtype": lambda m, _: torch.set_default_dtype(torch.float64),
    "deterministic operations": lambda m, _: torch.use_deterministic_algorithms(True),
    "the precision of products": lambda m, _: torch.set_float32_matmul_precision("medium"),
    "a kind of attention": lambda m, _: torch.backends.cuda.enable_math_sdp(False),
    "a setting of torch": lambda m, _: m.setattr("torch._functorch.config.debug_partitioner", True),
    "a variable of a library": lambda m, _: m.setenv("TORCH_LOGS", "x"),
    "a variable that code names": lambda m, _: m.setenv("NAMED_IN_THIS_FILE", "1"),
    "the strategy": lambda m, g: g.__setitem__(2, mesh(dp=4).to_json()),
    "the loss": lambda m, g: g.__setitem__(1, F.l1_loss),
    "an option": lambda m, g: g.__setitem__(3, "bf16"),
    "tags": lambda m, g: g[4].update(layer="x"),
}  # fmt: skip

UNSEEN: dict[str, Callable[[list[Any]], object]] = {
    "random": lambda g: g.append(lambda: random.random()),
    "random of numpy": lambda g: g.append(lambda: np.random.rand()),
    "the time": lambda g: g.append(lambda: time.time()),
    "a file": lambda g: g.append(lambda: open("x")),  # noqa: SIM115
    "a path": lambda g: g.append(lambda: Path("x").read_text()),
    "safetensors": lambda g: g.append(lambda: load_file("x")),
    "eval": lambda g: g.append(lambda: eval("1")),
    "a generator": lambda g: g.append(generated()),
    "a generator of torch": lambda g: g.append(torch.Generator()),
    "random in a method": lambda g: g.append(Asks(random.random)),
    "a lock": lambda g: setattr(g[0], "lock", __import__("threading").Lock()),
    "an iterator": lambda g: setattr(g[0].options, "inner", iter([1])),
    "results from before": lambda g: g.append(lambda: used(2)) or used(2),
    "a kind of array": lambda g: g.append(ARRAY.view(Masked)),
    "an operation by its name": lambda g: g.append(lambda x: torch.ops.test_cache.scaled(x)),
    "a sparse tensor": lambda g: g.append(torch.eye(2).to_sparse()),
}


@pytest.fixture
def torch_settings() -> Iterator[None]:
    before = Flags.here()
    yield
    before.set()
    assert Flags.here() == before  # else all later keys differ


@pytest.fixture(scope="module")
def unchanged() -> Key:
    return key_of(*job())


def test_equal_jobs_have_equal_keys() -> None:
    one, other = key_of(*job()), key_of(*job())
    assert one.unseen is None
    assert one == other


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.usefixtures("torch_settings")
def test_a_change_has_another_key(
    name: str, unchanged: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = job()
    with monkeypatch.context() as patch:
        CHANGES[name](patch, given)
        key = key_of(*given)
    assert key.unseen or key.text != unchanged.text
    assert name == "a builtin function" or key.unseen is None


@pytest.mark.parametrize("name", UNSEEN)
def test_what_a_digest_cannot_cover_has_no_key(name: str) -> None:
    given = job()
    UNSEEN[name](given)
    assert key_of(*given).unseen


@pytest.mark.parametrize(
    "mode", [torch.no_grad(), torch.inference_mode(), torch.autocast("cpu"), Mode()]
)
def test_modes_have_no_key(mode: Any) -> None:
    given = job()
    with mode:
        assert key_of(*given).unseen


def test_a_user_module_counts_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "the_users_module.py"
    file.write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("the_users_module")
    before = key_of(1)
    file.write_text("x = 2\n")
    assert key_of(1).text != before.text
    assert module.x == 1
    del sys.modules["the_users_module"]


@pytest.mark.slow
def test_values_of_transformers_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries are extended and functions replaced where the model is not the user's."""
    transformers = pytest.importorskip("transformers")
    modeling = sys.modules[transformers.LlamaForCausalLM.__module__]
    shape = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**shape, num_attention_heads=2)
        )
    keys = [key_of(model)]
    for change in (
        lambda: monkeypatch.setitem(
            modeling.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", halved
        ),
        lambda: monkeypatch.setitem(
            modeling.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", functools.partial(halved, 1)
        ),
        lambda: monkeypatch.setitem(
            modeling.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", functools.partial(halved, 2)
        ),
        lambda: monkeypatch.setattr(modeling, "apply_rotary_pos_emb", halved),
        lambda: monkeypatch.setattr(modeling, "create_causal_mask", modeling.rotate_half),
        lambda: monkeypatch.setattr(modeling, "A_NUMBER", 1, raising=False),
        lambda: monkeypatch.setattr(modeling.LlamaMLP, "forward", halved),
        lambda: monkeypatch.setattr(model.config, "_attn_implementation_internal", "eager"),
        lambda: monkeypatch.setattr(model.config, "rms_norm_eps", 1e-3),
    ):
        change()
        keys.append(key_of(model))
    assert {key.unseen for key in keys} == {None}
    assert len({key.text for key in keys}) == len(keys)


def test_a_thread_of_a_library_is_not_in_the_key() -> None:
    """A progress bar of tqdm starts one, and its numbers differ in each process."""
    bars = [threading.Thread(target=time.sleep, args=(0,)) for _ in range(2)]
    texts = []
    for monitor in bars:
        monitor.start()
        texts.append(digest_of(shallow=[{"monitor": monitor}]).text)
        monitor.join()
    assert texts[0] == texts[1]


class Small(nn.Module):
    """Its forward may do something besides."""

    def __init__(self, besides: Callable[[], float] = lambda: 1.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.drop = nn.Dropout(0.5)
        self.besides = besides

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("layer"):
                x = self.drop(torch.relu(layer(x))) * self.besides()
        return x


def adamw(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def compiled(besides: Callable[[], float] | None = None, **how: Any) -> piper.Program:
    torch.manual_seed(0)
    model = Small() if besides is None else Small(besides)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    given: dict[str, Any] = {"inputs": (x,), "targets": (y,), "loss": mse_loss, "optimizer": adamw}
    return piper.compile(model, mesh(pp=2, microbatches=2), **{**given, **how})


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Torch imports and sets something at the first compilation of a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPER_CACHE", str(tmp_path_factory.mktemp("cache")))
        compiled()


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: None) -> Entries:
    monkeypatch.setenv("PIPER_CACHE", str(tmp_path))
    found = Entries.of_user()
    assert found is not None
    return found


def losses(program: piper.Program) -> list[float]:
    torch.manual_seed(1)
    with piper.launch(program, on="virtual") as trainer:
        batches = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(3)]
        found = [float(trainer.step(*batch).loss) for batch in batches]
        return [*found, *(x.double().sum().item() for x in trainer.state_dict().values())]


def test_a_hit_is_what_was_compiled(entries: Entries) -> None:
    first, again = compiled(), compiled()
    line = again.tracing.splitlines()[0]
    assert line.startswith("from the cache, compiled on 2")
    assert list(again.timings) == ["looking into the cache", line]
    assert "from the cache" not in first.tracing
    assert again.text() == first.text()
    assert losses(again) == losses(first) == losses(compiled(cache=False))
    assert all(map(torch.equal, again.example.tensors, first.example.tensors))  # and not its shapes
    (entry,) = entries
    assert entry.about is not None
    assert entry.about.what == "Small, 2 devices"


@pytest.mark.slow
def test_a_program_of_a_hit_compiles_batches_of_other_shapes(entries: Entries) -> None:
    compiled()
    with piper.launch(compiled(), on="virtual", shapes=1) as trainer:
        trainer.step(torch.randn(4, 4), torch.randn(4, 4))
    assert len(list(entries)) == 2


@pytest.mark.slow
def test_another_optimizer_has_its_own_plans(entries: Entries) -> None:
    compiled()
    how = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
    found, fresh = compiled(**how), compiled(cache=False, **how)
    assert "from the cache" in found.tracing
    assert found.text() == fresh.text()


@pytest.mark.slow
def test_warnings_are_repeated(entries: Entries) -> None:
    def contrastive(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out @ y.T, torch.arange(len(out)))

    for _ in range(2):
        with pytest.warns(piper.PiperWarning, match="is not that of the whole batch"):
            program = compiled(loss=contrastive)
    assert "from the cache" in program.tracing


def test_a_program_that_read_a_file_is_not_kept(entries: Entries, tmp_path: Path) -> None:
    file = tmp_path / "scale.npy"
    np.save(file, np.ones(1))
    program = compiled(functools.partial(read_scale, str(file)))
    assert f"not cached: {file} is read while the model is traced" in program.tracing
    assert not list(entries)


def read_scale(file: str) -> float:
    return float(np.load(file)[0])


TIMES = {"called": 0}


def counted() -> float:
    TIMES["called"] += 1
    return 1.0


def test_a_program_that_changed_its_globals_is_not_kept(entries: Entries) -> None:
    program = compiled(counted)
    assert "not cached: tracing the model changed it" in program.tracing
    assert not list(entries)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", ["program.json", "graphs.json", "constants.pt", "cached.json"])
def test_a_damaged_entry_is_compiled_again(entries: Entries, name: str) -> None:
    compiled()
    (entry,) = entries
    content = bytearray((entry.folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (entry.folder / name).write_bytes(content)
    assert "from the cache" not in compiled().tracing
    assert "from the cache" in compiled().tracing


def test_a_program_is_found_however_its_command_is_written(
    entries: Entries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell says it in a variable whose name stands in any code."""
    monkeypatch.setenv("_", "/usr/bin/python")
    compiled()
    monkeypatch.setenv("_", "../bin/python")
    assert "from the cache" in compiled().tracing


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PIPER_CACHE", str(tmp_path / "file"))
    assert "not cached: " in compiled().tracing


@pytest.mark.slow
def test_the_oldest_entries_are_removed(entries: Entries, monkeypatch: pytest.MonkeyPatch) -> None:
    for age in (300, 200, 100):
        compiled(seed=age)
        newest = next(iter(entries))
        os.utime(newest.folder / "checksums.json", (time.time() - age,) * 2)
    assert "from the cache" in compiled(seed=300).tracing  # used now
    monkeypatch.setattr("piper.program.cache.entries.LIMIT", sum(e.nbytes for e in entries))
    compiled(seed=1)
    found = {seed: "from the cache" in compiled(seed=seed).tracing for seed in (300, 100)}
    assert found == {300: True, 100: True}
    assert len(list(entries)) == 3


@pytest.mark.slow
def test_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIPER_CACHE", "off")
    assert "looking into the cache" not in compiled().timings
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("PIPER_CACHE")
    compiled()
    assert [path.name for path in tmp_path.iterdir()] == ["piper"]
