"""If several processes have a trainer, as under torchrun, all must have the same program,
optimizer, initial weights and batches. Each sends a short digest of its own; if two differ, every
one raises the same error.

A tensor's digest sums the bits of each row: this takes one pass over the data, and the order of the
rows matters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from piper.base.arguments import whole_number
from piper.base.errors import PiperError
from piper.base.units import listed
from piper.capture.code.serialize import program_to_json
from piper.launch.optimizer_facts import OptimizerFacts, difference, facts_of, places_of, plain
from piper.program.deferred import Deferred, Outline
from piper.program.program import Program
from piper.state.checkpoint.boxes import Box
from piper.state.checkpoint.index import GroupEntry
from piper.state.weights.first_tensors import Fetch, FirstTensor

_Key = TypeVar("_Key")
Fingerprints = dict[str, str]
Everyone = Callable[[Any], list[Any]]
"""All-gathers an object over the processes, by rank."""
_PLANS = "plans"
_ERROR = "error"
_CORNER = 16
"""Elements compared along each dimension of a tensor that is read from files."""
_FIRST = 3
"""The first batches are all compared; after these, only every n-th."""


def fingerprints(program: Program) -> Fingerprints:
    """A digest for each part of a program, by a readable name."""
    codes = [step.code for step in program.steps]
    chunks = [chunk for code in codes for row in code.programs.values() for chunk in row]
    graphs = dict.fromkeys(chunks)
    constants = [(n, of_tensor(x)) for code in codes for n, x in sorted(code.constants.items())]
    training = program.training
    return {
        "number of devices": str(len(program.devices)),
        "strategy": _digest(program.strategy.to_json()),
        "settings (precision, clip_norm, on_nan, seed, microbatches, device, compiler)": _digest(
            [
                str(training.precision),
                training.clip_norm,
                training.on_nan,
                training.seed,
                program.microbatches,
                program.device.type,
                type(program.compiler).__name__,
            ]
        ),
        "default dtype": str(training.default_dtype),
        "model's code": _digest([program_to_json(chunk) for chunk in graphs]),
        "constants in the model's code": _digest(constants),
        _PLANS: _digest([str(p) for step in program.steps for p in step.plans]),
    }


class Agreement:
    """Compares what the processes do, and refuses differences."""

    def __init__(self, once: Callable[..., Any], *, weights: bool, batches: int) -> None:
        """Compare the initial weights if ``weights``, and every ``batches``-th batch. ``once`` is
        that of a worker group."""
        self._once = once
        self._everyone: Everyone = partial(once, list)
        self._weights = weights
        self._trained = _BatchChecks(batches, self._everyone)
        self._evaluated = _BatchChecks(batches, self._everyone)
        self._place_of: Mapping[str, int] = {}
        self._seen: Fingerprints = {}
        """Digests of initial weights by name."""

    def agree_on(self, program: Program) -> None:
        """Refuse processes whose program, optimizer or scheduler differs from rank 0's. Digests of
        what was given to compile are compared. Where they differ, or are not known, every process
        compiles for itself, and what it has compiled is compared. Then all learn the outline of
        rank 0's program."""
        given = self._everyone(program.given)
        by_rank = None
        if None in given or len(set(given)) > 1:
            by_rank = self._everyone(_fingerprints_or_error(program))
            _refuse_other_parts(by_rank, [part for part in by_rank[0] if part != _PLANS])
        outline = self._once(lambda: Outline.of(program))
        if isinstance(program, Deferred):
            program.outlined(outline)
        facts = facts_of(program)
        self._place_of = places_of(facts)
        self._refuse_other_facts(facts)  # before the plans, which state the optimizer's memory
        if by_rank is not None:
            _refuse_other_parts(by_rank, [_PLANS])

    def refuse_other_steps(
        self,
        batch: Sequence[Tensor],
        rows: Sequence[int] | None,
        groups: Callable[[], Sequence[GroupEntry]],
    ) -> None:
        """Refuse a batch that is not the same in all processes, and ``groups``, the param groups,
        whose settings differ: the user may have changed them."""
        if not self._trained.refuse_others(batch, rows):
            return
        mine: OptimizerFacts = {}
        for group in groups():
            for place in {self._place_of[name] for name in group.names}:
                for key, value in group.settings.items():
                    mine[f"{key} of param group {place}"] = plain(value)
        self._refuse_other_facts(mine)

    def refuse_other_batches(self, batch: Sequence[Tensor], rows: Sequence[int] | None) -> None:
        """The same for the batch of an evaluation."""
        self._evaluated.refuse_others(batch, rows)

    def _refuse_other_facts(self, mine: OptimizerFacts) -> None:
        if len(set(self._everyone(_digest(mine)))) == 1:
            return
        first: dict[str, tuple[int, Any]] = {}
        for rank, facts in enumerate(self._everyone(mine)):
            for what, value in facts.items():
                other, known = first.setdefault(what, (rank, value))
                if (unlike := difference({what: known}, {what: value})) is not None:
                    name, one, two = unlike
                    raise PiperError(
                        f"ranks {other} and {rank} train differently: {name} is {one} on rank "
                        f"{other} and {two} on rank {rank}; under torchrun every process must "
                        "train with the same optimizer and scheduler, so let nothing of them "
                        "depend on the rank"
                    )

    def refuse_other_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse to load tensors that are not the same in all processes."""
        mine = {name: of_tensor(x) for name, x in tensors.items()}
        if len(set(self._everyone(_digest(mine)))) == 1:
            return
        said = self._everyone(mine)
        for rank, theirs in enumerate(said):
            names = [n for n in {**said[0], **theirs} if said[0].get(n) != theirs.get(n)]
            if names:
                raise PiperError(
                    f"the state dicts of ranks 0 and {rank} differ, and nothing has changed: "
                    f"{listed(names[:5], len(names))}; under torchrun every process must load the "
                    "same values: read the same file on all of them, or send those of rank 0 to "
                    "the others"
                )

    def noting(self, fetch: Fetch) -> Fetch:
        """``fetch``, which notes a digest of each initial weight."""
        self._seen = {}

        def noted(name: str) -> FirstTensor:
            tensor = fetch(name)
            self._seen[name] = _of_first(tensor)
            return tensor

        return noted if self._weights else fetch

    def refuse_other_weights(self) -> None:
        """Refuse noted weights that differ between two processes."""
        if not self._weights:
            return
        if different := list(_unlike(self._everyone(self._seen))):
            _, one, two = different[0]
            names = list(dict.fromkeys(name for name, _, _ in different))
            raise PiperError(
                f"the first weights differ between ranks {one} and {two}: "
                f"{listed(names[:5], len(names))}; under torchrun every process must begin with "
                "the same ones: call torch.manual_seed with the same number on all of them before "
                "the model is made, or load the same file (check_weights=False if trainer.load is "
                "to replace them all)"
            )


def _fingerprints_or_error(program: Program) -> Fingerprints:
    try:
        return fingerprints(program)
    except PiperError as error:
        return {_ERROR: str(error)}


def _refuse_other_parts(by_rank: Sequence[Fingerprints], parts: Sequence[str]) -> None:
    """Refuse a rank whose program differs from rank 0's in one of these parts."""
    for rank, theirs in enumerate(by_rank):
        if _ERROR in theirs:
            raise PiperError(
                f"rank {rank} has another program than rank 0, which cannot be compiled: "
                f"{theirs[_ERROR]}"
            )
        different = [part for part in parts if theirs[part] != by_rank[0][part]]
        if different:
            raise PiperError(
                f"rank {rank} has another program than rank 0: its {', its '.join(different)} "
                "differ; under torchrun every process must compile the same model with the "
                "same strategy and settings, so let nothing of them depend on the rank"
            )


