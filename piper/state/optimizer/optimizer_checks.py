"""Refuses an optimizer that cannot run a lowered step: on some device it would update parameters
otherwise than on one device that has all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch

from piper.base.errors import DirectiveError, PiperError
from piper.ir.dag.dag import Dag, group_text
from piper.ir.rules import Bucket, OptimizerCost
from piper.state.optimizer.factory import OptimizerFactory, settings_by_name, trying
from piper.state.optimizer.probe import ParameterKind, Probe, TrainedShapes, small
from piper.state.optimizer.trial import looks_across, made


def check_factory(
    factory: OptimizerFactory,
    cost: OptimizerCost,
    dag: Dag,
    trained: TrainedShapes,
    device: torch.device,
) -> None:
    """Refuse an optimizer that cannot run the lowered step of ``dag``. ``cost`` is the result of
    ``cost_of``."""
    with trying("optimizer=", device):
        probe = Probe(factory, trained, device)
        _check_devices(probe, dag, trained)
        _check_shards(probe, cost, dag)
        tried = not probe.known and _apart(dag.buckets)
        if tried and looks_across(probe.make, probe.pieces, device, of_all=probe.named):
            raise _across(probe, dag)


def _check_devices(probe: Probe, dag: Dag, trained: TrainedShapes) -> None:
    """Refuse a factory that fails on some device's parameters, or gives them other settings
    there."""
    held: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, bucket in enumerate(dag.buckets):
        for group in bucket.groups if bucket.trained else ():
            for place, device in enumerate(group):
                held[device].append((number, place % bucket.within if bucket.level else 0))
    first: dict[tuple[tuple[int, int], ...], int] = {}
    for device, parts in sorted(held.items()):
        first.setdefault(tuple(parts), device)
    for updates, device in first.items():
        shapes = {
            name: (0,) if dag.buckets[i].level and dag.buckets[i].sliced else trained[name]
            for i, rank in updates
            for name in dag.buckets[i].updated_by(rank)
        }
        if not shapes:
            continue
        try:
            pieces = small({name: shapes[name] for name in trained if name in shapes})
            actual = settings_by_name(*made(probe.make, pieces))
        except PiperError:
            raise
        except Exception as error:
            shown = ", ".join(list(shapes)[:3]) + (", ..." if len(shapes) > 3 else "")
            raise PiperError(
                f"optimizer= cannot make an optimizer for the {len(shapes)} parameters of device "
                f"{device} ({shown}): {type(error).__name__}: {error}. A device has only some of "
                "the parameters, and not of every group: leave out optimizers and groups whose "
                "list is empty"
            ) from error
        moved = [name for name in shapes if actual[name] != probe.settings[name]]
        if moved and not probe.named:
            raise _across(probe, dag)
        if moved:
            raise DirectiveError(
                f"optimizer= gives the parameter {moved[0]!r} other settings where it is given all "
                f"parameters than on device {device}, which has only {len(shapes)} of them, "
                "perhaps in slices: group them by their names alone"
            )


def _check_shards(probe: Probe, cost: OptimizerCost, dag: Dag) -> None:
    """Refuse shards of tensors that the optimizer needs whole."""
    kinds = {piece.name: kind for kind in probe.kinds for piece in kind.pieces}
    known: dict[tuple[ParameterKind, int], bool] = {}
    for bucket in (b for b in dag.buckets if b.trained and b.ways > 1):
        for name in (n for n in bucket.parameters if n in cost.tensors):
            key = kinds[name], bucket.dim
            if key not in known:
                cut = partial(torch.chunk, chunks=2, dim=bucket.dim)
                known[key] = probe.takes_parts(kinds[name], cut)
            if known[key]:
                continue
            chunk = next(c.index for c in dag.model.chunks if name in c.parameters)
            shard = dag.shard(chunk, name)
            assert shard is not None
            raise DirectiveError(
                f"{dag.history[shard.made_by]}: the optimizer {probe.optimizers}, as given, "
                f"must have the whole of {name!r}, but each device has one of {bucket.ways} shards "
                f"along dimension {bucket.dim}: do not shard it, or give it an optimizer that "
                "treats each element by itself, such as torch.optim.AdamW (optimizer= may be a "
                "function of named_parameters, and return several optimizers)"
            )


def _across(probe: Probe, dag: Dag) -> DirectiveError:
    devices = {d for b in dag.buckets if b.trained for group in b.groups for d in group}
    return DirectiveError(
        f"the optimizer {probe.optimizers} looks at all parameters together (as for a norm over "
        "all of them, an estimate of the learning rate, or groups by the place in the list), but "
        f"here no device has all: devices {group_text(tuple(sorted(devices)))} have different "
        "ones. Train with it on one device or on replicas with zero=0, or use an optimizer that "
        "treats each parameter by itself (to clip by the norm of all gradients, give clip_norm= "
        "to compile)"
    )


def _apart(buckets: Sequence[Bucket]) -> bool:
    """Whether some device lacks some of the trained parameters."""
    trained = [b for b in buckets if b.trained]
    owners = [{d for group in b.groups for d in group} for b in trained]
    return any(b.level or b.ways > 1 for b in trained) or any(x != owners[0] for x in owners)
