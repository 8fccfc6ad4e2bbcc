"""Training on worker processes: the numbers of virtual devices, and the handling of faults.

After any fault the caller soon gets an error that names it, and nothing is left: no process, no
folder, no port. Workers take seconds to start, so each set of workers first trains and then meets
one fault. ``python tests/scripts/repeat_faults.py 20`` repeats all tests of this file.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

import piper
from piper.launch.messages.pickling import by_value
from piper.runtime.comm.communicators import Endpoint, communicators_of
from piper.runtime.comm.gloo import Gloo
from tests.scripts import faulty
from tests.scripts.cases import ON_FOUR, ON_ONE, ON_TWO, acting, batches, differences, numbers
from tests.scripts.faulty import Act
from tests.scripts.leftovers import alive, children, grandchildren, listening, ports
from tests.training import shared_captures

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ROOT = Path(__file__).parents[2]
LIMIT = 120
"""Seconds after which a call counts as hanging."""


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


class Place:
    """A temporary folder, and a check that a test leaves nothing behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children, self._workers = children(), grandchildren()
        self._ports = ports()
        self._threads = set(threading.enumerate())

    @property
    def workers(self) -> list[int]:
        return sorted(grandchildren() - self._workers)

    @property
    def servers(self) -> list[int]:
        """The processes that fork workers."""
        return sorted(children() - self._children)

    def assert_nothing_left(self) -> None:
        assert not self.workers
        assert not self.servers
        assert not list(self.folder.iterdir())
        assert not ports() - self._ports
        for thread in set(threading.enumerate()) - self._threads:
            if not thread.daemon:  # the interpreter would wait for it at exit
                thread.join(LIMIT)
                assert not thread.is_alive()