class _BatchChecks:
    """Compares the first batches, then every ``every``-th; no batch if ``every`` is 0."""

    def __init__(self, every: int, everyone: Everyone) -> None:
        self._every = whole_number("check_batches", every, 0)
        self._everyone = everyone
        self._seen = 0

    def refuse_others(self, batch: Sequence[Tensor], rows: Sequence[int] | None = None) -> bool:
        """Refuse a batch that is not the same in all processes. If each process has only its own
        ``rows``, rows that several processes have must be equal. Returns whether this batch was
        compared."""
        self._seen += 1
        if not self._every or (self._seen > _FIRST and self._seen % self._every):
            return False
        if rows is not None:
            mine = [_of_rows(x, rows) for x in batch]
            _refuse_other_rows(_compared(mine, self._everyone, own_rows=True))
            return True
        by_rank = _compared([of_tensor(x) for x in batch], self._everyone, own_rows=False)
        for rank, theirs in enumerate(by_rank):
            if theirs == by_rank[0]:
                continue
            place = next(i for i, x in enumerate(theirs) if x != by_rank[0][i])
            raise PiperError(
                f"the batches of ranks 0 and {rank} differ: tensor {place} of {len(theirs)}, of "
                f"shape {list(batch[place].shape)} here; under torchrun every process must give "
                "the same global batch, of which it computes its own rows: leave out "
                "DistributedSampler, and shuffle with a generator of the same seed everywhere "
                "(check_batches=0 turns this comparison off)"
            )
        return True


