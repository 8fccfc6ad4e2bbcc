"""Steps captured as CUDA graphs equal steps without graphs. Run by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import piper
from piper.models import DenseConfig, DenseTransformer, MoEConfig, MoETransformer, lm_loss
from piper.strategies import mesh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DENSE = DenseConfig(vocab=257, dim=64, layers=8, heads=4, mlp_dim=96)
MOE = MoEConfig(vocab=257, dim=64, layers=8, heads=4, mlp_dim=96, experts=4)
STRATEGIES = {
    "one device": (DENSE, mesh(microbatches=2)),
    "1F1B": (DENSE, mesh(pp=4, microbatches=8)),
    "ZB-V": (DENSE, mesh(pp=2, schedule="zb-v", microbatches=4)),
    "DualPipeV": (MOE, mesh(pp=2, dp=2, ep=2, schedule="dualpipev", microbatches=4)),
    "ZeRO-2": (DENSE, mesh(pp=2, dp=2, zero=2, microbatches=2)),
    "ZeRO-3": (DENSE, mesh(dp=2, zero=3, microbatches=2)),
}
OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "fused AdamW": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "fused SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
}


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Embedding and index gradients use atomics on CUDA by default."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def compiled(config: DenseConfig, strategy: piper.Strategy, **options: object) -> piper.Program:
    torch.manual_seed(0)
    model = (MoETransformer if isinstance(config, MoEConfig) else DenseTransformer)(config)
    x, y = batch(0)
    what = {"optimizer": OPTIMIZERS["fused AdamW"], "clip_norm": 1.0, **options}
    return piper.compile(
        model, strategy, inputs=(x,), targets=(y,), loss=lm_loss, device="cuda", **what
    )


def batch(seed: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randint(257, (16, 33), generator=draws)
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def trained(trainer: piper.Trainer, steps: range) -> list[Tensor]:
    """The losses and norms of these steps."""
    found = []
    for seed in steps:
        result = trainer.step(*batch(seed))
        assert result.grad_norm is not None
        found += [result.loss, result.grad_norm]
    return [x.cpu() for x in found]


def assert_same(program: piper.Program, tolerance: float = 0.0) -> None:
    with piper.launch(program) as usual, piper.launch(program, cuda_graphs=True) as graphed:
        near = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
        near(trained(graphed, range(6)), trained(usual, range(6)))
        near(graphed.state_dict(), usual.state_dict())


@pytest.mark.parametrize("name", STRATEGIES)
def test_graphs_change_nothing(name: str) -> None:
    assert_same(compiled(*STRATEGIES[name]))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_and_schedules(optimizer: str) -> None:
    decay = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    options = {"optimizer": OPTIMIZERS[optimizer], "scheduler": decay}
    # the learning rate is fp32 on the device; AdamW without fusion computes its factors there too
    assert_same(compiled(*STRATEGIES["1F1B"], **options), 1e-5)


def test_a_learning_rate_on_the_host_is_refused() -> None:
    decay = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    sgd = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
    assert_same(compiled(*STRATEGIES["one device"], optimizer=sgd))
    program = compiled(*STRATEGIES["one device"], optimizer=sgd, scheduler=decay)
    with pytest.raises(piper.PiperError, match="make it fused=True"):
        piper.launch(program, cuda_graphs=True)


def test_a_schedule_of_more_than_the_learning_rate() -> None:
    cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20)
    assert_same(compiled(*STRATEGIES["one device"], scheduler=cycle), 1e-5)


def test_inductor_programs() -> None:
    assert_same(compiled(*STRATEGIES["1F1B"], compiler="inductor"))


def test_other_work_between_steps(tmp_path: Path) -> None:
    """Evaluations, profiles and checkpoints do not disturb a captured step."""
    program = compiled(*STRATEGIES["1F1B"])
    with piper.launch(program) as usual, piper.launch(program, cuda_graphs=True) as graphed:
        for trainer in (usual, graphed):
            trained(trainer, range(4))
            trainer.evaluate(*batch(50))
            trainer.profile(*batch(51))
            trained(trainer, range(4, 5))
        usual.save(tmp_path / "a")
        graphed.save(tmp_path / "b")
        assert trained(graphed, range(5, 9)) == trained(usual, range(5, 9))
        usual.load(tmp_path / "b")
        graphed.load(tmp_path / "a")
        assert trained(graphed, range(5, 9)) == trained(usual, range(5, 9))


def mean(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"mean": logits.mean()}


def test_results_stay_when_the_next_step_is_replayed() -> None:
    dropless = replace(MOE, capacity_factor=None)
    program = compiled(dropless, mesh(dp=2, ep=2, microbatches=2), outputs=mean)
    with piper.launch(program) as usual, piper.launch(program, cuda_graphs=True) as graphed:
        should, found = ([t.step(*batch(i)) for i in range(6)] for t in (usual, graphed))
    for one, other in zip(should, found, strict=True):
        torch.testing.assert_close(dict(other.outputs), dict(one.outputs))
        assert one.expert_load
        for name, load in one.expert_load.items():
            assert torch.equal(other.expert_load[name].cpu(), load.cpu())
    assert len({float(x.outputs["mean"]) for x in found}) == 6


def test_random_numbers_are_refused() -> None:
    program = compiled(replace(DENSE, dropout=0.1), mesh())
    with pytest.raises(piper.PiperError, match="draws random numbers"):
        piper.launch(program, cuda_graphs=True)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("graphs", [False, True], ids=["streams", "graphs"])
def test_the_host_never_waits_for_the_gpu(name: str, graphs: bool) -> None:
    program = compiled(*STRATEGIES[name])
    x, y = (t.cuda() for t in batch(0))
    with piper.launch(program, cuda_graphs=graphs) as trainer:
        for _ in range(3):
            trainer.step(x, y)
        torch.cuda.synchronize()
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                trainer.step(x, y)
        finally:
            torch.cuda.set_sync_debug_mode(before)