@pytest.fixture
def place(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """An empty folder for temporary files; leftover workers are killed after the test."""
    found = Place(tmp_path_factory.mktemp("temporary"))
    monkeypatch.setattr(tempfile, "tempdir", str(found.folder))
    yield found
    for worker in found.workers:
        os.kill(worker, signal.SIGKILL)


@contextmanager
def no_hang(limit: int = LIMIT) -> Iterator[None]:
    """Fail if the body does not end within ``limit`` seconds."""

    def fail(*_: object) -> None:
        pytest.fail(f"it did not end within {limit} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@functools.cache
def compiled(case: str) -> piper.Program:
    """The program of a case, shared by all tests."""
    return {"one": ON_ONE, **ON_TWO, **ON_FOUR}[case].compile()


@functools.cache
def expected(case: str) -> dict[str, Tensor]:
    with piper.launch(compiled(case)) as trainer:
        return numbers(trainer)


def launch(program: piper.Program, **options: Any) -> piper.Trainer:
    return piper.launch(program, on="processes", threads=1, **options)


COMPILERS = {"sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"} | {
    "torch.export._trace",
    "torch.fx.experimental.symbolic_shapes",
    "transformers",
    "piper.capture.model",
    "piper.lower.lower",
    "piper.program.program",
}


def test_workers_import_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even after a step with an operation of the user's: compilers would take longer to import
    than all else."""
    (tmp_path / "asked.py").write_text(
        "import sys\n\ndef imported(device):\n    return set(sys.modules)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with launch(compiled("stages")) as trainer:
        trainer.step(*batches()[0])
        group: Any = trainer._session.devices
        there = group.call(importlib.import_module("asked").imported)
    assert [modules & COMPILERS for modules in there] == [set(), set()]


def test_all_groups_of_a_process_share_one_thread() -> None:
    """Torch's own gloo has a thread for each group, which wakes a hundred times a second."""

    def loops() -> int:
        tasks = Path("/proc/self/task").iterdir()
        return sum("gloo_tcp_loop" in (task / "comm").read_text() for task in tasks)

    before = loops()
    program = compiled("stages")
    plans = (program.plan_of(0), program.plan_of(1))
    limit = timedelta(seconds=60)
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:  # each waits for the other
        made = pool.map(lambda device: Gloo(Endpoint(device, store, limit), plans), (0, 1))
        assert [type(comm) for comm in made] == [Gloo, Gloo]
        assert len(communicators_of(plans, 0)) > 2
        assert loops() <= before + 2


# connections from outside


LOOPBACK = "0100007F"
"""127.0.0.1 in the format of ``/proc/net/tcp``."""


@pytest.mark.slow
def test_nothing_listens_where_a_stranger_could_come_from(place: Place) -> None:
    """All ports are on the loopback interface, and garbage sent to them has no effect."""
    with launch(compiled("stages")) as trainer, contextlib.ExitStack() as connections:
        assert not listening(os.getpid())
        found = [at for worker in place.workers for at in listening(worker)]
        assert found
        assert {address for address, _ in found} == {LOOPBACK}
        for said in (b"", b"GET / HTTP/1.1", bytes(range(256)) * 64):
            for _, port in found:
                connection = socket.create_connection(("127.0.0.1", port))
                connections.enter_context(connection)
                connection.sendall(said)
        with no_hang():
            assert not differences(numbers(trainer), expected("stages"))
        others = [path for path in place.folder.rglob("*") if path.stat().st_mode & 0o077]
        shut = {path for path in place.folder.iterdir() if not path.stat().st_mode & 0o077}
        assert all(shut.intersection(path.parents) for path in others)
    place.assert_nothing_left()


# pickling for workers


def test_a_compiled_class_at_the_top_of_a_script_is_imported_by_workers() -> None:
    """``safe_open`` claims to be in the module ``builtins``, but it is not."""

    def init(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        with safe_open(name, framework="pt") as file:
            tensor.copy_(file.get_tensor(name))

    kinds: Any = [safe_open, int, dict, types.FunctionType, type(None), nn.Linear]
    loaded, *others = pickle.loads(by_value((init, *kinds)))
    assert others == kinds
    assert loaded.__globals__["safe_open"] is safe_open

    class Elsewhere:
        pass

    Elsewhere.__module__ = "builtins"
    with pytest.raises(pickle.PicklingError, match="Elsewhere is a compiled class"):
        by_value(Elsewhere)


# equal numbers, then a fault


@pytest.mark.cases(fast=0, slow=3)
@pytest.mark.parametrize("case", [*ON_TWO, *ON_FOUR])
def test_the_numbers_of_virtual_devices(case: str, place: Place) -> None:
    with launch(compiled(case)) as trainer:
        assert not differences(numbers(trainer), expected(case))
    place.assert_nothing_left()


@pytest.mark.slow
def test_four_workers_and_one_is_killed_between_steps(place: Place, tmp_path: Path) -> None:
    case = "stages of experts, counted, clipped, scheduled"
    trainer = launch(compiled(case))
    assert len(place.workers) == 4
    with piper.launch(compiled(case)) as virtual:
        assert not differences(numbers(trainer), expected(case))
        trainer.save(tmp_path / "state")
        virtual.load(tmp_path / "state")
        assert virtual.steps == trainer.steps
        assert torch.equal(virtual.step(*batches()[1]).loss, trainer.step(*batches()[1]).loss)
        virtual.step(*batches()[0])
        virtual.save(tmp_path / "state")
        trainer.load(tmp_path / "state")
        assert not differences(numbers(trainer), numbers(virtual))
    os.kill(place.workers[2], signal.SIGKILL)
    message = r"the worker of device \d died.*: killed by SIGKILL"
    with no_hang(), pytest.raises(piper.PiperError, match=message) as caught:
        trainer.step(*batches()[0])
    place.assert_nothing_left()
    assert caught.tb is not None  # although the error is kept, with its traceback
    with pytest.raises(piper.PiperError, match="launch the program again"):
        trainer.step(*batches()[0])
    trainer.close()


@pytest.mark.slow
def test_a_worker_that_is_killed_in_a_step(place: Place) -> None:
    case = "experts, ZeRO-3, counted, clipped"
    trainer = launch(compiled(case))
    assert not differences(numbers(trainer), expected(case))
    message = (
        r"the worker of device 0 died at instruction \d+ \(F layer\[3\] MB\[0\]\): "
        "killed by SIGKILL"
    )
    with no_hang(), pytest.raises(piper.PiperError, match=message):
        trainer.step(*acting(Act.KILL))
    place.assert_nothing_left()


@pytest.mark.slow
def test_a_chunk_that_fails(place: Place) -> None:
    """In an evaluation, whose instructions differ from a step's."""
    case = "stages, tied weights, dropout"
    trainer = launch(compiled(case))
    assert not differences(numbers(trainer), expected(case))
    with no_hang(), pytest.raises(piper.PiperError) as caught:
        trainer.evaluate(*acting(Act.RAISE, row=-1))
    place.assert_nothing_left()
    message = str(caught.value)
    assert re.match(
        r"the worker of device 1 failed at instruction \d+ \(F layer\[3\] PP\[1\] MB\[3\]\): ",
        message,
    )
    assert "ToldToFailError: told to fail" in message.splitlines()[0]
    assert re.search(r"Traceback (?s:.*)faulty.py\", line \d+, in act", message)
    assert isinstance(caught.value.__cause__, faulty.ToldToFailError)


@pytest.mark.slow
def test_an_optimizer_that_fails(place: Place) -> None:
    optimizer = functools.partial(faulty.Worn, tried_in=os.getpid())
    trainer = launch(ON_ONE.compile(optimizer=optimizer))
    trainer.step(*batches()[0])
    trainer.step(*batches()[1])
    message = r"the worker of device 0 failed at instruction \d+ \(update .*worn out"
    with pytest.raises(piper.PiperError, match=message) as caught:
        trainer.step(*batches()[0])
    place.assert_nothing_left()
    assert isinstance(caught.value.__cause__, faulty.ToldToFailError)


@pytest.mark.slow
def test_a_stopped_worker_and_a_message_that_fills_its_socket(place: Place) -> None:
    model = ON_ONE.model()
    model.embed = nn.Embedding(1_000_000, 13)
    trainer = launch(ON_ONE.compile(model=model), timeout=3.0)
    (worker,) = place.workers
    os.kill(worker, signal.SIGSTOP)
    with no_hang(), pytest.raises(piper.PiperError, match="no answer within 3 s"):
        trainer.load_state_dict(model.state_dict())
    place.assert_nothing_left()


@pytest.mark.slow
def test_a_worker_that_is_stopped_in_a_step(place: Place) -> None:
    case = "two ways, in bf16"
    trainer = launch(compiled(case), timeout=3.0)
    assert not differences(numbers(trainer), expected(case))
    with no_hang(), pytest.raises(piper.PiperError, match=r"within 3 s|[Tt]imed out"):
        trainer.step(*acting(Act.STOP))
    place.assert_nothing_left()


@pytest.mark.slow
def test_a_worker_that_ends_by_itself(place: Place) -> None:
    trainer = launch(compiled("one"))
    message = "device 0 died at instruction .*exit code 0"
    with no_hang(), pytest.raises(piper.PiperError, match=message):
        trainer.step(*acting(Act.EXIT))
    place.assert_nothing_left()


@pytest.mark.slow
def test_a_worker_that_is_killed_between_a_step_and_an_evaluation(place: Place) -> None:
    trainer = launch(compiled("one"))
    trainer.step(*batches()[0])
    os.kill(place.workers[0], signal.SIGKILL)
    message = "the worker of device 0 died: killed by SIGKILL"
    with no_hang(), pytest.raises(piper.PiperError, match=message):
        trainer.evaluate(*batches()[0])
    place.assert_nothing_left()


@pytest.mark.slow
def test_the_process_that_forks_workers_is_killed(place: Place) -> None:
    """The workers end with the trainer all the same."""
    with launch(compiled("one")):
        workers = place.workers
        (server,) = place.servers
        os.kill(server, signal.SIGKILL)
    with no_hang():
        while any(map(alive, workers)):
            time.sleep(0.05)
    assert workers
    place.assert_nothing_left()


@pytest.mark.slow
def test_an_exception_while_workers_are_waited_for_ends_them(place: Place) -> None:
    """An unread answer would be taken for the answer to the next call."""
    trainer = launch(compiled("one"))
    trainer.step(*batches()[0])
    os.kill(place.workers[0], signal.SIGSTOP)

    def fail(*_: object) -> None:
        raise TimeoutError("the caller's own limit")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(TimeoutError, match="own limit"):
            trainer.step(*batches()[0])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    place.assert_nothing_left()
    with pytest.raises(piper.PiperError, match="launch the program again"):
        trainer.step(*batches()[0])


# failed starts: before the workers run, in one of them, or of workers that never start


@pytest.mark.slow
def test_an_init_that_fails(place: Place) -> None:
    program = ON_ONE.compile(model=ON_ONE.model().to("meta"), init=faulty.bad_init)
    message = r"the worker of device 0 .*no values for embed.weight"
    with no_hang(), pytest.raises(piper.PiperError, match=message) as caught:
        launch(program)
    place.assert_nothing_left()
    assert isinstance(caught.value.__cause__, EOFError)


def test_an_optimizer_that_cannot_be_sent(place: Place) -> None:
    lock = threading.Lock()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        with lock:
            return torch.optim.SGD(parameters, lr=0.1)

    with pytest.raises(piper.PiperError, match=r"optimizer= refers to 'lock' .*cannot be sent"):
        launch(ON_ONE.compile(optimizer=optimizer))
    place.assert_nothing_left()


@pytest.mark.slow
def test_a_worker_that_fails_before_the_others_are_there(place: Place, tmp_path: Path) -> None:
    program = ON_TWO["stages"].compile(optimizer=faulty.Unreadable(tmp_path))
    with no_hang(), pytest.raises(piper.PiperError, match="told to fail"):
        launch(program)
    place.assert_nothing_left()


STARTS = {
    "ends": ("#!/bin/sh\nexit 7", r"device \d died before it was ready: exit code 7"),
    "sleeps": ("#!/bin/sh\nexec sleep 600", r"(?s)within 2 s.*device 0 before it was ready"),
}


@pytest.mark.parametrize("kind", STARTS)
def test_workers_that_do_not_start(
    kind: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, message = STARTS[kind]
    monkeypatch.setattr(sys, "executable", script(tmp_path, text))
    with no_hang(), pytest.raises(piper.PiperError, match=message) as caught:
        launch(compiled("stages"), start_timeout=2.0)
    place.assert_nothing_left()
    assert caught.tb is not None


def script(folder: Path, text: str) -> str:
    """Write an executable file."""
    path = folder / "python"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


# trainers that are never closed


@pytest.mark.slow
def test_a_trainer_that_is_forgotten(place: Place) -> None:
    trainer = launch(compiled("one"))
    trainer.step(*batches()[0])
    assert len(place.workers) == 1
    del trainer
    gc.collect()
    place.assert_nothing_left()


ENDS = {Act.INTERRUPT_PARENT: signal.SIGINT, Act.KILL_PARENT: signal.SIGKILL}


@pytest.mark.slow
@pytest.mark.parametrize("act", ENDS, ids=lambda act: act.name)
def test_a_script_that_ends_in_a_step(act: Act, place: Place, tmp_path: Path) -> None:
    """It closes neither the working trainer nor the idle one, if there is one."""
    compiled("one").save(tmp_path)
    victim = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/scripts/victim.py"), str(tmp_path), act.name],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(place.folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with no_hang():
        assert victim.stdout is not None
        workers = [int(word) for word in victim.stdout.readline().split()]
    with no_hang():
        _, errors = victim.communicate()
        while any(map(alive, workers)):
            time.sleep(0.05)
    assert workers, errors
    assert victim.returncode == -ENDS[act], errors
    assert ("KeyboardInterrupt" in errors) == (act is Act.INTERRUPT_PARENT)
    assert not list(place.folder.glob("piper-*"))


# saving to a full disk


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Inside, the system refuses to grow a file beyond ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_state_that_does_not_fit_leaves_the_former_one(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with piper.launch(compiled("one")) as trainer:
        trainer.step(*batches()[0])
        trainer.save(path)
        before = content(path)
        largest = max(map(len, before.values()))
        trainer.step(*batches()[1])
        for size in (0, 100, 4096, largest // 2, largest - 1):
            message = f"cannot be saved to {re.escape(str(path))}.*untouched"
            with files_of_at_most(size), pytest.raises(piper.PiperError, match=message):
                trainer.save(path)
            assert content(path) == before
            assert list(tmp_path.iterdir()) == [path]
        trainer.save(path)
        assert content(path) != before


@pytest.mark.slow
def test_a_state_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.param_groups[0]["rule"] = lambda x: x

    with piper.launch(ON_ONE.compile(optimizer=Odd)) as trainer:
        with pytest.raises(piper.PiperError, match=r"param_groups\[0\].rule: .* is a function"):
            trainer.save(tmp_path / "state")
        assert not list(tmp_path.iterdir())
        assert trainer.step(*batches()[0]).loss.isfinite()


@pytest.mark.slow
def test_a_script_that_defines_an_operation_of_its_own(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    script = (root / "tests/scripts/own_operation.py").read_text()
    guarded, unguarded = tmp_path / "guarded.py", tmp_path / "unguarded.py"
    guarded.write_text(script)
    unguarded.write_text(script.replace('if __name__ == "__main__":', "if True:"))
    how: Any = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    how["env"] = {**os.environ, "PYTHONPATH": str(root)}
    found = subprocess.run([sys.executable, guarded], **how)
    assert found.returncode == 0, found.stderr
    virtual, processes = found.stdout.splitlines()
    assert virtual == processes
    found = subprocess.run([sys.executable, unguarded], **how)
    assert 'put what trains under if __name__ == "__main__":' in found.stderr
