"""Mutations of files, at random or with knowledge of their format; reproducible by seed."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import piper
from piper import PiperError
from piper.cost.cluster import Cluster
from piper.ir.plan.plan import Plan
from piper.launch.state.saving import read_index
from piper.state.weights.matching import located
from piper.state.weights.source import Source, StateNames
from piper.strategies import from_csv, one_f_one_b, to_csv
from tests.training import pipeline

SECONDS = 60.0
"""Time limit of one mutation; most take less than one second."""


def nested(depth: int) -> Any:
    item: Any = 0
    for level in range(depth):
        item = [item] if level % 2 else {"x": item}
    return item


JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 10**6, -(2**63), 2**63, 10**30, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "x", "*", "F", "compute", "__class__", "os.system", "0", [], {},
    [0], [[]], {"node": 0}, {"tuple": []}, "aten.mm.default", "load_library", nested(60),
    nested(99), nested(400), 10**4000, -(10**400), "x" * 10**5, [1] * 64, [2] * 64, [0] * 1000,
    [0, 2**62, 2**62], "\ud800", "\0", "../x", {"!tuple": []}, {"!stored": "x"}, {"!float": "nan"},
)  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("layer"):
                x = torch.tanh(layer(x))
        return x


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def compiled() -> piper.Program:
    torch.manual_seed(0)
    x = torch.ones(4, 2)
    return piper.compile(
        Net(),
        piper.Strategy([*pipeline([[0, 1], [2]], 2), piper.replicate({}, zero=1)]),
        inputs=(x,),
        targets=(x,),
        loss=nn.functional.mse_loss,
        optimizer=adam,
    )


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in ``data`` with each of its keys."""
    waiting = [data]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.values()
            yield from ((one, key) for key in one)
        elif isinstance(one, list):
            waiting += one
            yield from ((one, place) for place in range(len(one)))


def mutated(data: Any, rng: random.Random) -> Any:
    """A copy with one to three changes."""
    data = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        found = list(places(data))
        if not found:
            return rng.choice(JUNK)
        one, key = rng.choice(found)
        other, theirs = rng.choice(found)
        match rng.randrange(6):
            case 0:
                one[key] = copy.deepcopy(rng.choice(JUNK))
            case 1:
                one.pop(key)
            case 2 if type(one[key]) is int:
                one[key] += rng.choice((-1, 1, 2, 100))
            case 3 if type(one[key]) is str:
                one[key] += rng.choice(("x", "=1", " ", "0", "\n"))
            case 4 if isinstance(one, list):
                one.insert(key, copy.deepcopy(one[key]))
            case 5 if isinstance(one, dict):
                one[rng.choice(("x", "op", "a=b", "__class__"))] = one.pop(key)
            case _:
                one[key] = copy.deepcopy(other[theirs])
    return data


