"""Several NCCL ranks on one GPU equal virtual devices. Run by hand: ``pytest -m gpu``.

Ranks take seconds to start, so one set of them trains under all strategies in turn, while another
process trains the same on virtual devices.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import piper
from piper.runtime.pending import Pending
from piper.runtime.streams import streams
from tests.scripts import nccl_faulty, nccl_replay
from tests.scripts.fault_at import Fault, chosen
from tests.scripts.nccl_cases import (
    CASES,
    LARGER,
    ON_TWO,
    ROOMY,
    Case,
    batch,
    differences,
    numbers,
)
from tests.state.test_weights import Wide, in_one_file
from tests.training import shared_captures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
SHAKEN = {2: ("dualpipev", "experts, ZeRO-3"), 4: ("dualpipev, experts, ZeRO-3",)}
SEEDS = {2: 150, 4: 100}
CAPTURED = {2: ("zb-v", "experts, ZeRO-1", "dropless in bf16"), 4: ("dualpipev, experts, ZeRO-3",)}


def saved(ranks: int, names: Iterable[str], folder: Path) -> dict[str, Case]:
    """The cases with these names, compiled into ``folder``."""
    cases = {name: CASES[ranks][name] for name in names}
    save(cases, folder)
    return cases


def save(cases: dict[str, Case], folder: Path) -> None:
    with shared_captures():
        for name, case in cases.items():
            case.compile().save(folder / name)


def started(log: Path, command: list[str], **more: str) -> subprocess.Popen[bytes]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # may hold packages
    with log.open("w") as out:
        return subprocess.Popen(
            [sys.executable, *command],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "OMP_NUM_THREADS": "1",
                **more,
            },
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def under_torchrun(ranks: int, script: str, *arguments: object) -> list[str]:
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*run, str(SCRIPTS / script), *map(str, arguments)]


def replayed(
    ranks: int, folder: Path, *options: str, script: str = "nccl_replay.py", limit: float = 500
) -> tuple[Any, list[Any]]:
    """The numbers of virtual devices, and those of each rank."""
    arguments = (folder, ranks, *options)
    commands = {
        "virtual": [str(SCRIPTS / script), *map(str, arguments), "--virtual"],
        "ranks": under_torchrun(ranks, script, *arguments),
    }
    logs = {name: folder / f"log of {name}" for name in commands}
    processes = {name: started(logs[name], command) for name, command in commands.items()}
    try:
        for name, process in processes.items():
            code = process.wait(limit)
            assert code == 0, f"{name}: exit code {code}\n{logs[name].read_text()[-6000:]}"
    finally:
        end(processes.values())
    everyone = [torch.load(folder / f"numbers.{rank}") for rank in range(ranks)]
    return torch.load(folder / "numbers"), everyone


def compared(cases: dict[str, Case], should: Any, everyone: list[Any]) -> list[str]:
    wrong = []
    for name, case in cases.items():
        for rank, found in enumerate(everyone):
            numbers = found[name]
            before = numbers.pop("loss without loading", None)
            if before is not None and not torch.equal(before, numbers.pop("loss after loading")):
                wrong.append(f"{name}, rank {rank}: another loss after save and load")
            if text := differences(numbers, should[name], case.exact):
                wrong.append(f"{name}, rank {rank}: {text}")
    return wrong


@pytest.mark.parametrize(("ranks", "part"), [(n, i) for n in (2, 4) for i in range(n)])
def test_every_strategy(ranks: int, part: int, tmp_path: Path) -> None:
    """In parts that can run side by side: compilation takes minutes."""
    cases = saved(ranks, list(CASES[ranks])[part::ranks], tmp_path)
    wrong = compared(cases, *replayed(ranks, tmp_path))
    assert not wrong, "\n".join(wrong)
    for name in (name for name, case in cases.items() if case.saves):
        assert_same_files(tmp_path / f"state of {name}", tmp_path / f"background state of {name}")


def assert_same_files(one: Path, other: Path) -> None:
    found = [{x.name: x.read_bytes() for x in sorted(y.iterdir())} for y in (one, other)]
    assert found[0] == found[1], f"{one.name} and {other.name} differ"


@pytest.mark.parametrize("ranks", [2, 4])
def test_state(ranks: int, tmp_path: Path) -> None:
    """One run through several strategies, with a save in each, also in the background."""
    torch.manual_seed(0)
    weights = in_one_file(Wide().state_dict(), tmp_path / "weights")
    should, everyone = replayed(ranks, tmp_path, script="nccl_state.py")
    for rank, found in enumerate(everyone):
        assert not differences(found, should, exact=False), f"rank {rank}"
    first = load_file(weights / "model.safetensors")
    assert all(torch.equal(should[f"first {name}"], x) for name, x in first.items())
    for plain in tmp_path.glob("* plain"):
        assert_same_files(plain, plain.with_name(plain.name.replace("plain", "background")))


@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_of_different_size(ranks: int, tmp_path: Path) -> None:
    """With delays too: parts of a message are received into temporary buffers and put together."""
    names = [name for name in CASES[ranks] if name.startswith("experts on")]
    cases = saved(ranks, names, tmp_path)
    wrong = compared(cases, *replayed(ranks, tmp_path, "--seeds", "20"))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_and_context_parallelism(ranks: int, tmp_path: Path) -> None:
    names = [name for name in CASES[ranks] if name.startswith(("tensor", "context"))]
    cases = saved(ranks, names, tmp_path)
    wrong = compared(cases, *replayed(ranks, tmp_path, "--seeds", "20"))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranks", [2, 4])
def test_dropless_experts(ranks: int, tmp_path: Path) -> None:
    names = [name for name in CASES[ranks] if name.startswith("dropless")]
    cases = saved(ranks, names, tmp_path)
    wrong = compared(cases, *replayed(ranks, tmp_path, "--seeds", "20"))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranks", [2, 4])
def test_delayed_streams_change_nothing(ranks: int, tmp_path: Path) -> None:
    cases = saved(ranks, SHAKEN[ranks], tmp_path)
    wrong = compared(cases, *replayed(ranks, tmp_path, "--seeds", str(SEEDS[ranks])))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["1f1b, experts, ZeRO-3", "dualpipev, experts, ZeRO-2"])
def test_delayed_streams_of_virtual_devices(name: str) -> None:
    program = CASES[4][name].compile()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with piper.launch(program) as usual, piper.launch(program, shake=0) as shaken:
            for seed in range(200):
                nccl_replay.shake(shaken, seed)
                results = [trainer.step(*batch(seed)) for trainer in (usual, shaken)]
                assert torch.equal(results[0].loss, results[1].loss), f"seed {seed}"
            assert not differences(shaken.state_dict(), usual.state_dict(), exact=True)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("broken", ["waits", "lifetimes"])
def test_delays_find_what_is_wrong(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waits between streams, or with memory freed during communication, losses differ."""
    program = CASES[4]["1f1b, experts, ZeRO-3"].compile()
    with piper.launch(program) as usual:
        if broken == "waits":
            monkeypatch.setattr(streams, "_before", lambda plan: [()] * len(plan.instructions))
        else:
            begun = Pending.__init__
            monkeypatch.setattr(Pending, "__init__", lambda self, *a, keeps=(): begun(self, *a))
            monkeypatch.setattr(Pending, "keep", lambda self, more: None)
            monkeypatch.setattr(streams, "_owners", lambda plan: {})
            monkeypatch.setattr(streams, "_behind", lambda plan: {})
            monkeypatch.setattr(streams, "_foreign", lambda plan: {})
        with piper.launch(program, shake=0) as shaken:
            for seed in range(100):
                nccl_replay.shake(shaken, seed)
                results = [trainer.step(*batch(seed)) for trainer in (usual, shaken)]
                if not torch.equal(results[0].loss, results[1].loss):
                    return
    pytest.fail("nothing was found")


