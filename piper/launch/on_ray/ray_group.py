"""A process for each device, on the machines of a Ray cluster.

Ray places one actor on each machine (``machine.py``), which owns the worker processes there; the
caller sends it their calls. Ray carries messages and tells when a machine is lost. Workers talk to
each other as elsewhere, over gloo or NCCL, and find each other in a store that no worker holds.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from piper.base.errors import PiperError, WorkerError
from piper.launch.device.weight_readers import FirstWeights
from piper.launch.launchers import RayOptions
from piper.launch.messages.calling_group import CallingGroup, DeviceAnswers
from piper.launch.messages.calls import StoreAddress
from piper.launch.on_ray.machine import Answered, RayMachine, RayMachineFacts
from piper.launch.on_ray.placement import equal_share, rooms_of
from piper.launch.workers.first_failure import FailedCall, StillWaiting, late
from piper.launch.workers.worker_process import GRACE

_TURN = 1.0
"""Seconds after which a machine says that its workers have not answered yet."""
_SILENT = 10.0
"""Seconds without such a sign after which a machine counts as lost: Ray takes up to a minute."""
_WEIGHTS = "weights.pt"


@dataclass(slots=True)
class _Place:
    """One machine of the job."""

    actor: Any
    facts: RayMachineFacts
    devices: list[int] = field(default_factory=list)


class RayWorkerGroup(CallingGroup):
    """The worker processes of a program, on one or more machines."""

    def __init__(self, options: RayOptions) -> None:
        super().__init__(options)
        self._ray = _ray()
        self._on_ray = options
        self._began = not self._ray.is_initialized()
        if self._began:
            _connect(self._ray, options.address)
        self._places: list[_Place] = []
        self._each = 0
        """The most devices of a machine."""
        self._lost = False
        """Whether a machine is gone."""
        self._weights: FirstWeights | None = None
        """The weights that the machines have in files."""
        self._folders: list[Path] = []
        """The folder for copies of the state, once it is asked for."""
        self._held: list[Any] = []
        """What Ray keeps for this group: the actors, and the placement group last."""
        self._finalizer = weakref.finalize(
            self, _end, self._ray, self._held, self._folders, disconnect=self._began
        )

    # the machines

    @property
    def devices(self) -> list[int]:
        places = [] if self._lost else self._places  # without a machine all start anew
        return sorted(device for place in places for device in place.devices)

    @property
    def threads(self) -> int:
        return self.options.threads or max(1, int(self._on_ray.cpus))

    @property
    def folder(self) -> Path:
        if self._on_ray.shared is None and len(self._places) > 1:
            raise PiperError(
                f"the state of devices on {len(self._places)} machines is copied into a folder "
                "that all of them see: give shared=, a folder on a network disk, or leave out "
                "restarts="
            )
        if not self._folders:
            self._folders.append(Path(tempfile.mkdtemp(prefix="piper-", dir=self._on_ray.shared)))
        return self._folders[0]

    def seat(self, devices: Iterable[int], kind: torch.device) -> None:
        if not self._finalizer.alive:
            raise WorkerError("the workers have ended after an error: launch the program again")
        wanted = sorted(devices)
        if self._lost:
            _release(self._ray, self._held)
            self._places, self._lost = [], False
        if wanted and not self._places:
            self._places = self._placed(len(wanted), kind)
        for place in self._places:
            place.devices = [device for device in place.devices if device in wanted]
        seated = self.devices
        new = [device for device in wanted if device not in seated]
        if len(wanted) > self._each * len(self._places):
            raise PiperError(
                f"{len(wanted)} devices need more machines than the {len(self._places)} with "
                f"{self._each} devices each that this trainer has: launch the larger program first"
            )
        for place in self._places:
            room = self._each - len(place.devices)
            place.devices, new = sorted(place.devices + new[:room]), new[room:]
        started = [
            place.actor.seat.remote(place.devices, kind, self._store, sys.path)
            for place in self._places
        ]
        self.started = sorted(device for row in self._got(started) for device in row)

    def rename(self, devices: Mapping[int, int]) -> None:
        for place in self._places:
            place.devices = sorted(devices.get(device, device) for device in place.devices)
        self._got([place.actor.rename.remote(devices) for place in self._places])

    def _placed(self, devices: int, kind: torch.device) -> list[_Place]:
        """An actor on each machine, in the order of their addresses."""
        ray, options, gpus = self._ray, self._on_ray, kind.type == "cuda"
        rooms = rooms_of(ray.nodes(), options.labels, options.cpus, gpus=gpus)
        self._each = equal_share(devices, rooms, options.machines)
        count = devices // self._each
        bundle = {"CPU": options.cpus * self._each, **({"GPU": self._each} if gpus else {})}
        groups = import_module("ray.util.placement_group")
        group = groups.placement_group(
            [bundle] * count,
            strategy="STRICT_SPREAD",
            bundle_label_selector=[dict(options.labels)] * count if options.labels else None,
        )
        self._held.append(group)
        if not group.wait(options.start_timeout):
            raise PiperError(
                f"the cluster had no free room for {count} x {bundle} within "
                f"{options.start_timeout:g} s: other jobs use it (ray status shows what is free)"
            )
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        table = groups.placement_group_table(group)["bundles_to_node_id"]
        actor = ray.remote(max_restarts=0, max_task_retries=0)(RayMachine)
        schedule = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        actors = []
        for i in sorted(range(count), key=lambda i: (addresses[table[i]], table[i])):
            made = actor.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=schedule(group, placement_group_bundle_index=i),
                runtime_env=dict(options.runtime_env) or None,
            ).remote(addresses[table[i]], options)
            actors.append(made)
            self._held.insert(0, made)
        facts = self._got([actor.facts.remote() for actor in actors])
        self._weights = None
        self._store: StoreAddress = self._got([actors[0].open_store.remote()])[0]
        return [_Place(actor, fact) for actor, fact in zip(actors, facts, strict=True)]

    def _got(self, refs: Sequence[Any]) -> list[Any]:
        """The results of actors; a WorkerError if one is lost."""
        try:
            results: list[Any] = self._ray.get(list(refs), timeout=self.options.start_timeout)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, PiperError):
                raise error.cause from None
            raise
        except self._ray.exceptions.RayError as error:
            self._lost = True
            lost = WorkerError(f"a machine of the cluster is lost: {_short(error)}")
            lost.outside = True
            raise lost from error
        return results

    # calls

    def share(self, weights: FirstWeights) -> Callable[[int], FirstWeights]:
        """Every machine has the file on its own disk."""
        if self._weights is not weights:
            buffer = io.BytesIO()
            weights.save(buffer)
            content = self._ray.put(buffer.getvalue())
            self._got([place.actor.put.remote(_WEIGHTS, content) for place in self._places])
            self._weights = weights
        folders = {device: x.facts.folder for x in self._places for device in x.devices}
        return lambda device: replace(weights, given=folders[device] / _WEIGHTS)

    def answers(self, message: Callable[[int], bytes]) -> DeviceAnswers:
        if not self._finalizer.alive:
            raise WorkerError("the workers have ended after an error: launch the program again")
        waiting = [
            (place, place.actor.call.remote([(d, message(d)) for d in place.devices], _TURN))
            for place in self._places
        ]
        known: dict[int, Any] = {}
        failed: FailedCall | None = None
        while waiting:
            refs = [ref for _, ref in waiting]
            ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=_TURN + _SILENT)
            again, still = [], list[StillWaiting]()
            for place, ref in waiting:
                answer = self._answer(place, ref) if ref in ready else self._silent(place)
                if isinstance(answer, FailedCall):
                    failed = answer if failed is None or failed.consequence else failed
                elif isinstance(answer, StillWaiting):
                    again.append((place, place.actor.answers.remote(_TURN)))
                    still.append(answer)
                else:
                    known |= answer
            if failed is not None and (not failed.consequence or not again):
                return failed
            stall = self.options.stall
            if still and all(one.quiet > stall for one in still):
                missing = "\n".join(one.missing for one in still)
                return late(f"no worker has moved for {stall:g} s", missing)
            waiting = again
        return known if failed is None else failed

    def _answer(self, place: _Place, ref: Any) -> Answered:
        try:
            answer: Answered = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, PiperError):
                raise error.cause from None
            raise
        except self._ray.exceptions.RayError as error:
            self._lost = True
            lost = f"{_devices(place)} died with the machine {place.facts.name}: {_short(error)}"
            return FailedCall(lost, outside=True)
        return answer

    def _silent(self, place: _Place) -> FailedCall:
        self._lost = True
        return FailedCall(
            f"the machine {place.facts.name} gave no sign of life for {_SILENT:g} s; it has "
            f"{_devices(place)}",
            outside=True,
        )

    # the end

    def keep_idle(self) -> None:
        if self._lost:
            return
        kept = self._got([place.actor.keep_idle.remote() for place in self._places])
        for place, devices in zip(self._places, kept, strict=True):
            place.devices = devices

    def end(self) -> None:
        self._finalizer()
        self._places = []

    def close(self, error: BaseException | None = None) -> None:
        if self._finalizer.alive and not self._lost:
            refs = [place.actor.close.remote() for place in self._places]
            self._ray.wait(refs, num_returns=len(refs), timeout=2 * GRACE)
        self.end()


def _ray() -> Any:
    try:
        return import_module("ray")
    except ImportError as error:
        raise PiperError(
            'on="ray" needs Ray: install it with pip install "piper-train[ray]"'
        ) from error


def _connect(ray: Any, address: str | None) -> None:
    try:
        ray.init(address=address, logging_level="WARNING")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise PiperError(
            f"Ray cannot be reached at {address or 'its usual address'}: {_short(error)}. Start a "
            "cluster with ray start --head, or give address="
        ) from error


def _release(ray: Any, held: list[Any]) -> None:
    """Kill the actors, whose workers end with them, and return their room to the cluster."""
    *actors, group = held or [None]
    held.clear()
    for actor in actors:
        ray.kill(actor)
    if group is not None:
        import_module("ray.util.placement_group").remove_placement_group(group)


def _end(ray: Any, held: list[Any], folders: list[Path], *, disconnect: bool) -> None:
    if ray.is_initialized():
        _release(ray, held)
        if disconnect:
            ray.shutdown()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _devices(place: _Place) -> str:
    numbers = ", ".join(map(str, place.devices))
    return (
        f"the workers of devices {numbers}"
        if len(place.devices) > 1
        else (f"the worker of device {numbers}")
    )


def _short(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
