"""Training on the machines of a Ray cluster: several real ones on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper.launch.on_ray import ray_group
from piper.launch.on_ray.placement import Room, equal_share, rooms_of
from tests.launch.test_processes import compiled, expected
from tests.launch.test_recovered_state import replicas, steps
from tests.launch.test_recovery import trained
from tests.scripts import faulty
from tests.scripts.cases import ON_TWO, acting, batches, differences, numbers
from tests.scripts.fault_at import Fault, chosen
from tests.scripts.faulty import Act
from tests.training import shared_captures

ray = pytest.importorskip("ray")
utils = pytest.importorskip("ray.cluster_utils")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


class Nodes:
    """A cluster whose nodes have two CPUs each, besides one that only the driver uses."""

    def __init__(self, racks: str) -> None:
        self.cluster = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.nodes = [self.add(rack) for rack in racks]

    def add(self, rack: str) -> Any:
        return self.cluster.add_node(num_cpus=2, labels={"rack": rack})

    def lose_one(self, trainer: piper.Trainer) -> None:
        """End a node of a trainer as if its machine were switched off."""
        group: Any = trainer._session.devices
        placed = ray.util.placement_group_table(group._group._held[-1])["bundles_to_node_id"]
        node = next(node for node in self.nodes if node.node_id in placed.values())
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def launch(self, case: str, **options: Any) -> piper.Trainer:
        address = self.cluster.address
        return piper.launch(compiled(case), on="ray", address=address, threads=1, **options)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """In a temporary folder with a short name: the paths of sockets have a limit."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="r") as folder:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        patch.setenv("TMPDIR", folder)
        made = Nodes("aabb")
        yield made
        ray.shutdown()
        made.cluster.shutdown()


def left() -> list[str]:
    """The folders and processes of workers that are there."""
    folder = Path(os.environ["TMPDIR"])
    found = [path.name for path in folder.glob("piper-*")]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if (
                    str(folder).encode() in command
                    and b"piper.launch.workers.fork_server" in command
                ):
                    found.append(entry.name)
    return found


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


# equal numbers


CASES = {
    **dict.fromkeys(ON_TWO, 2),
    "stages of experts, counted, clipped, scheduled": 4,
    "replicas, ZeRO-3": 2,
    "two ways of pairs": 4,
    "stages of tensor parallelism": 4,
    "replicas of context parallelism, ZeRO-1": 2,
}
"""The number of machines for each case."""


@pytest.mark.cases(fast=0, slow=4)
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_of_virtual_devices(case: str, nodes: Nodes) -> None:
    with nodes.launch(case, machines=CASES[case]) as trainer:
        assert not differences(numbers(trainer), expected(case))
    until(lambda: not left())
    assert not ray.is_initialized()


@pytest.mark.slow
def test_a_checkpoint_and_a_switch(nodes: Nodes, tmp_path: Path) -> None:
    one, other = "replicas, ZeRO-2", "four stages"
    with piper.launch(compiled(one)) as trainer:
        trainer.step(*batches()[0])
        trainer.switch(compiled(other))
        expected = numbers(trainer)
    with nodes.launch(one, labels={"rack": "a"}) as trainer:
        trainer.step(*batches()[0])
        trainer.save(tmp_path / "state")
        trainer.step(*batches()[1])
        trainer.load(tmp_path / "state")
        trainer.switch(compiled(other))
        assert not differences(numbers(trainer), expected)


# faults


