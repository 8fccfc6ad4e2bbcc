"""What the compiler must know about an optimizer: its memory cost, and which shards it can update.

Enters: the user's factory and the shapes of the trained parameters. Leaves: an ``OptimizerCost``,
or an error. The factory is called with small parameters. A table describes torch's own optimizers
(``nature.py``), a trial finds out about others (``trial.py``). A step shows the memory of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from piper.base.errors import PiperError
from piper.base.tracking import Tracker
from piper.ir.grouped import grouped
from piper.ir.rules import OptimizerCost
from piper.state.optimizer.factory import (
    NamedParameters,
    OptimizerFactory,
    kind_of,
    make,
    members_of,
    settings_by_name,
    takes_names,
    trying,
)
from piper.state.optimizer.nature import is_known, needs_whole_tensors
from piper.state.optimizer.trial import (
    Parting,
    Piece,
    made,
    step_with,
    steps_by_bucket,
    works_on_parts,
)

TrainedShapes = Mapping[str, tuple[int, ...]]
"""Shapes of the trained parameters by name, in the model's order."""

_SMALL = {1: (256,), 2: (16, 16), 3: (4, 8, 8)}
"""Small shapes by number of dimensions."""


def sample_optimizer(
    factory: OptimizerFactory, trained: TrainedShapes
) -> tuple[NamedParameters, torch.optim.Optimizer]:
    """Small parameters for all names, and an optimizer for them."""
    return made(partial(make, factory), small(trained))


def kept_kinds(
    factory: OptimizerFactory, trained: TrainedShapes, device: torch.device
) -> dict[str, frozenset[str]]:
    """For each parameter, the keys of its optimizer state after a step."""
    with trying("optimizer=", device):
        probe = Probe(factory, trained, device)
        optimizer, parameters, _ = probe.stepped([kind.pieces[0] for kind in probe.kinds])
    kept = (frozenset(map(str, optimizer.state.get(p, {}))) for p in parameters)
    rows = zip(probe.kinds, kept, strict=True)
    return {piece.name: names for kind, names in rows for piece in kind.pieces}


def cost_of(
    factory: OptimizerFactory | None, trained: TrainedShapes, device: torch.device
) -> OptimizerCost:
    """The optimizer's state size, its temporary memory in an update, whether one ``step`` must
    cover all parameters, and which ``trained`` parameters it needs unsliced. With several kinds of
    parameters: the cost of the most expensive kind."""
    if factory is None or not trained:
        return OptimizerCost(0.0)
    with trying("optimizer=", device):
        probe = Probe(factory, trained, device)
        costs = probe.costs()
        whole = not probe.known and not steps_by_bucket(probe.make, probe.pieces, device)
        unsliced = [kind for kind in probe.kinds if not probe.takes_parts(kind, _slices)]
    return OptimizerCost(
        state=max(cost.state for cost in costs),
        update=max(cost.update for cost in costs),
        together=any(cost.together for cost in costs),
        scalars=max(cost.scalars for cost in costs),
        whole=whole,
        tensors=tuple(piece.name for kind in unsliced for piece in kind.pieces),
    )


@dataclass(frozen=True, eq=False, slots=True)
class ParameterKind:
    """Parameters that a factory treats alike: in the same group, with as many dimensions."""

    pieces: tuple[Piece, ...]
    whole: bool
    """Whether their optimizer needs whole tensors, by the table or by its own declaration."""


