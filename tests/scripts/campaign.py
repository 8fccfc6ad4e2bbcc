"""A campaign of faults at random instructions, of all kinds, under all launchers and policies.

    python -m tests.scripts.campaign FOLDER COUNT [SEED] [LAUNCHER/POLICY ...]

Each way trains one run with ``COUNT`` faults, each in its own step. Every run must end with the
losses and the state of a run without faults, and leave nothing behind. A run that ends because its
process was killed or its disk was full is started again. Appends the times of every fault to
``FOLDER/times.json``, and prints their medians.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import piper
from tests.scripts.campaign_run import PAIR, REPLICAS, batch, main, program
from tests.scripts.fault_at import FILLER, OF_WORKERS, Fault, chosen
from tests.scripts.leftovers import alive

ROOT = Path(__file__).parents[2]
PER_FAULT = 300.0
"""Seconds after which a run without another step counts as hanging."""
FAULTS = [*OF_WORKERS, Fault.PARENT, Fault.DISK]


@dataclass(frozen=True)
class Way:
    """A launcher, and how it answers faults."""

    launcher: str
    policy: str

    @property
    def faults(self) -> list[Fault]:
        return [*FAULTS, Fault.NODE] if self.launcher == "ray" else FAULTS


WAYS = [
    Way("processes", "restart"),
    Way("processes", "replace"),
    Way("processes", "reroute"),
    Way("torchrun", "restart"),
    Way("ray", "restart"),
    Way("ray", "replace"),
]


@dataclass(frozen=True)
class Outcome:
    """What a fault cost."""

    launcher: str
    policy: str
    kind: str
    at: str
    found: float | None
    """Seconds until it was known, where the run outlived it."""
    seconds: float
    """Seconds until the next step was done."""


@dataclass(frozen=True)
class Logged:
    """A step in the log of a run."""

    step: int
    loss: float
    at: float
    recovering: float
    recoveries: int


def campaign(folder: Path, way: Way, count: int, seed: int) -> list[Outcome]:
    """One run with ``count`` faults in ``folder``, which does not exist yet."""
    folder.mkdir(parents=True)
    rng = random.Random(f"{way} {seed}")
    case = rng.choice([*REPLICAS]) if way.policy == "reroute" else PAIR
    kinds = [way.faults[i % len(way.faults)] for i in range(count)]
    rng.shuffle(kinds)
    places = []
    for _ in kinds:
        device = rng.choice(program(case).devices)
        places.append((device, rng.randrange(len(program(case).plan_of(device).instructions))))
    marks = [folder / f"fault-{i}" for i in range(count)]
    every = zip(places, kinds, marks, strict=True)
    given = [chosen(d, i + 1, pc, kind, str(m)) for i, ((d, pc), kind, m) in enumerate(every)]
    fit = {"steps": count + 2, "every": 3, "keep": 2, "background": rng.random() < 0.5}
    run = Run(folder, way, case, fit, given)
    with disk(folder / "disk"), run.cluster():
        run.to_the_end()
        run.assert_undisturbed()
    outcomes = []
    for i, (kind, mark) in enumerate(zip(kinds, marks, strict=True)):
        assert mark.exists(), f"fault {i} did not happen"
        outcomes.append(run.outcome(kind, i + 1, given[i], mark.stat().st_mtime))
    shutil.rmtree(folder)
    return outcomes


class Run:
    """A run, through all of its processes."""

    def __init__(
        self, folder: Path, way: Way, case: str, fit: dict[str, Any], faults: Sequence[str]
    ) -> None:
        self._folder, self._way, self._case, self._fit = folder, way, case, fit
        self._temporary = folder / "t"
        self._temporary.mkdir()
        self._faults = faults
        self._begun: list[float] = []
        """When the processes of the run began."""
        self._full: list[float] = []
        """When the run ended because its disk was full."""
        self._cluster: Any = None
        self._nodes = 0

    @contextmanager
    def cluster(self) -> Iterator[None]:
        """For Ray: two nodes of one worker each, beside one for the caller."""
        launch: dict[str, Any] = {"on": self._way.launcher}
        if launch["on"] != "torchrun":
            launch |= {"threads": 1, "recover": self._way.policy, "mirror": 1.0, "stall": 2.0}
            launch |= {"restarts": len(self._faults) + 1, "imports": ["tests.scripts.fault_at"]}
        if launch["on"] != "ray":
            self._write(launch)
            yield
            return
        os.environ |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(self._temporary)}
        utils: Any = import_module("ray.cluster_utils")
        self._cluster = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        for _ in range(2):
            self._cluster.add_node(num_cpus=1)
        launch |= {"address": self._cluster.address, "shared": str(self._folder)}
        launch["runtime_env"] = {"env_vars": {"FAULT_AT": ";".join(self._faults)}}
        self._write(launch)
        try:
            yield
        finally:
            self._cluster.shutdown()

    def _write(self, launch: dict[str, Any]) -> None:
        text = json.dumps({"case": self._case, "launch": launch, "fit": self._fit})
        (self._folder / "run.json").write_text(text)

    def to_the_end(self) -> None:
        while not self._ended():
            self._until_nothing_is_left()

    def _ended(self) -> bool:
        """Start the run; whether it came to its end. Otherwise a fault has ended it."""
        self._begun.append(time.time())
        running = get_context("fork").Process(target=self._child)
        running.start()
        (self._folder / "parent").write_text(str(running.pid))
        deadline, lines, full = time.monotonic() + PER_FAULT, 0, len(self._full)
        try:
            while running.is_alive():
                self._look_around()
                if lines != (lines := len(self._logged(0))):
                    deadline = time.monotonic() + PER_FAULT
                assert time.monotonic() < deadline, f"it hangs:\n{self._errors()}"
                time.sleep(0.05)
        finally:
            running.kill()
            running.join()
        self._look_around()
        if code := running.exitcode:
            told = code == -signal.SIGKILL or len(self._full) > full
            assert told, f"it ended with {code}:\n{self._errors()}"
        return not code

    def _child(self) -> None:
        """The process of the run: a fork, which has compiled the program already."""
        errors = os.open(self._folder / "errors", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        os.chdir(ROOT)
        os.environ |= {"PYTHONPATH": str(ROOT), "FAULT_AT": ";".join(self._faults)}
        tempfile.tempdir = os.environ["TMPDIR"] = str(self._temporary)
        if self._way.launcher == "processes":
            main(self._folder)
            return
        own = ["-m", "tests.scripts.campaign_run", str(self._folder)]
        if self._way.launcher == "torchrun":
            agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            own = [*agent, f"--max-restarts={len(self._faults) + 1}", *own]
        os.execv(sys.executable, [sys.executable, *own])

    def _look_around(self) -> None:
        """Answer what is no worker's fault: make room on the disk, bring a new node."""
        if self._cluster is not None:
            lost = [i for i, text in enumerate(self._faults) if f" {Fault.NODE.name} " in text]
            lost = [i for i in lost if (self._folder / f"fault-{i}").exists()]
            for _ in lost[self._nodes :]:
                self._cluster.add_node(num_cpus=1)
                self._nodes += 1
        full = self._folder / "full"
        if full.exists():
            self._full.append(full.stat().st_mtime)
            (self._folder / "disk" / FILLER).unlink(missing_ok=True)
            full.unlink()

    def _errors(self) -> str:
        return (self._folder / "errors").read_text()[-8000:]

    # what it did

    def _logged(self, rank: int) -> list[Logged]:
        log = self._folder / f"log.{rank}"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        rows = [line.split() for line in lines if line.endswith("\n")]
        return [
            Logged(int(step), float.fromhex(loss), float(at), float(taken), int(count))
            for step, loss, at, taken, count in rows
        ]

    def assert_undisturbed(self) -> None:
        """The losses and the state are those of a run without faults, and nothing is left."""
        exact = self._way.policy != "reroute"
        steps = self._fit["steps"]
        with piper.launch(program(self._case)) as trainer:
            found = trainer.iterate(batch, steps=steps, progress=False)
            expected = {i: float(one.loss) for i, one in enumerate(found, start=1)}
            state = trainer.state_dict()
        for rank in range(2 if self._way.launcher == "torchrun" else 1):
            rows = self._logged(rank)
            assert {row.step for row in rows} == {*expected}
            for row in rows:
                assert _equal(row.loss, expected[row.step], exact=exact), row
            last = torch.load(self._folder / f"state.{rank}")
            assert last.keys() == state.keys()
            for name, x in state.items():
                close = float((last[name] - x).abs().max()) <= 1e-12 * float(x.abs().max())
                assert torch.equal(last[name], x) or (close and not exact), name
        self._until_nothing_is_left()
        assert not [*self._temporary.glob("piper-*")], [*self._temporary.iterdir()]
        kept = sorted(path.name for path in (self._folder / "disk" / "run").iterdir())
        assert kept[-1] == f"step-{steps:08}", kept
        assert len(kept) <= 2, kept

    def _until_nothing_is_left(self) -> None:
        """Wait for the end of all processes of a run that has ended."""
        deadline = time.monotonic() + 30
        while left := [pid for pid in _of(self._folder) if alive(pid)]:
            assert time.monotonic() < deadline, f"processes are left: {left}"
            time.sleep(0.05)

    def outcome(self, kind: Fault, step: int, place: str, at: float) -> Outcome:
        """What a fault ``at`` this time in ``step`` cost."""
        if kind is Fault.DISK:  # the step goes on, and then the save fails
            at = min((t for t in self._full if t > at), default=at)
        since = at
        if kind is Fault.PARENT:  # ranks of torchrun live a moment longer than torchrun
            since = next(t for t in self._begun if t > at)
        rows = [row for row in self._logged(0) if row.at > since]
        # a machine of a cluster may be lost so late that the step is done before
        after = next(row for row in rows if row.recoveries or kind is not Fault.NODE)
        seconds = after.at - at
        known = after.recoveries and kind not in (Fault.PARENT, Fault.DISK)
        found = seconds - after.recovering if known else None
        device, _, pc, *_ = place.split()
        text = f"device {device}, instruction {pc}"
        return Outcome(self._way.launcher, self._way.policy, kind.name, text, found, seconds)


