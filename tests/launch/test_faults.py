"""Messages between processes, through a real store, when one of them fails or hangs."""

from __future__ import annotations

import functools
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import piper
from piper.ir.plan.instructions import COMMUNICATING, Verb
from piper.launch.watch.faults import described, peers_of
from piper.launch.watch.heartbeat import SILENT, Heartbeat
from piper.launch.watch.liveness import Monitor
from piper.launch.workers.process_links import refuse_too_few_gpus
from tests.scripts.cases import ON_FOUR

NAME = "stages of experts, counted, clipped, scheduled"
TIMEOUT = 60.0


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@functools.cache
def program() -> piper.Program:
    return ON_FOUR[NAME].compile()


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )


def neighbours(store: dist.Store, clock: Clock) -> list[Heartbeat]:
    return [Heartbeat(store, program().devices, number, TIMEOUT, clock) for number in range(4)]


def asked(everyone: list[Heartbeat], clock: Clock, seconds: float) -> list[str | None]:
    """The answer of each, one second later."""
    clock.now += 1
    return [one.problem(seconds) for one in everyone]


def test_an_error_is_told_to_all(store: dist.Store) -> None:
    clock = Clock()
    everyone = neighbours(store, clock)
    assert asked(everyone, clock, 0.0) == [None] * 4
    everyone[2].tell("device 2 failed: ValueError: no")
    everyone[3].tell("device 3 failed: a consequence")
    for number, said in enumerate(asked(everyone, clock, 0.0)):
        assert said == f"device 2 failed: ValueError: no (device {number} ends with it)"


def test_a_silent_process_is_named(store: dist.Store) -> None:
    clock = Clock()
    everyone = neighbours(store, clock)
    asked(everyone, clock, 0.0)
    living = [everyone[i] for i in (0, 1, 3)]
    for second in range(int(SILENT) + 1):
        assert asked(living, clock, 6.0 + second) == [None] * 3
    said = asked(living, clock, 30.0)
    assert said[0] is not None
    assert "device 2 gave no sign of life" in said[0]
    assert all(text is not None and "device 2" in text for text in said)


def test_whoever_lives_may_take_its_time(store: dist.Store) -> None:
    clock = Clock()
    everyone = neighbours(store, clock)
    for second in range(50):
        assert asked(everyone, clock, float(second)) == [None] * 4
    said = asked(everyone, clock, TIMEOUT + 1)
    assert said[0] is not None
    assert said[0].startswith("device 0 has waited 61 s")
    assert "device 1 is" in said[0]


def test_a_store_that_is_gone() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, timeout=timedelta(seconds=5))
    clock = Clock()
    (one, *_) = neighbours(client, clock)
    assert asked([one], clock, 0.0) == [None]
    del host
    (said,) = asked([one], clock, 0.0)
    assert said is not None
    assert "cannot reach the job's store" in said
    one.tell("nobody hears this")


def test_the_monitor_counts_from_the_end_of_what_was_watched_before() -> None:
    seen: list[float] = []
    failed = threading.Event()

    def stuck(seconds: float) -> str | None:
        seen.append(seconds)
        return "too long" if seconds > 0.5 else None

    monitor = Monitor(stuck, lambda text: failed.set())
    try:
        monitor.watch(lambda: len(seen) > 1)
        monitor.watch(lambda: False)
        assert failed.wait(20)
    finally:
        monitor.close()
    assert seen[-1] > 0.5


def test_instructions_are_described_with_their_participants() -> None:
    plan = program().plan_of(0)
    found = {
        x.verb: described(plan, pc, 0)
        for pc, x in enumerate(plan.instructions)
        if x.verb in COMMUNICATING and peers_of(x, 0)
    }
    assert set(found) == {Verb.SEND, Verb.RECV, Verb.COLLECTIVE}
    assert found[Verb.SEND].endswith("with device 1")
    assert found[Verb.RECV].endswith("with device 1")
    assert found[Verb.COLLECTIVE].endswith("with devices 1, 2, 3")  # the norm


@pytest.mark.skipif(torch.cuda.is_available(), reason="has one")
def test_a_machine_without_gpus_is_named() -> None:
    with pytest.raises(piper.PiperError, match="this machine has no GPU"):
        refuse_too_few_gpus(2, share=True)