@pytest.mark.slow
def test_an_operation_that_fails(nodes: Nodes) -> None:
    trainer = nodes.launch("stages")
    with pytest.raises(piper.PiperError, match=r"device 1 failed at instruction \d+ ") as caught:
        trainer.step(*acting(Act.RAISE, row=-1))
    assert isinstance(caught.value.__cause__, faulty.ToldToFailError)
    with pytest.raises(piper.PiperError, match="launch the program again"):
        trainer.step(*batches()[0])
    trainer.close()
    until(lambda: not left())


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.filterwarnings("ignore::piper.PiperWarning")
@pytest.mark.parametrize("lost", [Fault.KILL, None, Fault.STOP, Fault.RAISE])
def test_what_is_lost_is_replaced(
    lost: Fault | None, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the losses of a run without the fault: a fault of a worker, or the loss of a machine."""
    monkeypatch.setattr(ray_group, "_SILENT", 4.0)
    case = "stages, tied weights, dropout"
    with piper.launch(compiled(case)) as trainer:
        undisturbed = trained(trainer)
    options: dict[str, Any] = {"restarts": 2, "shared": str(tmp_path), "cpus": 2}
    if lost is not None:
        fault = chosen(1, 3, 7, lost, str(tmp_path / "happened"))
        options["runtime_env"] = {"env_vars": {"FAULT_AT": fault}}
        options["imports"] = ["tests.scripts.fault_at"]
    with nodes.launch(case, **options) as trainer:
        if lost is None:
            trainer.step(*batches()[0])
            nodes.lose_one(trainer)
            nodes.add("c")
            assert torch.equal(trainer.step(*batches()[1]).loss, undisturbed["loss 1"])
        else:
            assert not differences(trained(trainer), undisturbed)
    (recovery,) = trainer.recoveries
    replaced = {None: (0, 1), Fault.RAISE: ()}
    assert recovery.replaced == replaced.get(lost, (1,))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::piper.PiperWarning")
def test_a_lost_replica(nodes: Nodes, tmp_path: Path) -> None:
    """The others, on several machines, train on its rows; a switch brings its devices back."""
    program, kills = replicas(dp=3), [(1, 2), (2, 4)]
    faults = [chosen(d, i, 4, Fault.KILL, str(tmp_path / f"{d}")) for d, i in kills]

    def run(trainer: piper.Trainer) -> dict[str, torch.Tensor]:
        found = steps(trainer, 4)
        trainer.switch(program)
        return found | steps(trainer, 2) | trainer.state_dict()

    with piper.launch(program) as trainer:
        expected = run(trainer)
    with piper.launch(
        program, on="ray", address=nodes.cluster.address, threads=1, machines=3, cpus=2,
        recover="reroute", restarts=2, shared=str(tmp_path), imports=["tests.scripts.fault_at"],
        runtime_env={"env_vars": {"FAULT_AT": ";".join(faults)}},
    ) as trainer:  # fmt: skip
        found = run(trainer)
    assert [(one.lost, one.repeated) for one in trainer.recoveries] == [((1,), 0), ((2,), 0)]
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.allclose(found[name], x, rtol=1e-11, atol=1e-13), name


@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_nothing(nodes: Nodes) -> None:
    environment = {**os.environ, "RAY_ADDRESS": nodes.cluster.address}
    script = [sys.executable, "-m", "tests.scripts.killed_driver"]
    done = subprocess.run(script, env=environment, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    until(lambda: not left())


# places


ROOMS = [
    Room("10.0.0.1", 4, "4 CPUs"),
    Room("10.0.0.2", 2, "2 CPUs"),
    Room("10.0.0.3", 2, "2 CPUs"),
]


@pytest.mark.parametrize(
    ("devices", "machines", "each"),
    [(4, None, 4), (6, None, 2), (3, None, 3), (2, 2, 1), (6, 3, 2)],
)
def test_equally_many_on_each_machine(devices: int, machines: int | None, each: int) -> None:
    assert equal_share(devices, ROOMS, machines) == each


@pytest.mark.parametrize(("devices", "machines"), [(5, None), (8, None), (4, 3), (6, 2)])
def test_no_room(devices: int, machines: int | None) -> None:
    with pytest.raises(
        piper.PiperError, match=r"no room for .*: 10.0.0.1 has 4 CPUs; .* machines="
    ):
        equal_share(devices, ROOMS, machines)


def test_rooms_by_label() -> None:
    nodes = [
        {
            "Alive": alive,
            "Labels": {"rack": rack},
            "Resources": {"CPU": 8.0, "GPU": gpus},
            "NodeManagerAddress": rack,
        }
        for alive, rack, gpus in [(True, "a", 2.0), (False, "a", 8.0), (True, "b", 4.0)]
    ]
    found = {
        (labels, gpus): [room.devices for room in rooms_of(nodes, dict(labels), 2.0, gpus=gpus)]
        for labels in [(), (("rack", "a"),), (("rack", "c"),)]
        for gpus in (False, True)
    }
    assert found == {
        ((), False): [4, 4],
        ((), True): [2, 4],
        ((("rack", "a"),), False): [4],
        ((("rack", "a"),), True): [2],
        ((("rack", "c"),), False): [],
        ((("rack", "c"),), True): [],
    }


@pytest.mark.slow
def test_a_cluster_without_room(nodes: Nodes) -> None:
    with pytest.raises(piper.PiperError, match=r"no room for 4 devices on 4 machines"):
        nodes.launch("replicas, ZeRO-2", labels={"rack": "a"}, machines=4)
    assert not ray.is_initialized()


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(piper.PiperError, match=r"pip install .piper-train\[ray\]"):
        piper.launch(compiled("stages"), on="ray")