@pytest.mark.parametrize("ranks", [2, 4])
def test_captured_steps(ranks: int, tmp_path: Path) -> None:
    cases = saved(ranks, CAPTURED[ranks], tmp_path)
    wrong = compared(cases, *replayed(ranks, tmp_path, "--graphs"))
    assert not wrong, "\n".join(wrong)


def test_memory_and_a_host_that_never_waits(tmp_path: Path) -> None:
    save(LARGER, tmp_path)
    log = tmp_path / "log"
    run = started(log, under_torchrun(2, "nccl_measure.py", tmp_path))
    try:
        assert run.wait(300) == 0, log.read_text()[-6000:]
    finally:
        end([run])
    ratios = []
    for rank in range(2):
        for (name, graphs), found in torch.load(tmp_path / f"measured.{rank}").items():
            ratio = found["measured"] / found["predicted"]
            print(
                f"\nrank {rank}, {name}{', captured' if graphs else ''}: {ratio:.3f} of the "
                f"predicted {found['predicted'] / 2**20:.0f} MiB; host {found['host ms']:.1f} of "
                f"{found['step ms']:.1f} ms",
                end="",
            )
            if not graphs:
                ratios.append(ratio)
    assert max(ratios) < 1.1


@pytest.mark.parametrize("what", ["raise", "kill", "stop"])
def test_a_lost_rank_ends_the_others(what: str, tmp_path: Path) -> None:
    """Each rank is a separate job, so that only Piper tells it about the other.

    Not under MPS beside other programs: a client that is killed ends all others."""
    save({nccl_faulty.NAME: ON_TWO[nccl_faulty.NAME]}, tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    same = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
    command = [str(SCRIPTS / "nccl_faulty.py"), str(tmp_path / nccl_faulty.NAME), what]
    logs = [tmp_path / f"log {rank}" for rank in range(2)]
    ranks = [started(log, command, **same, RANK=str(i)) for i, log in enumerate(logs)]
    try:
        code = ranks[0].wait(120)
        ended = time.time()
    finally:
        end(ranks)
    text = logs[0].read_text()
    assert code != 0, text
    assert "went on" not in text, text
    # NCCL may notice a closed connection before the watchdog misses a heartbeat
    marks = ("piper: ", "CommunicationError: ")
    said = next((line for line in text.splitlines() if any(m in line for m in marks)), text)
    seconds = ended - float(next(line for line in text.splitlines() if "begins" in line).split()[1])
    print(f"\n{what}: after {seconds:.1f} s: {said}")
    assert "device 1" in said
    assert "told to fail" in said if what == "raise" else "instruction" in said
    assert seconds < {"raise": 10, "kill": 30, "stop": 30}[what]


def test_processes_that_share_a_gpu() -> None:
    case = ON_TWO["1f1b"]
    program = case.compile()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with piper.launch(program) as trainer:
            should = numbers(trainer)
    finally:
        torch.use_deterministic_algorithms(False)
    if torch.cuda.device_count() < 2:
        with pytest.raises(piper.PiperError, match="share_gpus=True"):
            piper.launch(program, on="processes")
    options = {"on": "processes", "share_gpus": True, "timeout": 20}
    with piper.launch(program, **options) as trainer:
        assert not differences(numbers(trainer), should, exact=False)
        workers = [worker.process.pid for worker in trainer._session.devices.workers.processes]
        os.kill(workers[1], signal.SIGSTOP)
        with pytest.raises(piper.PiperError, match=r"(?s)device 0 .*instruction .*device 1"):
            trainer.step(*batch(0))
    with piper.launch(program, **options) as trainer:
        trainer.step(*batch(0))
        os.kill(trainer._session.devices.workers.processes[1].process.pid, signal.SIGKILL)
        with pytest.raises(piper.PiperError, match="device 1 died"):
            trainer.step(*batch(0))


LOST = {
    2: {"dp": 2, "microbatches": 2},
    4: {"pp": 2, "dp": 2, "microbatches": 2, "zero": 1},
}


@pytest.mark.parametrize("kind", [Fault.KILL, Fault.STOP])
@pytest.mark.parametrize("recover", ["restart", "replace", "reroute"])
@pytest.mark.parametrize("ranks", list(LOST))
@pytest.mark.filterwarnings("ignore::piper.PiperWarning")
def test_a_lost_rank_is_recovered(
    ranks: int, recover: str, kind: Fault, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the second step. Not under MPS: a client that is killed ends all others."""
    program = Case(piper.strategies.mesh(**LOST[ranks]), {"clip_norm": 1.0}, ROOMY).compile()
    with piper.launch(program) as trainer:
        should = numbers(trainer, steps=4)
    monkeypatch.setenv("FAULT_AT", chosen(1, 2, 4, kind, str(tmp_path / "happened")))
    with piper.launch(
        program,
        on="processes",
        share_gpus=True,
        imports=["tests.scripts.fault_at"],
        restarts=2,
        recover=recover,
        stall=3.0,
    ) as trainer:
        wrong = differences(numbers(trainer, steps=4), should, exact=False)
    assert not wrong, wrong
    (recovery,) = trainer.recoveries
    print(f"\n{ranks} ranks, {recover}, {kind.name}: {recovery}")
    assert (1 in recovery.replaced) == (recover != "reroute")