def flipped(content: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, removed or inserted."""
    place = rng.randrange(len(content))
    match rng.randrange(4):
        case 0:
            return content[:place]
        case 1:
            return content[:place] + rng.randbytes(rng.randrange(1, 9)) + content[place:]
        case _:
            return content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + (
                content[place + 1 :]
            )  # fmt: skip


def reworded(text: str, rng: random.Random) -> str:
    """A line, word or number changed somewhere."""
    lines = text.splitlines() or [""]
    place = rng.randrange(len(lines))
    words = list(re.finditer(r"[\w.+-]+|\S", lines[place]))
    match rng.randrange(5):
        case 0:
            del lines[place]
        case 1:
            lines.insert(rng.randrange(len(lines)), lines[place])
        case 2 if words:
            word = rng.choice(words)
            lines[place] = lines[place][: word.start()] + lines[place][word.end() :]
        case _ if words:
            word = rng.choice(words)
            other = rng.choice((*WORDS, rng.choice(text.split())))
            lines[place] = lines[place][: word.start()] + other + lines[place][word.end() :]
    return "\n".join(lines) + "\n"


WORDS = (
    "0", "-1", "1e400", "nan", "inf", "true", '"x"', "[]", "{}", "9" * 25, "9" * 5000, "1" * 4000,
    "[" * 300 + "]" * 300, "[" * 10**5, "{a=" * 300, "0-99999999999", "s99999999999", "x", "=", "'",
    "\u0660", "0x10", "1_0", "-0.0", "\t", "#", "\0",
)  # fmt: skip


def odd(path: Path, rng: random.Random) -> None:
    """Put something at ``path`` that is not a file, or not a readable one."""
    match rng.randrange(7):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to("nowhere")
        case 3:
            path.symlink_to(path.name)
        case 4:
            path.symlink_to("/dev/zero")
        case 5:
            with path.open("wb") as file:
                file.truncate(2**40)
        case _:
            pass


Outcome = str
REFUSED, SAME, OTHER = "refused", "unchanged", "valid"


class Fuzzer:
    """One valid file of each kind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = compiled()
        self.program.save(folder / "program")
        names = ("program.json", "graphs.json", "constants.pt", "checksums.json")
        self.files = {name: (folder / "program" / name).read_bytes() for name in names}
        self.parsed = {n: json.loads(self.files[n]) for n in ("program.json", "graphs.json")}
        self.strategy = self.program.strategy.to_json()
        self.cluster = Cluster.of("H100", 2, machines=2).to_toml()
        self.batch = (torch.linspace(-1, 1, 8).view(4, 2), torch.linspace(1, 3, 8).view(4, 2))
        self.numbers = self._numbers(self.program)
        self.trainer = piper.launch(self.program)
        self.trainer.step(*self.batch)
        self.trainer.profile(*self.batch).recorded.save(folder / "costs.json")
        self.costs = (folder / "costs.json").read_text()
        self.table = to_csv(one_f_one_b(2, 3))
        self.trainer.save(folder / "state")
        self.state = {path.name: path.read_bytes() for path in (folder / "state").iterdir()}
        self.losses = self._losses(folder / "state")
        self.weights = self._weights(folder)
        with torch.device("meta"):
            self.source = Source(Net())

    def _weights(self, folder: Path) -> list[Path]:
        """Weights in each format that Piper reads."""
        self.trainer.export(folder / "one file")
        self.trainer.export(folder / "several files", file_gb=3e-8)
        (folder / "slices").mkdir()
        state = self.trainer.state_dict()
        for part in range(2):
            rows = {key: x.chunk(2)[part].contiguous() for key, x in state.items()}
            starts = {
                key: [part * len(rows[key]), *(0 for _ in x.shape[1:])] for key, x in state.items()
            }
            info = {key: {"saved_offsets": start} for key, start in starts.items()}
            metadata = {"DCP_SHARDING_INFO": json.dumps(info)}
            save_file(rows, folder / "slices" / f"{part}.safetensors", metadata)
        return [folder / name for name in ("one file", "several files", "slices", "state")]

    def kinds(self) -> dict[str, Callable[[random.Random], Outcome]]:
        return {
            "program, damaged": self.damaged_program,
            "program, forged": self.forged_program,
            "strategy": self.any_strategy,
            "plan, text": self.any_plan_text,
            "cluster": self.any_cluster,
            "costs": self.any_costs,
            "table": self.any_table,
            "checkpoint, damaged": self.damaged_checkpoint,
            "checkpoint, forged": self.forged_checkpoint,
            "weights, damaged": self.damaged_weights,
            "weights, forged": self.forged_weights,
        }

    # programs

    def damaged_program(self, rng: random.Random) -> Outcome:
        """The damage leaves the checksums as they were."""
        name = rng.choice(list(self.files))
        try:
            with _damaged(self.folder / "program" / name, rng):
                program = piper.Program.load(self.folder / "program")
        except PiperError:
            return REFUSED
        assert program.plans == self.program.plans
        assert program.models == self.program.models
        return SAME

    def forged_program(self, rng: random.Random) -> Outcome:
        """The checksums match. With other operations it may compute something else, but must not
        run anything else; with the same operations and clip_norm it trains to the same numbers."""
        name = rng.choice(list(self.parsed))
        data = mutated(self.parsed[name], rng)
        content = dumped(data).encode()
        sums = json.loads(self.files["checksums.json"])
        sums["sha256"][name] = hashlib.sha256(content).hexdigest()
        try:
            with self._written(name, content), self._written(
                "checksums.json", json.dumps(sums).encode()
            ):  # fmt: skip
                program = piper.Program.load(
                    self.folder / "program", source=self.program.source, optimizer=adam
                )
            numbers = self._numbers(program)
        except PiperError:
            return REFUSED
        if name == "program.json" and program.training.clip_norm is None:
            torch.testing.assert_close(numbers, self.numbers)
        return OTHER

    def _numbers(self, program: piper.Program) -> dict[str, Tensor]:
        """Two training losses, one evaluation loss, and the weights afterwards."""
        with piper.launch(program) as trainer:
            losses = [trainer.step(*self.batch).loss for _ in range(2)]
            losses.append(trainer.evaluate(*self.batch).loss)
            return {"losses": torch.stack(losses), **trainer.state_dict()}

    def _written(self, name: str, content: bytes) -> _Written:
        return _Written(self.folder / "program" / name, content)

    # strategies

    def any_strategy(self, rng: random.Random) -> Outcome:
        path = self.folder / "strategy.json"
        try:
            with self._any_file(path, json.dumps(self.strategy, indent=1), rng, self.strategy):
                found = piper.Strategy.load(path)
            if found == self.program.strategy:
                return SAME
            assert piper.Strategy.from_json(found.to_json()) == found
            lowered(self.program, found)
        except PiperError:
            return REFUSED
        return OTHER

    # plans

    def any_plan_text(self, rng: random.Random) -> Outcome:
        plan = rng.choice(self.program.plans)
        text = str(plan)
        if rng.random() < 0.3:
            text = flipped(text.encode(), rng).decode(errors="replace")
        else:
            text = reworded(text, rng)
        try:
            found = Plan.parse(text)
        except PiperError:
            return REFUSED
        assert Plan.parse(str(found)) == found
        return SAME if found == plan else OTHER

    # clusters

    def any_cluster(self, rng: random.Random) -> Outcome:
        path = self.folder / "cluster.toml"
        try:
            with self._any_file(path, self.cluster, rng):
                cluster = Cluster.load(path)
            simulated = self.program.simulate(cluster)
        except PiperError:
            return REFUSED
        assert 0 <= simulated.seconds < float("inf"), simulated.seconds
        return OTHER

    # costs and tables

    def any_costs(self, rng: random.Random) -> Outcome:
        path = self.folder / "any costs.json"
        try:
            with self._any_file(path, self.costs, rng, json.loads(self.costs)):
                costs = piper.Recorded.load(path)
            simulated = self.program.simulate(Cluster.of("H100", 4), costs)
        except PiperError:
            return REFUSED
        assert 0 <= simulated.seconds < float("inf"), simulated.seconds
        return OTHER

    def any_table(self, rng: random.Random) -> Outcome:
        path = self.folder / "table.csv"
        try:
            with self._any_file(path, self.table, rng):
                schedule = from_csv(path)
        except PiperError:
            return REFUSED
        assert from_csv(to_csv(schedule)).ranks == schedule.ranks
        return OTHER

    @contextmanager
    def _any_file(
        self, path: Path, text: str, rng: random.Random, data: Any = None
    ) -> Iterator[None]:
        """A file with ``text``, or with its parsed ``data``, mutated in any way."""
        how = rng.random()
        if how < 0.02:
            path.unlink(missing_ok=True)
            odd(path, rng)
        elif how < 0.3:
            path.write_bytes(flipped(text.encode(), rng))
        elif how < 0.6 or data is None:
            path.write_text(reworded(text, rng))
        else:
            path.write_text(dumped(mutated(data, rng)))
        try:
            yield
        finally:
            _remove(path)

    # weights

    def damaged_weights(self, rng: random.Random) -> Outcome:
        """Their content has no checksums: changed numbers are not noticed."""
        folder = rng.choice(self.weights)
        name = rng.choice(sorted(os.listdir(folder)))
        try:
            with _damaged(folder / name, rng):
                self._read_weights(folder)
        except PiperError:
            return REFUSED
        return OTHER

    def forged_weights(self, rng: random.Random) -> Outcome:
        folder = rng.choice(self.weights)
        name = rng.choice(sorted(os.listdir(folder)))
        content = (folder / name).read_bytes()
        if name.endswith(".json"):
            data = mutated(json.loads(content), rng)
            content = sealed(data) if folder.name == "state" else dumped(data).encode()
        else:
            end = 8 + int.from_bytes(content[:8], "little")
            header = dumped(mutated(json.loads(content[8:end]), rng)).encode()
            content = len(header).to_bytes(8, "little") + header + content[end:]
        try:
            with _Written(folder / name, content):
                self._read_weights(folder)
        except PiperError:
            return REFUSED
        return OTHER

    def _read_weights(self, folder: Path) -> None:
        names = StateNames.of(self.source)
        for first in located(self.source, names, piper.weights(folder)).values():
            first.whole()

    # checkpoints

    def damaged_checkpoint(self, rng: random.Random) -> Outcome:
        name = rng.choice(sorted(self.state))
        try:
            with _damaged(self.folder / "state" / name, rng):
                losses = self._losses(self.folder / "state")
        except PiperError:
            return REFUSED
        assert losses == self.losses
        return SAME

    def forged_checkpoint(self, rng: random.Random) -> Outcome:
        content = json.loads(self.state["index.json"])
        try:
            with _Written(self.folder / "state" / "index.json", sealed(mutated(content, rng))):
                self._losses(self.folder / "state")
        except PiperError:
            return REFUSED
        return OTHER

    def _losses(self, path: Path) -> list[float]:
        read_index(path, self.program)
        with piper.launch(self.program) as trainer:
            trainer.load(path)
            return [trainer.step(*self.batch).loss.item() for _ in range(2)]


def sealed(index: Any) -> bytes:
    """The index of a checkpoint with a matching checksum."""
    if isinstance(index, dict):
        index.pop("sha256", None)
    rest = dumped(index)[1:].encode()
    return f'{{"sha256": "{hashlib.sha256(rest).hexdigest()}",\n'.encode() + rest


def dumped(data: Any) -> str:
    """``data`` as JSON, with integers of any length."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(data)
    finally:
        sys.set_int_max_str_digits(limit)


@contextmanager
def _damaged(path: Path, rng: random.Random) -> Iterator[None]:
    """A file with changed bytes, or something else in its place, inside the context."""
    content = path.read_bytes()
    if rng.random() < 0.1:
        path.unlink()
        odd(path, rng)
    else:
        path.write_bytes(flipped(content, rng))
    try:
        yield
    finally:
        _remove(path)
        path.write_bytes(content)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


class _Written:
    """A file with other content, inside the context."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content = path, content

    def __enter__(self) -> None:
        self._before = self._path.read_bytes()
        self._path.write_bytes(self._content)

    def __exit__(self, *_: object) -> None:
        self._path.write_bytes(self._before)


def lowered(program: piper.Program, strategy: piper.Strategy) -> None:
    """Apply a strategy to the model of ``program`` and lower it, if possible: the compiler checks
    the plans."""
    from piper.ir.dag.build import build
    from piper.lower.lower import lower

    dag = strategy.apply(build(next(iter(program.models.values()))))
    sizes = {len(node.devices) for node in dag.nodes}
    if sizes.issubset(program.models):
        lower(dag, program.models, program.settings)


class HangingError(BaseException):
    """A mutation took too long. The interrupted code must not catch it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise HangingError

    usual = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)


def tally(each: int, seed: int) -> tuple[dict[str, Counter[Outcome]], list[str]]:
    """The outcomes of ``each`` mutations of every kind of file; and the tracebacks of mutations
    that hung or raised another error than ``PiperError``."""
    ends: dict[str, Counter[Outcome]] = {}
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, mutate in Fuzzer(Path(folder)).kinds().items():
            ends[name] = Counter()
            for number in range(each):
                try:
                    with limited(SECONDS):
                        ends[name][mutate(random.Random(f"{seed} {name} {number}"))] += 1
                except (Exception, HangingError):  # noqa: BLE001 - all but one are looked for
                    where = traceback.format_exc(limit=-8)
                    bad.append(f"{name}: mutation {number} of seed {seed}: {where}")
    return ends, bad