def _compared(mine: Any, everyone: Everyone, *, own_rows: bool) -> list[Any]:
    """The digests of every process's batch, by rank. Either all processes give their own rows, or
    all give whole batches."""
    by_rank = everyone((own_rows, mine))
    kinds = [own for own, _ in by_rank]
    if len(set(kinds)) > 1:
        raise PiperError(
            f"rank {kinds.index(True)} gives its own rows of the batch (rows=True), and rank "
            f"{kinds.index(False)} a whole one: all processes must do the same"
        )
    return [digests for _, digests in by_rank]


def _refuse_other_rows(by_rank: Sequence[Sequence[Mapping[int, int]]]) -> None:
    """Refuse rows that two processes share but that differ."""
    bits = [
        {(place, row): x for place, rows in enumerate(tensors) for row, x in rows.items()}
        for tensors in by_rank
    ]
    for (place, row), first, rank in _unlike(bits):
        raise PiperError(
            f"row {row} of the batch differs between ranks {first} and {rank}, in "
            f"tensor {place} of {len(by_rank[rank])}: with rows=True every process must give "
            "the rows trainer.rows of one global batch, in this order "
            "(check_batches=0 turns this comparison off)"
        )


def _unlike(by_rank: Iterable[Mapping[_Key, Any]]) -> Iterator[tuple[_Key, int, int]]:
    """The keys whose values differ between two ranks, with the first rank that has the key and the
    other."""
    first: dict[_Key, tuple[int, Any]] = {}
    for rank, theirs in enumerate(by_rank):
        for key, value in theirs.items():
            other, known = first.setdefault(key, (rank, value))
            if value != known:
                yield key, other, rank


def of_tensor(x: Tensor) -> str:
    """A short digest of a tensor's shape, dtype and all its values."""
    head = f"{x.dtype} {list(x.shape)} ".encode()
    return hashlib.blake2b(head + _sums(x).cpu().numpy().tobytes(), digest_size=8).hexdigest()


def _of_rows(x: Tensor, rows: Sequence[int]) -> dict[int, int]:
    """The digest of each row of a tensor, by the row's index in the global batch."""
    has_rows = x.dim() > 0 and x.shape[0] == len(rows)
    return dict(zip(rows, _sums(x).tolist(), strict=True)) if has_rows else {}


def _sums(x: Tensor) -> Tensor:
    """The integer sum of each row's bits; it does not depend on the order of addition."""
    x = x.detach()
    rows = _bits(x.contiguous())
    rows = rows.reshape(x.shape[0] if x.dim() else 1, -1) if x.numel() else rows.reshape(0, 1)
    return rows.sum(1, dtype=torch.int64)


def _of_first(first: FirstTensor) -> str:
    """A short digest of initial values. No process reads a tensor in files whole, so its digest
    covers its file entry and a corner of its values."""
    if first.in_files:
        corner = Box.whole([min(n, _CORNER) for n in first.shape])
        values = torch.zeros(corner.shape, dtype=first.dtype)
        first.fill(replace(first.slices[0], box=corner, at=values), first.dtype)
        return _digest([str(first.slices), of_tensor(values)])
    return of_tensor(first.whole())


def _bits(x: Tensor) -> Tensor:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.reshape(-1).view(whole.get(x.element_size(), torch.uint8))


def _digest(data: Sequence[Any] | Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
