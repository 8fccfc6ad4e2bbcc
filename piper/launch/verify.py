"""``verify``: trains a program on virtual devices, and the same model in plain PyTorch on one.

A program enters; a report of the largest differences leaves. Both train copies of the model on the
same batches, in fp64 if the model and its loss can. If they part, one more step finds where.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from piper.base.arguments import whole_number
from piper.base.errors import PiperError, PiperWarning
from piper.base.modes import without_modes
from piper.base.units import class_text, counted
from piper.capture.batch import Batch
from piper.capture.chosen_regions import LAYER, chosen_tags
from piper.launch.launch import launch
from piper.launch.plain_training import PlainTraining, copied, in_dtype, observed
from piper.launch.trainer.step_result import StepResult
from piper.launch.trainer.trainer import Trainer
from piper.program.compile.compile_arguments import CompileArguments
from piper.program.program import Program

EXACT, MIXED, OWN = 1e-9, 1e-6, 1e-4
"""The largest difference from reduction order, as a fraction of a tensor's largest element: in
fp64, in fp64 with a loss in fp32 (language models of transformers), in the model's own dtype."""
NORMS = 1e-5
"""The same for gradient norms, which a step reports in fp32."""


@dataclass(frozen=True, slots=True)
class Verification:
    """How far a program is from plain PyTorch."""

    differences: Mapping[str, float]
    """The largest difference of each tensor of the final state, and of the losses and gradient
    norms of each step, as a fraction of the largest element."""
    tolerance: float
    dtype: torch.dtype | None
    """The dtype of the comparison; None if the model's own was kept."""
    steps: int
    devices: int
    parted: str = ""
    """The first module and pass in which the two differ, if it is known."""

    @property
    def equal(self) -> bool:
        """Whether every difference can come from the order of reductions."""
        return all(x <= self._allowed(name) for name, x in self.differences.items())

    @property
    def where(self) -> str:
        """The name of the largest difference. If all is equal, gradient norms do not count: they
        are reported in fp32."""
        wrong = [name for name, x in self.differences.items() if not x <= self._allowed(name)]
        precise = [name for name in self.differences if not name.startswith(_NORM)]
        return max(wrong or precise, key=self.differences.__getitem__)

    @property
    def largest(self) -> float:
        """The largest difference."""
        return self.differences[self.where]

    def _allowed(self, name: str) -> float:
        return max(NORMS, self.tolerance) if name.startswith(_NORM) else self.tolerance

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "equal": self.equal,
            "largest": self.largest,
            "where": self.where,
            "parted": self.parted,
            "differences": dict(self.differences),
        }

    def __str__(self) -> str:
        difference = f"largest difference {self.largest:.0e} ({self.where})"
        precision = "fp64" if self.dtype is torch.float64 else "the model's own precision"
        if self.dtype is torch.float64 and self.tolerance > EXACT:
            precision += f" with parts in fp32 (equal up to {self.tolerance:.0e})"
        how = (
            f"{counted(self.steps, 'step')} on {counted(self.devices, 'device')} beside plain "
            f"PyTorch on one, in {precision}, without dropout"
        )
        if self.equal:
            return f"equal up to reduction order: {difference}\n{how}"
        parted = f"; they part first in {self.parted}" if self.parted else ""
        said = f"not equal: {difference}{parted}\n{how}"
        return f"{said}\n{_AMPLIFIED}" if self.parted == _UPDATE else said


_NORM = "gradient norm"
_UPDATE = "an update of the optimizer"
_AMPLIFIED = (
    "The loss, the forwards and the gradients of a step are equal. Adam divides by the size of a "
    "gradient, so rounding shows where that is nearly zero. If the program is also equal with "
    "torch.optim.SGD, this is most likely the reason"
)


def verify(
    program: Program, *, steps: int = 3, batches: Iterable[Any] | None = None
) -> Verification:
    """Train ``program`` on virtual devices for some ``steps``, and its model in plain PyTorch.

    Both start from the same weights. Each step takes a batch of ``batches``, ``(*inputs,
    *targets)`` or a dict; without them, the example, with its rows in another order at each step.
    Dropout modules are off, because two implementations draw different numbers; a model that draws
    others is refused. Numbers are compared with those of the whole batch at once.
    """
    if not isinstance(program, Program):
        raise PiperError(f"verify takes what piper.compile returns, not {class_text(program)}")
    given, again = program.arguments, program.again
    if given is None or again is None:
        raise PiperError(
            "verify trains the model in plain PyTorch too, and a program that was loaded has no "
            "model: compile it from its model, or give the command line its script"
        )
    whole_number("steps", steps)
    _refuse_without_values(given)
    rows = list(itertools.islice(_batches(given.batch, batches), steps))
    if not rows:
        raise PiperError("batches= has no batch: give at least one")
    try:
        return _Run(program, given, rows, torch.float64).verified()
    except (PiperError, RuntimeError, TypeError):  # an operation, or the loss, has no fp64
        return _Run(program, given, rows, None).verified()


