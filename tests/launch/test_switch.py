"""A switch of strategy in the middle of a run, from memory to memory: losses and state continue as
if nothing had happened."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import PiperError, annotate, place
from piper.base.errors import PiperWarning
from piper.base.tracking import Tracker
from piper.capture.model import capture
from piper.capture.trace.computation import Computation, OtherOperation
from piper.launch.device.device_programs import device_programs
from piper.launch.device.next_state import NextState
from piper.launch.state.saving import index_of
from piper.state.checkpoint import tensor_files as files
from piper.state.checkpoint.boxes import Box
from piper.state.device.checkpoint_parts import all_held
from piper.state.device.resharding import IN_FLIGHT, exchange, parcels
from tests.scripts import switched
from tests.scripts.switched import ON_FOUR, WIDTH, Net, batch, losses
from tests.state.test_checkpoints import contents
from tests.training import sgd, shared_captures

ROOT = Path(__file__).parents[2]
LIMIT = 300
"""Seconds after which a run counts as hanging."""


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


class Small(nn.Module):
    """Equal layers with dropout: compiles quickly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with annotate("layer"):
                x = F.dropout(torch.tanh(layer(x)), 0.2, self.training)
        return x * self.gain


@functools.cache
def net(kind: type[nn.Module]) -> nn.Module:
    return switched.model(kind)


@functools.cache
def made(name: str, kind: type[nn.Module] = Small, **options: Any) -> piper.Program:
    return switched.compiled(name, net(kind), **options)


@functools.cache
def expected(steps: int, kind: type[nn.Module] = Small) -> Tensor:
    """The losses of all steps under one strategy."""
    with piper.launch(made("one", kind)) as trainer:
        return torch.tensor(losses(trainer, [trainer.program] * steps), dtype=torch.float64)