def _equal(a: float, b: float, *, exact: bool) -> bool:
    return a == b or (not exact and abs(a - b) <= 1e-12 * abs(b))


def _of(folder: Path) -> list[int]:
    """The processes of a run: each has its folder among its arguments."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        ours = b"piper.launch" in command or b"campaign_run" in command
        if ours and str(folder).encode() in command:
            found.append(int(entry.name))
    return found


@contextmanager
def disk(folder: Path) -> Iterator[None]:
    """A disk of 8 MiB, in memory."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def table(outcomes: Iterable[Outcome]) -> str:
    """The median and the worst of each kind, for each launcher and policy."""
    rows: dict[tuple[str, str, str], list[Outcome]] = {}
    for one in outcomes:
        rows.setdefault((one.launcher, one.policy, one.kind), []).append(one)
    lines = [f"{'':32} {'faults':>6} {'found, s':>13} {'next step, s':>13}"]
    for key, some in sorted(rows.items()):
        found = [one.found for one in some if one.found is not None]
        taken = [one.seconds for one in some]
        lines.append(f"{' '.join(key):32} {len(some):6} {_two(found):>13} {_two(taken):>13}")
    return "\n".join(lines)


def _two(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f} / {max(seconds):.1f}" if seconds else "-"


def campaigns(folder: Path, count: int, seed: int = 0, *ways: str) -> None:
    """Several campaigns; what failed stays in its folder."""
    kept = folder / "times.json"
    folder.mkdir(parents=True, exist_ok=True)
    for way in [way for way in WAYS if not ways or f"{way.launcher}/{way.policy}" in ways]:
        outcomes = campaign(folder / f"{way.launcher[0]}{way.policy[2]}{seed}", way, count, seed)
        with kept.open("a") as file:
            file.writelines(json.dumps(asdict(one)) + "\n" for one in outcomes)
    print(table(Outcome(**json.loads(line)) for line in kept.read_text().splitlines()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    campaigns(Path(sys.argv[1]), int(sys.argv[2]), int((sys.argv[3:] or ["0"])[0]), *sys.argv[4:])
