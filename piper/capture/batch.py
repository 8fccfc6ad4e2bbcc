"""A batch as a flat list of leaves and its structure, and the same for the model's output.

Nested ``inputs`` and ``targets`` enter; flat tensors leave, and can be put back in place. All
tensors of a batch have the same dimension 0, or one row for all rows, or no dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from piper.base.errors import CaptureError, PiperError
from piper.base.reading import torch_name
from piper.base.units import class_text, counted
from piper.ir.tensors import TensorSpec

Pad = Sequence[Any] | Mapping[str, float | int]
"""Padding values: one number for each tensor, structured like the batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The leaves of ``inputs`` and ``targets`` in order, and the structure they came from."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    bare: bool
    """Whether the batch is a flat sequence of tensors: nothing nested, no other values."""

    @staticmethod
    def of(inputs: Sequence[Any] | Mapping[str, Any], targets: Sequence[Any]) -> Batch:
        """A batch from positional inputs, or keyword inputs in a mapping, and targets."""
        _check_tuple("inputs", inputs, "a tuple, or a mapping for keywords")
        _check_tuple("targets", targets, "a tuple")
        args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
        leaves, spec = pytree.tree_flatten((args, kwargs, tuple(targets)))
        given = (*args, *targets)
        bare = len(given) == len(leaves) and all(isinstance(x, Tensor) for x in given)
        batch = Batch(tuple(leaves), spec, bare)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                _refuse_kind(leaf, batch.path(index))
            if isinstance(leaf, Tensor | int | float | None):
                continue
            if not isinstance(leaf, str) or batch.path(index).startswith("targets"):
                raise CaptureError(
                    f"{batch.path(index)} is {class_text(leaf)}, not a tensor: convert it "
                    "(torch.as_tensor) before it gets here"
                )
        return batch

    def like(self, *batch: Any) -> Batch:
        """Another batch of the same structure and shapes, given as the inputs followed by the
        targets."""
        if self._is_plainly(batch):
            return Batch(batch, self.spec, bare=True)
        built = self.built_like(*batch)
        for index, (mine, other) in enumerate(zip(self.leaves, built.leaves, strict=True)):
            self._refuse_other_leaf(index, mine, other)
        return built

    def built_like(self, *batch: Any) -> Batch:
        """Another batch of the same structure, of any shapes."""
        args, kwargs, targets = self.spec.unflatten(list(self.leaves))
        n = 1 if kwargs else len(args)
        if len(batch) != n + len(targets):
            inputs = f"1 mapping of {', '.join(kwargs)}" if kwargs else counted(n, "input")
            given = ""
            if len(batch) == 1 and isinstance(batch[0], Mapping):
                given = f"1 mapping of {', '.join(map(str, batch[0]))}"
            how = f"the inputs, then the targets{', as a tuple' if given and not kwargs else ''}"
            if kwargs and not targets:
                how = "the mapping; a collate_fn= of the DataLoader can make it of rows"
            raise PiperError(
                f"a batch here is {inputs} and {counted(len(targets), 'target')}, as in the "
                f"example that was captured; {given or counted(len(batch), 'value')} given. "
                f"Give {how}"
            )
        if kwargs and not isinstance(batch[0], Mapping):
            raise PiperError(
                f"the inputs were captured as a mapping of keywords ({', '.join(kwargs)}); "
                f"give a mapping again, not {class_text(batch[0])}"
            )
        built = Batch.of(_in_order(batch[0], kwargs) if kwargs else batch[:n], batch[n:])
        self._refuse_other_structure(built)
        return built

    def _is_plainly(self, batch: Sequence[Any]) -> bool:
        """A fast check that a flat batch of tensors matches this one. The full check in ``like``
        takes as long as launching a whole step on a GPU."""
        return (
            self.bare
            and len(batch) == len(self.leaves)
            and all(
                isinstance(other, Tensor)
                and mine.shape == other.shape
                and mine.dtype == other.dtype
                and not (other.is_meta or other.requires_grad)
                and other.layout == torch.strided
                for mine, other in zip(self.leaves, batch, strict=True)
            )
        )

    def _refuse_other_structure(self, other: Batch) -> None:
        if self.spec == other.spec:
            return
        mine = {self.path(i) for i in range(len(self.leaves))}
        theirs = {other.path(i) for i in range(len(other.leaves))}
        for index in range(len(self.leaves)):
            path = self.path(index)
            inside = sorted(p for p in theirs - mine if p.startswith(path + "["))
            if inside:
                kind = "dict" if inside[0][len(path) + 1] == "'" else "tuple or list"
                raise PiperError(
                    f"{path} is a {kind}, but a tensor in the example captured: give a tensor, "
                    "torch.as_tensor(...), or from a tokenizer return_tensors='pt'"
                )
        lacks, more = sorted(mine - theirs), sorted(theirs - mine)
        differs = [f"it lacks {', '.join(lacks)}"] if lacks else []
        differs += [f"it also has {', '.join(more)}"] if more else []
        raise PiperError(
            "the batch is not built like the example captured: "
            f"{' and '.join(differs) or 'its nesting is another'}; give every batch the parts of "
            "the example, or compile with such a batch"
        )

    def _refuse_other_leaf(self, index: int, mine: Any, other: Any) -> None:
        if isinstance(mine, Tensor) and isinstance(other, Tensor):
            if (mine.shape, mine.dtype) != (other.shape, other.dtype):
                same = mine.shape == other.shape
                raise PiperError(
                    f"{self.path(index)} is {TensorSpec.of(other)}, but {TensorSpec.of(mine)} in "
                    f"the example captured{f': convert it, .to({mine.dtype})' if same else ''}"
                )
            if other.is_meta:
                raise PiperError(f"{self.path(index)} is on the meta device and has no values")
        elif isinstance(mine, Tensor) or isinstance(other, Tensor):
            raise PiperError(
                f"{self.path(index)} is {class_text(other)}, but {class_text(mine)} in "
                "the example captured"
            )
        elif mine != other:
            raise PiperError(
                f"{self.path(index)} is {other!r}, but the program was captured with {mine!r}: "
                "pass a tensor if it changes, or capture again"
            )

    def resized(self, rows: int) -> Batch:
        """This batch with ``rows`` rows, as meta tensors."""

        def changed(x: Tensor) -> Tensor:
            if not self.has_rows(x):
                return x
            return torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device="meta")

        return self._with(changed)

    def without_content(self) -> Batch:
        """This batch as meta tensors."""
        return self._with(lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"))

    def _with(self, changed: Callable[[Tensor], Tensor]) -> Batch:
        """This batch with other tensors."""
        leaves = pytree.tree_map_only(Tensor, changed, self.leaves)
        return Batch(leaves, self.spec, self.bare)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of its tensors."""
        return tuple(tuple(x.shape) for x in self.tensors)

    @property
    def parts(self) -> tuple[Sequence[Any] | Mapping[str, Any], Sequence[Any]]:
        """The inputs (a mapping if given as one) and the targets."""
        args, kwargs, targets = self.spec.unflatten(list(self.leaves))
        return kwargs or args, targets

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Tensor))

    @property
    def given(self) -> tuple[Any, ...]:
        """The batch as the caller gives it: inputs, or one mapping of them, then targets."""
        args, kwargs, targets = self.spec.unflatten(list(self.leaves))
        return (*([kwargs] if kwargs else args), *targets)

    @property
    def size(self) -> int:
        """The batch size: dimension 0 of every tensor, except tensors of one row, which holds for
        all rows, and tensors without dimensions."""
        sizes = {
            i: x.shape[0] for i, x in enumerate(self.leaves) if isinstance(x, Tensor) and x.dim()
        }
        sizes = {i: n for i, n in sizes.items() if n != 1} or sizes
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{self.path(i)} has {n}" for i, n in sizes.items())
            raise CaptureError(
                f"inputs and targets disagree on the batch size (dimension 0): {listed}; "
                "give every tensor the same first dimension, or one row that is for all"
            )
        if not self.tensors:
            raise CaptureError(
                "inputs and targets hold no tensor: give tensors; a tokenizer makes them with "
                "return_tensors='pt'"
            )
        if not sizes:
            return 1
        size = next(iter(sizes.values()))
        if size == 0:
            raise CaptureError(f"the batch is empty: {self.path(next(iter(sizes)))} has 0 rows")
        return size

    def has_rows(self, x: Tensor) -> bool:
        """Whether dimension 0 of ``x`` is the batch; otherwise ``x`` holds for all rows."""
        return x.dim() > 0 and x.shape[0] == self.size

    def path(self, index: int) -> str:
        """The leaf as the caller writes it: ``inputs[0]``, ``inputs['mask']``, ``targets[1]``."""
        tree = self.spec.unflatten(list(range(len(self.leaves))))
        keys, _ = pytree.tree_flatten_with_path(tree)[0][index]
        root = "targets" if str(keys[0]) == "[2]" else "inputs"
        return root + "".join(str(key) for key in keys[1:])

    def tensor_path(self, index: int) -> str:
        """The ``index``-th tensor as the caller writes it."""
        positions = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        return self.path(positions[index])

    def slices(self, parts: int) -> list[tuple[Tensor, ...]]:
        """The tensors cut along dimension 0 into ``parts`` equal microbatches. Each microbatch has
        the tensors that hold for all rows."""
        size = self.size
        if not isinstance(parts, int) or parts < 1:
            raise CaptureError(
                f"microbatches={parts!r} must be a positive int; for this batch of {size}, "
                f"{_counts(size)}"
            )
        if size % parts:
            raise CaptureError(
                f"a batch of {size} does not divide into {parts} microbatches; {_counts(size)}"
            )
        n = size // parts
        return [
            tuple(x[i * n : (i + 1) * n] if self.has_rows(x) else x for x in self.tensors)
            for i in range(parts)
        ]


def _refuse_kind(x: Tensor, path: str) -> None:
    """Refuse a tensor that is not dense, or that requires grad."""
    if x.layout != torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else torch_name(x.layout)
        cure = "to_padded_tensor(0.0)" if x.is_nested else "to_dense()"
        raise CaptureError(
            f"{path} is a tensor of layout {kind}, and only dense ones can be sent and cut into "
            f"microbatches: give {path}.{cure}"
        )
    if x.requires_grad:
        raise CaptureError(
            f"{path} requires grad, and a step computes gradients of parameters alone, so its "
            f"gradient would be lost: give {path}.detach(), or make what computes it a part of "
            "the model"
        )


def _in_order(given: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """``given`` with ``names`` first, in their order: a data loader may order keys differently."""
    return {name: given[name] for name in (*(n for n in names if n in given), *given)}


def _counts(size: int) -> str:
    options = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
    return f"counts that work: {options}"


def strided_like(x: Tensor, stride: tuple[int, ...], device: torch.device) -> Tensor:
    """``x`` on ``device`` with ``stride``, the strides that a program was traced with."""
    if x.device == device and x.stride() == stride:
        return x
    if any(n > 1 and s == 0 for n, s in zip(x.shape, stride, strict=True)):
        once = x
        for dim, step in enumerate(stride):
            once = once.narrow(dim, 0, 1) if step == 0 and x.shape[dim] else once
        return strided_like(once, stride, device).expand(x.shape)
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=device).copy_(x)


def _check_tuple(name: str, given: object, wanted: str) -> None:
    allowed = Sequence | Mapping if name == "inputs" else Sequence
    if isinstance(given, DataLoader):
        raise CaptureError(
            f"{name} is a DataLoader: give the {name} of one of its batches, next(iter(loader))"
        )
    if not isinstance(given, allowed) or isinstance(given, str):
        kind = "a tensor" if isinstance(given, Tensor) else repr(given)
        raise CaptureError(f"{name} is {kind}: give {wanted}, {name}=(x,)")


@dataclass(slots=True)
class OutputTree:
    """The structure of a model's output. Tensors are numbered; all other values are kept."""

    spec: pytree.TreeSpec | None = None
    fixed: list[Any] = field(default_factory=list)

    def take(self, output: Any) -> list[Tensor]:
        """Remember the structure of ``output`` and return its tensors."""
        leaves, self.spec = pytree.tree_flatten(output)
        self.fixed = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def put(self, tensors: Sequence[Any]) -> Any:
        """The output again, with ``tensors``, or any stand-ins for them, in place."""
        assert self.spec is not None
        source = iter(tensors)
        leaves = [next(source) if leaf is _TENSOR else leaf for leaf in self.fixed]
        return pytree.tree_unflatten(leaves, self.spec)

    @property
    def tensors(self) -> int:
        return sum(leaf is _TENSOR for leaf in self.fixed)


_TENSOR = object()