@dataclass(frozen=True, slots=True)
class _Run:
    """A comparison in one dtype; None is the model's own."""

    program: Program
    given: CompileArguments
    batches: list[Batch]
    dtype: torch.dtype | None

    def verified(self) -> Verification:
        differences, kind = self._differences()
        precise = EXACT if kind is torch.float64 else MIXED
        verification = Verification(
            differences,
            tolerance=precise if self.dtype is torch.float64 else OWN,
            dtype=self.dtype,
            steps=len(self.batches),
            devices=len(self.program.devices),
        )
        if verification.equal:
            return verification
        with suppress(PiperError):  # a model that cannot report more is not located
            verification = replace(verification, parted=self._parted(verification.tolerance))
        return verification

    def _differences(self) -> tuple[dict[str, float], torch.dtype]:
        """Differences by name, and the dtype of the loss."""
        mine, theirs = copied(self.given, self.dtype), copied(self.given, self.dtype)
        differences: dict[str, float] = {}
        with self._launched(mine) as trainer:
            if self.given.init is not None:
                theirs.model.load_state_dict(trainer.state_dict(), strict=False)
            plain = PlainTraining(theirs, self.program.device)
            for step, batch in enumerate(self.batches):
                result, loss, norm = self._stepped(trainer, plain, batch)
                differences[f"loss of step {step}"] = _difference(result.loss, loss)
                if result.grad_norm is not None:
                    differences[f"{_NORM} of step {step}"] = _difference(result.grad_norm, norm)
            differences |= _by_name(trainer.state_dict(), plain.state)
        return differences, loss.dtype

    def _parted(self, tolerance: float) -> str:
        """The first module and pass in which one step differs. Blocks report the mean square of
        their results; a plain SGD step of size 1 shows the gradients."""
        given = replace(
            self.given,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            scheduler=None,
            clip_norm=None,
        )
        tags = {p: name for p, name in chosen_tags(given.model).items() if name == LAYER}
        mine, _ = observed(copied(given, self.dtype), tags)
        theirs, seen = observed(copied(given, self.dtype), tags)
        with self._launched(mine) as trainer:
            plain = PlainTraining(theirs, self.program.device)
            before = plain.state
            result, loss, _ = self._stepped(trainer, plain, self.batches[0])
            for path, x in seen.items():
                if _difference(result.outputs[path], x) > tolerance:
                    return f"the forward of {path}"
            if _difference(result.loss, loss) > tolerance:
                return "the forward after the last block, or the loss"
            changes = [
                {name: x - before[name] for name, x in state.items() if x.is_floating_point()}
                for state in (trainer.state_dict(), plain.state)
            ]
        wrong = [name for name, x in _by_name(*changes).items() if x > tolerance]
        paths = [path for path in seen if any(name.startswith(f"{path}.") for name in wrong)]
        if paths:
            return f"the backward of {paths[-1]}"
        return f"the backward of {wrong[0]}" if wrong else _UPDATE

    @contextmanager
    def _launched(self, given: CompileArguments) -> Iterator[Trainer]:
        """The trainer of ``given`` under the program's strategy."""
        assert self.program.again is not None
        with warnings.catch_warnings():  # the program's own compilation has given them
            warnings.simplefilter("ignore", PiperWarning)
            program = self.program.again(given, limited=False)
        _refuse_random(program)
        with (
            warnings.catch_warnings(),
            launch(program) as trainer,
            without_modes(program.training.default_dtype),
        ):
            warnings.filterwarnings("ignore", "nothing is saved")
            yield trainer

    def _stepped(
        self, trainer: Trainer, plain: PlainTraining, batch: Batch
    ) -> tuple[StepResult, Tensor, Tensor]:
        """A step of both on the same batch: its result, and the loss and norm of ``plain``."""
        here = Batch(in_dtype(batch.leaves, self.dtype), batch.spec, batch.bare)
        return trainer.step(*here.given), *plain.step(here)


def _by_name(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """The difference of each tensor. Elements that are tiny beside the largest of all are rounding
    errors: a gradient that is zero but for them is not compared with itself."""
    most = max(map(_largest, expected.values()), default=0.0)
    differences: dict[str, float] = {}
    for name, x in expected.items():
        if name not in actual:
            differences[name] = float("inf")
        elif x.is_floating_point() or x.is_complex():
            least = most * 100 * torch.finfo(x.dtype).eps ** 0.5
            differences[name] = _difference(actual[name], x, least)
        else:
            differences[name] = float(not torch.equal(actual[name], x.to(actual[name].device)))
    return differences


def _difference(actual: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """The largest difference as a fraction of the largest element, or of ``least``."""
    size = max(_largest(expected), least)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    apart = _largest(actual.to(expected.device, wide) - expected.to(wide))
    return apart / size if size else apart


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def _batches(example: Batch, batches: Iterable[Any] | None) -> Iterator[Batch]:
    """The batches, in the structure of the example."""
    if batches is not None:
        for batch in batches:
            yield example.like(*((batch,) if isinstance(batch, Mapping | Tensor) else batch))
        return
    for step in itertools.count():
        leaves = (
            x.roll(step, 0) if isinstance(x, Tensor) and example.has_rows(x) else x
            for x in example.leaves
        )
        yield Batch(tuple(leaves), example.spec, example.bare)


def _refuse_without_values(given: CompileArguments) -> None:
    example = given.batch
    state = [*given.model.named_parameters(), *given.model.named_buffers()]
    tensors = [(example.tensor_path(i), x) for i, x in enumerate(example.tensors)]
    for name, x in [*state, *tensors]:
        if x.is_meta or isinstance(x, FakeTensor):
            raise PiperError(
                f"verify cannot compare {name}, which has no values (it is a meta or fake tensor): "
                "give the model real weights and an example with values"
            )


def _refuse_random(program: Program) -> None:
    for chunk in program.training_step.facts.whole.chunks:
        if chunk.random:
            name = "/".join(f"{tag}[{i}]" for tag, i in chunk.tags.items()) or "the model"
            raise PiperError(
                f"verify cannot compare {name}, which draws random numbers: PyTorch would draw "
                "others. Build the model without dropout (dropout modules are off already)"
            )
