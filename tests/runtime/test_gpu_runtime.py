"""Plans on CUDA streams against one device, and measured against predicted memory. Run by hand."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import piper
from piper.base.tracking import Tracker
from piper.capture.model import capture
from piper.models import DenseConfig, DenseTransformer, MoEConfig, MoETransformer, lm_loss
from piper.strategies import mesh
from tests.one_device import SingleDevice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DENSE = DenseConfig(vocab=257, dim=64, layers=4, heads=4, mlp_dim=96)
MOE = MoEConfig(vocab=257, dim=64, layers=4, heads=4, mlp_dim=96, experts=4)
LARGE = DenseConfig(vocab=8192, dim=512, layers=4, heads=8, mlp_dim=1536, max_seq=512)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Embedding and index gradients use atomics on CUDA by default."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def made(config: DenseConfig) -> nn.Module:
    torch.manual_seed(0)
    return (MoETransformer if isinstance(config, MoEConfig) else DenseTransformer)(config)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def one_forward_one_backward(stages: int, microbatches: int, split: bool) -> list[object]:
    """1F1B; with ``split``, the two halves of each backward follow each other."""
    directives = []
    for stage in range(stages):
        ahead = min(stages - stage, microbatches)
        rows = [("F", m) for m in range(ahead)]
        for m in range(microbatches):
            rows += [("BI", m), ("BW", m)] if split else [("B", m)]
            if m + ahead < microbatches:
                rows.append(("F", m + ahead))
        filters = [[{"PP": stage, "MB": m, "PASS": which}] for which, m in rows]
        directives.append(piper.order(*filters))
    return directives


def pipeline(stages: int, microbatches: int, *, split: bool = False) -> piper.Strategy:
    return piper.Strategy(
        [
            piper.partition("layer", into="PP", parts=stages),
            piper.split(parts=microbatches),
            *(piper.place({"PP": s}, devices=[s]) for s in range(stages)),
            *one_forward_one_backward(stages, microbatches, split),
        ]
    )


def composed(zero: int, *, limited: bool = False) -> piper.Strategy:
    """Two stages of two devices, sharded experts, each kind of work on its own stream."""
    return piper.Strategy(
        [
            piper.partition("layer", into="PP", parts=2),
            piper.split(parts=2),
            piper.place({"PP": 0}, devices=[0, 2], stream="pp"),
            piper.place({"PP": 1}, devices=[1, 3], stream="pp"),
            piper.replicate({"EP": "-"}, zero=zero, bucket_mb=0.05, reduce_stream="dp"),
            piper.shard({"EP": "*"}, stream="ep"),
            *([piper.stream({"EP": "*"}, "experts", sms=32)] if limited else []),
        ]
    )


def compare(config: DenseConfig, strategy: piper.Strategy, parts: int, **options: object) -> float:
    """The largest difference of a parameter after five steps, relative to its largest element."""
    model = made(config)
    x = torch.randint(257, (8, 33))
    program = piper.compile(
        model,
        strategy,
        inputs=(x,),
        targets=(x,),
        loss=lm_loss,
        optimizer=sgd,
        device="cuda",
        **options,
    )
    captured = capture(
        model, inputs=(x,), targets=(x,), loss=lm_loss, microbatches=parts, device="cuda"
    )
    single = SingleDevice(captured, copy.deepcopy(model).cuda(), sgd)
    with piper.launch(program) as trainer:
        for _ in range(5):
            batch = torch.randint(257, (8, 33))
            ours, theirs = trainer.step(batch, batch), single.step(batch, batch)
        torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-6, atol=0)
        state = trainer.state_dict()
    differences = [
        (state[n].cuda() - p.detach()).abs().max() / p.detach().abs().max()
        for n, p in single.parameters.items()
    ]
    return float(torch.stack(differences).max())


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (2, 4), (4, 8)])
def test_pipelines_are_bitwise_equal(stages: int, microbatches: int, split: bool) -> None:
    assert compare(DENSE, pipeline(stages, microbatches, split=split), microbatches) == 0.0


def test_a_dropping_pipeline_is_bitwise_equal() -> None:
    assert compare(replace(DENSE, dropout=0.2), pipeline(2, 4), 4) == 0.0


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_composed_strategies_are_equal(zero: int) -> None:
    assert compare(MOE, composed(zero), 4) < 1e-6


def test_a_pinned_batch_may_be_filled_again() -> None:
    x = torch.randint(257, (8, 33))
    program = piper.compile(
        made(MOE), composed(0), inputs=(x,), targets=(x,), loss=lm_loss, optimizer=sgd,
        device="cuda",
    )  # fmt: skip
    batches = [torch.randint(257, (8, 33)) for _ in range(20)]
    room = torch.empty_like(x).pin_memory()
    found = []
    for pinned in (False, True):
        with piper.launch(program) as trainer:
            losses = []
            for batch in batches:
                given = room.copy_(batch) if pinned else batch
                losses.append(trainer.step(given, given).loss)
            found.append(torch.stack(losses).cpu())
    assert torch.equal(*found)


class Odd(nn.Module):
    """Parameters of odd sizes: what follows them is not aligned to 16 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.first, self.second = nn.Linear(64, 35), nn.Linear(35, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("layer"):
            return x + self.scale * self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_that_begin_anywhere(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Odd().to(dtype), torch.randn(128, 64, dtype=dtype)
    found = []
    for compiler in ("eager", "inductor"):
        program = piper.compile(
            model, mesh(dp=2, zero=3), inputs=(x,), targets=(x,), loss=nn.functional.mse_loss,
            optimizer=sgd, device="cuda", compiler=compiler,
        )  # fmt: skip
        with piper.launch(program) as trainer:
            found.append(torch.stack([trainer.step(x, x).loss for _ in range(3)]).cpu())
    near = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found[1], found[0], rtol=near, atol=near)


def test_a_stream_with_a_share_of_the_gpu() -> None:
    assert compare(MOE, composed(1, limited=True), 4) < 1e-6


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("remat", ["none", "min-cut", "all"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_memory_is_as_predicted(microbatches: int, remat: str, compiler: str) -> None:
    model = made(LARGE)
    x = torch.randint(8192, (8, 512))
    program = piper.compile(
        model,
        pipeline(1, microbatches),
        inputs=(x,),
        targets=(x,),
        loss=lm_loss,
        optimizer=sgd,
        device="cuda",
        remat=remat,
        compiler=compiler,
    )
    (memory,) = program.memory
    with piper.launch(program) as trainer:
        for _ in range(2):
            trainer.step(x, x)
        torch.cuda.synchronize()
        # memory of libraries exists before the step and is not part of the program's memory
        other = torch.cuda.memory_allocated() - memory.parameters - memory.optimizer
        torch.cuda.reset_peak_memory_stats()
        trainer.step(x, x)
        torch.cuda.synchronize()
        measured = torch.cuda.max_memory_allocated() - other
    ratio = measured / memory.peak
    print(f"\n{compiler} {remat} x{microbatches}: {measured:,} of {memory.peak:,}: {ratio:.3f}")
    assert ratio < 1.05
    if compiler == "eager":
        assert ratio > 0.95


class Together(Tracker):
    """A tracker that also records the peak over all trackers of the process."""

    everyone: ClassVar[list[Tracker]] = []
    most: ClassVar[int] = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.everyone.append(self)

    def _note(self, tensor: torch.Tensor, *, counts: bool) -> None:
        super()._note(tensor, counts=counts)
        Together.most = max(Together.most, sum(tracker.now for tracker in self.everyone))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_counted_memory_is_the_allocators(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices on one GPU: the count of both, and the allocator's peak."""
    monkeypatch.setattr(
        importlib.import_module("piper.launch.device.loaded_device"), "Tracker", Together
    )
    monkeypatch.setattr(Together, "everyone", [])
    monkeypatch.setattr(Together, "most", 0)
    model = made(LARGE)
    x = torch.randint(8192, (8, 512))
    program = piper.compile(
        model,
        piper.strategies.mesh(dp=2, zero=zero, microbatches=2),
        inputs=(x,),
        targets=(x,),
        loss=lm_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        device="cuda",
    )
    (memory,) = program.memory
    with piper.launch(program) as trainer:
        for _ in range(2):
            trainer.step(x, x)
        torch.cuda.synchronize()
        held = 2 * (memory.parameters + memory.optimizer + memory.at_peak[piper.MemoryKind.BUFFERS])
        other = torch.cuda.memory_allocated() - held
        torch.cuda.reset_peak_memory_stats()
        counted = trainer.measure_memory(x, x)
        torch.cuda.synchronize()
        allocated = torch.cuda.max_memory_allocated() - other
    total = Together.most
    shares = [f"{found.peak / memory.peak:.3f}" for found in counted.values()]
    print(
        f"\nzero={zero}: counted {total:,}, allocated {allocated:,}: {total / allocated:.3f}; "
        f"counted / predicted {' and '.join(shares)}"
    )
    assert all(found.peak <= 1.01 * memory.peak for found in counted.values())
    assert 0.95 < total / allocated < 1.05