def assert_close(found: list[float], kind: type[nn.Module] = Small) -> None:
    """Equal up to reduction order."""
    mine = torch.tensor(found, dtype=torch.float64)
    torch.testing.assert_close(mine, expected(len(found) // 2, kind), rtol=1e-9, atol=0.0)


def test_five_strategies_in_one_run(tmp_path: Path) -> None:
    """Includes dropout and a scheduler; the state has the same bits before and after a switch."""
    names = ["one", "hsdp", "pp2", "zero3", "pp4"]
    found = []
    with piper.launch(made("one")) as trainer:
        for step, name in enumerate(names):
            if step:
                before = contents(trainer, tmp_path / "before")
                trainer.switch(made(name))
                after = contents(trainer, tmp_path / "after")
                assert before.keys() == after.keys()
                assert all(torch.equal(x, after[key]) for key, x in before.items()), name
            assert trainer.steps == step
            found.append(float(trainer.step(*batch(step)).loss))
            found.append(float(trainer.evaluate(*batch(step)).loss))
    assert_close(found)


@pytest.mark.slow
def test_tensor_and_expert_parallelism() -> None:
    programs = [made(name, Net) for name in ["tp2", "ep4", "zero3", "tp2", "one"]]
    with piper.launch(programs[0]) as trainer:
        assert_close(losses(trainer, programs), Net)


@pytest.mark.slow
def test_worker_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start and end as the programs need them; the bits equal those of virtual devices,
    also after a refused switch."""
    monkeypatch.setattr(files, "BLOCK", 96)
    programs = [made(name, Net) for name in ["pp2", "zero3", "one", "hsdp", "tp2"]]
    with piper.launch(programs[0]) as trainer:
        should = losses(trainer, programs)
        after = float(trainer.step(*batch(9)).loss)
    with piper.launch(programs[0], on="processes", timeout=120) as trainer:
        assert losses(trainer, programs) == should
        with pytest.raises(PiperError, match="its optimizer is SGD, the one before has AdamW"):
            trainer.switch(made("hsdp", Net, optimizer=sgd, scheduler=None))
        assert float(trainer.step(*batch(9)).loss) == after


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    """Ranks without a device in the program wait, and get the loss."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    script = ROOT / "tests" / "scripts" / "switched.py"
    run = subprocess.run(
        [*command, "4", str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=LIMIT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert not run.returncode, run.stderr
    programs = [made(name, Net) for name in ON_FOUR]
    with piper.launch(programs[0]) as trainer:
        should = losses(trainer, programs)
        state = trainer.state_dict()
        trainer.switch(programs[1])
        should.append(float(trainer.step(*batch(9)).loss))
    for rank in range(4):
        found = torch.load(tmp_path / f"found.{rank}")
        assert found["losses"] == should
        assert all(torch.equal(x, state[name]) for name, x in found["state"].items())
        assert "there is no process for device 4: torchrun started 4" in found["why"]


# messages


def test_a_box_without_another() -> None:
    whole = Box((1, 0, 2), (4, 3, 5))
    for other in (Box((2, 1, 0), (2, 8, 4)), Box((0, 0, 0), (9, 9, 9)), Box((7, 0, 0), (1, 1, 1))):
        seen = torch.zeros(9, 9, 9, dtype=torch.int8)
        rest = [part for box in whole.without(other) for part in box.cut(4)]
        assert all(box.numel <= 4 for box in rest)
        for box in rest:
            box.of(seen).add_(1)
        should = torch.zeros_like(seen)
        whole.of(should).fill_(1)
        if other.start != (7, 0, 0):
            other.of(should).fill_(0)
        assert torch.equal(seen, should)


@pytest.mark.parametrize(("before", "after"), [("zero3", "pp2"), ("pp4", "hsdp")])
def test_each_slice_is_sent_once(before: str, after: str) -> None:
    """Each device receives every slice that it needs and does not have, once."""
    with piper.launch(made(before)) as trainer:
        trainer.step(*batch(0))
        group: Any = trainer._session.devices
        present = {device.number: device for device in group.local.devices}
        parts = [device.give() for device in group.local.devices]
        index = index_of(trainer.program, parts, None)
        wants = {}
        of = device_programs(made(after))
        for number in made(after).devices:
            here = present[number].state if number in present else None
            room = NextState(of(number), torch.device("cpu"), index, here, capturable=False)
            wants[number] = room.requests
    for number, requests in wants.items():
        for one in requests:
            seen = torch.zeros(one.shape, dtype=torch.int8)
            for parcel in parcels(index, {number: requests}, number):
                for _, want in parcel.moves:
                    if want.location == one.location:
                        want.box.of(seen).add_(1)
            assert bool((one.box.of(seen) == 1).all())
            seen.zero_()
            for held in all_held(present[number].state) if number in present else ():
                if (held.table, held.name) == (one.table, one.name):
                    held.box.of(seen).fill_(1)
            assert not bool(one.box.of(seen).any()), "it was there"


class Queues:
    """One process's link to the others, which are threads here."""

    def __init__(self, me: int, queues: defaultdict[tuple[int, int, int], Queue[Tensor]]) -> None:
        self._me = me
        self._queues = queues

    def send(self, data: Tensor, to: int, tag: int) -> Any:
        queue = self._queues[self._me, to, tag]
        queue.put(data)
        return SimpleNamespace(wait=queue.join)

    def receive(self, out: Tensor, source: int, tag: int) -> Any:
        queue = self._queues[source, self._me, tag]

        def wait() -> None:
            out.copy_(queue.get(timeout=LIMIT))
            queue.task_done()

        return SimpleNamespace(wait=wait)


def test_nobody_holds_more_than_both_states_and_a_few_parcels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted for each process separately; the result equals that of a switch in one process."""
    monkeypatch.setattr(files, "BLOCK", 256)
    program = made("pp2")
    queues: defaultdict[tuple[int, int, int], Queue[Tensor]] = defaultdict(Queue)
    with piper.launch(made("zero3")) as trainer:
        trainer.step(*batch(0))
        group: Any = trainer._session.devices
        devices = {device.number: device for device in group.local.devices}
        parts = [device.give() for device in devices.values()]
        gives = dict(group.local.devices[0].links.gives)
        index = index_of(trainer.program, parts, None)
        of = device_programs(program)
        wants: dict[int, Any] = {}
        ready = threading.Barrier(len(devices))

        def process(number: int) -> tuple[int, int]:
            """The peak of allocated bytes, and the bytes of the resulting state."""
            with Tracker() as tracker:
                mine = of(number) if number in program.devices else None
                here = devices[number].state
                room = NextState(mine, torch.device("cpu"), index, here, capturable=False)
                wants[number] = room.requests
                ready.wait(LIMIT)
                rows = parcels(index, wants, number)
                exchange(number, gives[number], room.missing, rows, Queues(number, queues))
                tensors = [] if room.state is None else list(room.settled().tensors())
            rooms[number] = room.state
            kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
            return tracker.peak, sum(kept.values())

        rooms: dict[int, Any] = {}
        with ThreadPoolExecutor(len(devices)) as pool:
            found = list(pool.map(process, devices))
        trainer.switch(program)
        for device in group.local.devices:
            pairs = zip(device.state.tensors(), rooms[device.number].tensors(), strict=True)
            assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    assert any(kept > 4 * files.BLOCK for _, kept in found)
    for peak, kept in found:
        assert peak <= kept + IN_FLIGHT * files.BLOCK


# refused switches


class Bent(Small):
    """The same names and shapes, another activation function."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with annotate("layer"):
                x = F.dropout(torch.sin(layer(x)), 0.2, self.training)
        return x * self.gain


class Other(Small):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))


def faster(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def slower(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def with_training(**changes: Any) -> piper.Program:
    program = made("one")
    return replace(program, training=replace(program.training, **changes))


def frozen() -> piper.Program:
    program = made("one")
    buckets = [replace(b, trained="gain" not in b.parameters) for b in program.buckets]
    return replace(program, buckets=tuple(buckets))


REFUSED: list[tuple[Callable[[], piper.Program], str]] = [
    (lambda: made("one", Other), "it is of another model, in which gain differs"),
    (frozen, "it is of another model, in which gain is frozen"),
    (
        lambda: with_training(optimizer=sgd, scheduler=None),
        "its optimizer is SGD, the one before has AdamW",
    ),
    (
        lambda: with_training(optimizer=faster),
        "its AdamW's lr is 0.02, the one before has 0.01",
    ),
    (
        lambda: with_training(scheduler=slower),
        "its StepLR's step_size is 3, the one before has 2",
    ),
    (
        lambda: made("pp2", Bent),
        "it is of another model: the model computes aten.sin.default where the one before computes "
        "aten.tanh.default; compile it with the same, or say switch(program, allow=['model']) if "
        "it is to change",
    ),
    (
        lambda: made("one", loss=F.l1_loss),
        "it has another loss: the loss computes aten.l1_loss.default where the one before computes "
        "aten.mse_loss.default; compile it with the same, or say switch(program, allow=['loss']) "
        "if it is to change",
    ),
    *(
        (
            functools.partial(with_training, **{what: value}),
            f"its {what} is {value}, the one before has {before}: compile it with the same, or say "
            f"switch(program, allow=[{what!r}]) if it is to change",
        )
        for what, value, before in [
            ("clip_norm", 1.0, None),
            ("on_nan", "skip", None),
            ("precision", "bf16", "fp32"),
        ]
    ),
    (lambda: with_training(scheduler=None), "its scheduler is None, the one before has StepLR"),
]


@pytest.mark.slow
def test_programs_that_are_refused_change_nothing(tmp_path: Path) -> None:
    with piper.launch(made("one")) as trainer:
        trainer.step(*batch(0))
        before = contents(trainer, tmp_path / "before")
        for program, words in REFUSED:
            with pytest.raises(PiperError) as caught:
                trainer.switch(program())
            assert str(caught.value) == (
                "the trainer cannot switch to this program, and nothing has changed: " + words
            )
            assert trainer.program is made("one")
        with pytest.raises(PiperError, match=r"switch takes what piper\.compile returns, not a Sm"):
            trainer.switch(net(Small))  # type: ignore[arg-type]
        after = contents(trainer, tmp_path / "after")
        assert all(torch.equal(x, after[key]) for key, x in before.items())
        assert float(trainer.step(*batch(1)).loss) == expected(2)[2]
        with pytest.warns(PiperWarning, match="compiled with seed=7, the one before with seed=0"):
            trainer.switch(with_training(seed=7))


def test_what_is_allowed_changes() -> None:
    """Each of these changes would be refused without ``allow``."""
    with piper.launch(made("one")) as trainer:
        trainer.step(*batch(0))
        trainer.switch(made("hsdp", clip_norm=0.01), allow=["clip_norm"])
        assert float(trainer.step(*batch(1)).grad_norm) > 0.01
        trainer.switch(made("one"), allow=["clip_norm"])
        trainer.switch(made("pp2", loss=F.l1_loss), allow=["loss"])
        x, y = batch(2)
        absolute = trainer.evaluate(x, y).loss
        trainer.switch(made("one", Bent), allow=["model"])
        assert float(trainer.evaluate(x, y).loss) != float(absolute)
        with pytest.raises(PiperError, match="allow='lr' is unknown: one of model, loss"):
            trainer.switch(made("one"), allow=["lr"])


def test_the_precision_may_change() -> None:
    """fp32 weights become the optimizer's fp32 weights beside the bf16 copies."""
    x, y = (t.float() for t in batch(0))
    strategy = piper.Strategy([place({}, devices=[0])])

    def compiled(precision: str) -> piper.Program:
        return piper.compile(
            nn.Linear(WIDTH, WIDTH), strategy, inputs=(x,), targets=(y,), loss=F.mse_loss,
            optimizer=sgd, precision=precision,
        )  # fmt: skip

    with piper.launch(compiled("fp32")) as trainer:
        trainer.step(x, y)
        before = trainer.state_dict()
        trainer.switch(compiled("bf16"), allow="precision")
        after = trainer.state_dict()
        assert all(torch.equal(x, after[name]) for name, x in before.items())
        trainer.step(x, y)


class Pooled(nn.Module):
    """Attention whose number of heads and chosen token appear only as constants in the graph."""

    def __init__(self, heads: int = 2, token: int = 0) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.heads = heads
        self.token = token

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)[:, self.token]


def cubed(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(3).sum() / output.shape[0]


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).sum() / output.shape[0]


@pytest.mark.slow
def test_computations_are_compared_at_other_sizes() -> None:
    def computed(
        model: nn.Module | None = None,
        rows: int = 8,
        length: int = 6,
        loss: Callable[..., Tensor] = squared,
        **options: Any,
    ) -> Computation:
        x, y = torch.zeros(rows, length, WIDTH), torch.zeros(rows, WIDTH)
        given = {"inputs": (x,), "targets": (y,), "loss": loss, **options}
        return capture(model or Pooled(), **given).computation

    first = computed()
    for other in (
        computed(),
        computed(microbatches=4),
        computed(rows=24),
        computed(length=9),
        computed(rows=24, length=9, microbatches=3),
        computed(outputs=lambda output, target: (output.mean(), target.sum())),
    ):
        assert first.difference(other) is None
    for rows in (8, 24, 4):
        heads = first.difference(computed(Pooled(heads=4), rows))
        assert heads is not None
        assert heads.two == f"aten.reshape.default(%4, [{rows}, 6, 4, -1])"
    for sizes in ({}, {"rows": 16}, {"length": 12}):
        token = first.difference(computed(Pooled(token=1), **sizes))
        assert token is not None
        assert (token.place, token.two) == ("the model", "aten.select.int(%9, 1, 1)")
        power = first.difference(computed(loss=cubed, **sizes))
        assert power is not None
        assert (power.place, power.two) == ("the loss", "aten.pow.Tensor_Scalar(%11, 3)")
    more = first.difference(computed(loss=lambda output, target: 2 * squared(output, target)))
    assert more == OtherOperation("the loss", "nothing", "aten.mul.Tensor")
