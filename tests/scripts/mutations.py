"""Damage to files, as chance or somebody who knows their form would do it; the same for a seed."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import piper
from piper import PiperError
from piper.cost import Cluster, toml
from piper.launch.checkpoint import read_index
from piper.lower.plan import Plan
from tests.training import pipeline

JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 10**6, -(2**63), 2**63, 10**30, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "x", "*", "F", "compute", "__class__", "os.system", "0", [], {},
    [0], [[]], {"node": 0}, {"tuple": []}, "aten.mm.default", "load_library",
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
    """Other bytes, missing ones, or more of them."""
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


Outcome = str
REFUSED, SAME, OTHER = "refused", "unchanged", "valid"


class Fuzzer:
    """Files of each kind, made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = compiled()
        self.program.save(folder / "program")
        names = ("program.json", "graphs.json", "constants.pt", "checksums.json")
        self.files = {name: (folder / "program" / name).read_bytes() for name in names}
        self.parsed = {n: json.loads(self.files[n]) for n in ("program.json", "graphs.json")}
        self.strategy = self.program.strategy.to_json()
        self.cluster = toml.write(Cluster.of("H100", 2, machines=2))
        self.batch = (torch.linspace(-1, 1, 8).view(4, 2), torch.linspace(1, 3, 8).view(4, 2))
        self.numbers = self._numbers(self.program)
        self.trainer = piper.launch(self.program)
        self.trainer.step(*self.batch)
        self.trainer.save(folder / "state")
        self.state = {path.name: path.read_bytes() for path in (folder / "state").iterdir()}
        self.losses = self._losses(folder / "state")

    def kinds(self) -> dict[str, Callable[[random.Random], Outcome]]:
        return {
            "program, damaged": self.damaged_program,
            "program, forged": self.forged_program,
            "strategy": self.any_strategy,
            "plan": self.any_plan,
            "cluster": self.any_cluster,
            "checkpoint, damaged": self.damaged_checkpoint,
            "checkpoint, forged": self.forged_checkpoint,
        }

    # programs

    def damaged_program(self, rng: random.Random) -> Outcome:
        """Whoever damages a program does not know of its checksums."""
        name = rng.choice(list(self.files))
        content = flipped(self.files[name], rng)
        try:
            with self._written(name, content):
                program = piper.Program.load(self.folder / "program")
        except PiperError:
            return REFUSED
        assert program.plans == self.program.plans
        assert program.models == self.program.models
        return SAME

    def forged_program(self, rng: random.Random) -> Outcome:
        """Whoever forges one does. With other operations it may compute something else, but not run
        anything; with the same ones and the same clip_norm it trains to the same numbers."""
        name = rng.choice(list(self.parsed))
        data = mutated(self.parsed[name], rng)
        content = json.dumps(data).encode()
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
        """Two losses of training, one of evaluation, and the weights after it."""
        with piper.launch(program) as trainer:
            losses = [trainer.step(*self.batch).loss for _ in range(2)]
            losses.append(trainer.evaluate(*self.batch).loss)
            return {"losses": torch.stack(losses), **trainer.state_dict()}

    def _written(self, name: str, content: bytes) -> _Written:
        return _Written(self.folder / "program" / name, content)

    # strategies

    def any_strategy(self, rng: random.Random) -> Outcome:
        path = self.folder / "strategy.json"
        if rng.random() < 0.3:
            path.write_bytes(flipped(json.dumps(self.strategy).encode(), rng))
        else:
            path.write_text(json.dumps(mutated(self.strategy, rng)))
        try:
            found = piper.Strategy.load(path)
            if found == self.program.strategy:
                return SAME
            assert piper.Strategy.from_json(found.to_json()) == found
            lowered(self.program, found)
        except PiperError:
            return REFUSED
        return OTHER

    # plans

    def any_plan(self, rng: random.Random) -> Outcome:
        plan = rng.choice(self.program.plans)
        written = json.loads(json.dumps(plan.to_json()))
        try:
            found = Plan.from_json(json.dumps(mutated(written, rng)))
        except PiperError:
            return REFUSED
        assert Plan.from_json(found.to_json()) == found
        return SAME if found == plan else OTHER

    # clusters

    def any_cluster(self, rng: random.Random) -> Outcome:
        path = self.folder / "cluster.toml"
        if rng.random() < 0.3:
            path.write_bytes(flipped(self.cluster.encode(), rng))
        else:
            path.write_text(_edited(self.cluster, rng))
        try:
            cluster = toml.read(path)
            simulated = self.program.simulate(cluster)
        except PiperError:
            return REFUSED
        assert 0 <= simulated.seconds < float("inf"), simulated.seconds
        return OTHER

    # checkpoints

    def damaged_checkpoint(self, rng: random.Random) -> Outcome:
        name = rng.choice(sorted(self.state))
        try:
            with _Written(self.folder / "state" / name, flipped(self.state[name], rng)):
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
    """The index of a checkpoint with the checksum that it needs."""
    if isinstance(index, dict):
        index.pop("sha256", None)
    rest = json.dumps(index)[1:].encode()
    return f'{{"sha256": "{hashlib.sha256(rest).hexdigest()}",\n'.encode() + rest


class _Written:
    """A file with another content for a while."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content = path, content

    def __enter__(self) -> None:
        self._before = self._path.read_bytes()
        self._path.write_bytes(self._content)

    def __exit__(self, *_: object) -> None:
        self._path.write_bytes(self._before)


def lowered(program: piper.Program, strategy: piper.Strategy) -> None:
    """Apply a strategy to the model of ``program``: plans come out that the compiler has checked,
    if it can be applied at all."""
    from piper.ir.build import build
    from piper.lower.lower import lower

    dag = strategy.apply(build(next(iter(program.models.values()))))
    sizes = {len(node.devices) for node in dag.nodes}
    if sizes.issubset(program.models):
        lower(dag, program.models, program.settings)


def _edited(text: str, rng: random.Random) -> str:
    """Another value somewhere, or a line more or less."""
    lines = text.splitlines()
    place = rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[place]
        case 1:
            lines.insert(rng.randrange(len(lines)), lines[place])
        case 2 if "=" in lines[place]:
            key = lines[place].partition("=")[0]
            junk = (
                "0",
                "-1",
                "1e400",
                "nan",
                "inf",
                "true",
                '"x"',
                "[]",
                "{}",
                "99999999999999999999",
            )
            lines[place] = f"{key}= {rng.choice(junk)}"
        case _:
            pass
    return "\n".join(lines) + "\n"


def tally(count: int, seed: int) -> Counter[tuple[str, Outcome]]:
    """How ``count`` mutations ended, as many of each kind of file; whatever is no ``PiperError``
    gets out, with the number that leads to it."""
    found: Counter[tuple[str, Outcome]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        kinds = Fuzzer(Path(folder)).kinds()
        for number in range(count):
            name = list(kinds)[number % len(kinds)]
            try:
                found[name, kinds[name](random.Random(seed * 10**9 + number))] += 1
            except Exception as error:
                error.add_note(f"{name}: mutation {number} of seed {seed}")
                raise
    return found
