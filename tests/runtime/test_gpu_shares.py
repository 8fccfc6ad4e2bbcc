"""Streams with shares of a real GPU: the SMs their kernels run on, and unchanged training results.
Run by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.ir.rules import Rest, Sms, StreamRule
from piper.models import MoEConfig, MoETransformer, lm_loss
from piper.runtime.streams.sm_shares import Shares
from piper.strategies.directives import Stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
BLOCKS = 2000
KERNEL = """
extern "C" __global__ void sm(int* out) {
    int mine;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(mine));
    long long begun = clock64();
    while (clock64() - begun < 20000);  // so that blocks need all SMs that there are
    if (threadIdx.x == 0) out[blockIdx.x] = mine;
}
"""


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Embedding and index gradients use atomics on CUDA by default."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


Where = Callable[[torch.cuda.Stream], set[int]]


@pytest.fixture(scope="module")
def where() -> Where:
    """A function that returns the SMs on which a stream's kernels run."""
    kernel = torch.cuda._compile_kernel(KERNEL, "sm")

    def run(stream: torch.cuda.Stream) -> set[int]:
        out = torch.full((BLOCKS,), -1, dtype=torch.int32, device=DEVICE)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            kernel((BLOCKS, 1, 1), (32, 1, 1), (out,))
        torch.cuda.synchronize()
        return set(out.tolist())

    return run


def shares(**asked: Sms) -> Shares:
    return Shares(DEVICE, {name: StreamRule(sms=sms) for name, sms in asked.items()})


def total() -> int:
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


def test_shares_are_disjoint_and_as_large_as_they_say(where: Where) -> None:
    found = shares(a=16, rest=Rest.REST, b=24)
    ran = {name: where(found.stream(name, 0)) for name in ("a", "b", "rest")}
    assert {name: len(sms) for name, sms in ran.items()} == {
        name: found.sms_of(name) for name in ran
    }
    assert found.sms_of("a") >= 16
    assert found.sms_of("b") >= 24
    assert sum(map(len, ran.values())) == total() == len(set().union(*ran.values()))


def test_streams_of_one_share_run_on_the_same_sms(where: Where) -> None:
    """Also the two directions of messages, and all streams that ask for the rest."""
    found = shares(a=16, b=Rest.REST, c=Rest.REST)
    send, receive = (found.stream("a", 0) for _ in range(2))
    assert send != receive
    assert where(send) == where(receive)
    assert where(found.stream("b", 0)) == where(found.stream("c", 0))


def test_the_rest_alone_is_the_whole_gpu(where: Where) -> None:
    found = shares(a=Rest.REST)
    assert found.sms_of("a") == total() == len(where(found.stream("a", 0)))


def test_other_streams_run_anywhere(where: Where) -> None:
    found = shares(a=16)
    found.stream("a", 0)
    assert len(where(torch.cuda.Stream())) == total()


def test_a_stream_has_the_priority_asked_for() -> None:
    found = shares(a=16)
    usual, urgent = (found.stream("a", priority) for priority in (0, -1))
    assert urgent.priority < usual.priority


def test_a_tensor_may_outlive_the_shares_that_used_it() -> None:
    found = shares(a=16)
    used, stream = torch.ones(1000, device=DEVICE), found.stream("a", 0)
    used.record_stream(stream)
    with torch.cuda.stream(stream):
        made = used + 1
    del found
    stream.synchronize()
    del used, stream  # torch records an event on the stream when the tensor is freed
    torch.cuda.empty_cache()
    assert made.sum().item() == 2000


def test_what_the_gpu_cannot_give_is_refused() -> None:
    with pytest.raises(piper.PiperError, match=f"'a' asks for {total() + 1}, which takes"):
        shares(a=total() + 1)
    with pytest.raises(piper.PiperError, match="do not fit on the GPU"):
        shares(a=total() // 2 + 8, b=total() // 2 + 8)


# --- training ------------------------------------------------------------------------------------


def trained(*streams: Stream) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final state of five steps: two stages of two devices, sharded experts."""
    strategy = piper.Strategy(
        [
            piper.partition("layer", into="PP", parts=2),
            piper.split(parts=2),
            piper.place({"PP": 0}, devices=[0, 2], stream="pp"),
            piper.place({"PP": 1}, devices=[1, 3], stream="pp"),
            piper.replicate({"EP": "-"}, zero=1, bucket_mb=0.05, reduce_stream="dp"),
            piper.shard({"EP": "*"}, stream="ep"),
            *streams,
        ]
    )
    torch.manual_seed(0)
    model = MoETransformer(MoEConfig(vocab=257, dim=64, layers=4, heads=4, mlp_dim=96, experts=4))
    x = torch.randint(257, (8, 33))
    program = piper.compile(
        model,
        strategy,
        inputs=(x,),
        targets=(x,),
        loss=lm_loss,
        optimizer=sgd,
        device="cuda",
    )
    with piper.launch(program) as trainer:
        losses = [float(trainer.step(batch, batch).loss) for batch in batches()]
        return losses, {name: x.cpu() for name, x in trainer.state_dict().items()}


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batches() -> list[Tensor]:
    draws = torch.Generator().manual_seed(1)
    return [torch.randint(257, (8, 33), generator=draws) for _ in range(5)]


def test_training_with_shares_gives_the_same_numbers() -> None:
    """Experts and messages have their own shares; all other computation has the rest."""
    losses, state = trained(
        piper.stream({"EP": "*"}, "experts", sms=32),
        piper.stream(None, "pp", priority=-1, sms=8),
        piper.stream(None, "compute", sms="rest"),
    )
    expected_losses, expected = trained()
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    for name, x in expected.items():
        assert float((state[name] - x).abs().max() / x.abs().max()) < 1e-6, name


def test_a_program_that_asks_for_too_much_is_refused_at_its_launch() -> None:
    with pytest.raises(piper.PiperError, match="'experts' asks for 100000"):
        trained(piper.stream({"EP": "*"}, "experts", sms=100_000))