class Probe:
    """A factory and small parameters for all names."""

    def __init__(
        self, factory: OptimizerFactory, trained: TrainedShapes, device: torch.device
    ) -> None:
        self.make = partial(make, factory)
        self.named = takes_names(factory)
        self._device = device
        try:
            given, optimizer = sample_optimizer(factory, trained)
        except PiperError:
            raise
        except Exception:
            if not self.named:
                _refuse_shape(factory, trained)
            raise
        self.optimizers = kind_of(optimizer)
        self.known = all(map(is_known, members_of(optimizer)))
        self.settings = settings_by_name(given, optimizer)
        groups = [(x, group["params"]) for x in members_of(optimizer) for group in x.param_groups]
        group_of = {p: place for place, (_, group) in enumerate(groups) for p in group}
        rows = zip(small(trained), given, strict=True)
        kinds = grouped(((group_of[p], p.ndim), piece) for piece, (_, p) in rows)
        self.kinds = [
            ParameterKind(tuple(pieces), needs_whole_tensors(groups[place][0]))
            for (place, _), pieces in kinds.items()
        ]

    @property
    def pieces(self) -> list[Piece]:
        """One parameter of each kind in the first half, a second one of each in the other."""
        return [k.pieces[i] for i in (0, 1) for k in self.kinds if len(k.pieces) > i]

    def costs(self) -> list[OptimizerCost]:
        """The cost of each kind; of matrices if the factory takes no names."""
        if not self.named:
            return [self._cost(small({"0": (0, 0), "1": (0, 0)}), ())]
        return [self._cost(kind.pieces, self._beside(kind)) for kind in self.kinds]

    def takes_parts(self, kind: ParameterKind, cut: Parting) -> bool:
        """Whether parameters of this kind may be cut: the parts are in a group with the same
        settings, and are updated as in the whole."""
        piece, beside = kind.pieces[0], self._beside(kind)
        with suppress(RuntimeError, ValueError, TypeError):  # it does not take such shapes
            whole, part = (
                settings_by_name(*made(self.make, [x, *beside]))[piece.name]
                for x in (piece, replace(piece, cut=cut))
            )
            if not kind.whole and whole == part:
                return self.known or works_on_parts(self.make, piece, cut, beside, self._device)
        return False

    def stepped(
        self, pieces: Sequence[Piece], beside: Sequence[Piece] = ()
    ) -> tuple[torch.optim.Optimizer, list[nn.Parameter], int]:
        """An optimizer and its parameters after two steps, and the temporary memory of the second.
        The parameters ``beside`` them are not updated."""
        given, optimizer = made(self.make, [*pieces, *beside], self._device)
        parameters = [p for _, p in given[: len(pieces)]]
        gradients = [piece.values(1).to(self._device) for piece in pieces]
        step_with(optimizer, parameters, gradients)
        with Tracker() as tracker:
            step_with(optimizer, parameters, gradients)
        return optimizer, parameters, tracker.peak

    def _cost(self, pieces: Sequence[Piece], beside: Sequence[Piece]) -> OptimizerCost:
        optimizer, (p,), one = self.stepped(pieces[:1], beside)
        _, _, two = self.stepped(pieces[:2], beside)
        state = [x for x in optimizer.state.get(p, {}).values() if isinstance(x, Tensor)]
        return OptimizerCost(
            state=sum(x.nbytes for x in state if x.numel() > 1) / p.nbytes,
            update=one // p.nbytes,
            together=two // p.nbytes > 1.5 * (one // p.nbytes),
            scalars=sum(x.nbytes for x in state if x.numel() == 1),
        )

    def _beside(self, kind: ParameterKind) -> list[Piece]:
        """One parameter of each other kind: a factory that takes names may need a parameter in
        every group."""
        return [x.pieces[0] for x in self.kinds if x is not kind] if self.named else []


def small(shapes: TrainedShapes) -> list[Piece]:
    """Small parameters with the same numbers of dimensions."""
    rows = enumerate(shapes.items())
    return [Piece(name, i, _SMALL.get(len(s), (4,) * len(s))) for i, (name, s) in rows]


def _refuse_shape(factory: OptimizerFactory, trained: TrainedShapes) -> None:
    """If a factory fails for some numbers of dimensions only, name the first such parameter."""
    failures: dict[int, Exception] = {}
    for n in (tried := {*map(len, trained.values()), 2}):
        try:
            make(factory, [(str(n), nn.Parameter(torch.ones((4,) * n)))])
        except Exception as error:  # noqa: BLE001 - any error is reported below
            failures[n] = error
    name = next((name for name, shape in trained.items() if len(shape) in failures), None)
    if name is None or len(failures) == len(tried):
        return
    failure, shape = failures[len(trained[name])], "x".join(map(str, trained[name])) or "a scalar"
    raise PiperError(
        f"optimizer= cannot make an optimizer for the parameter {name} ({shape}): "
        f"{type(failure).__name__}: {failure}. It is given every trained parameter, in one list: "
        "return an optimizer that takes all of them, or freeze this one in the model, by "
        "requires_grad_(False), before compiling"
    ) from failure


def _slices(whole: Tensor) -> Sequence[Tensor]:
    return whole.flatten().chunk(2)
