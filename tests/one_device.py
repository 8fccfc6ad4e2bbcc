"""The reference step on one device, from a captured model's programs only.

Microbatches run one after another, each forward then backward. Gradients accumulate, then the
optimizer steps once. Every other way to run a model must give the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from piper.base.errors import PiperError
from piper.capture.batch import strided_like
from piper.capture.chunk.chunks import Chunk
from piper.capture.code.chunk_program import ChunkProgram, Function
from piper.capture.code.codegen import Runner
from piper.capture.model import Captured
from piper.ir.dag.facts import LOSS_PREFIX
from piper.ir.passes import Kind, Pass, Ref
from piper.ir.tensors import TensorSpec
from piper.runtime.draw_seeds import fold, seeded
from piper.state.optimizer.factory import OptimizerFactory, make
from piper.state.weights.source import materialised
from piper.state.weights.weight_files import Init


@dataclass(frozen=True, slots=True)
class SingleStepResult:
    """The result of one step."""

    loss: Tensor
    """The mean loss over the batch, on the device. Reading it waits for the step."""
    seconds: float
    """Host time until all work of the step was submitted to the device."""
    outputs: tuple[Any, ...] = ()
    """The model's output for each microbatch, if the capture keeps outputs."""


@dataclass(slots=True)
class _Sums:
    """Gradients summed over microbatches, and losses, counts and outputs by microbatch."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    counts: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)


class SingleDevice:
    """Trains a captured model on one device."""

    def __init__(
        self,
        captured: Captured,
        model: nn.Module,
        optimizer: OptimizerFactory | None = None,
        *,
        init: Init | None = None,
        loss: nn.Module | None = None,
        seed: int = 0,
        split_backward: bool = False,
    ) -> None:
        """``model`` gives the weights. Tensors that are already on the captured device are trained
        in place; others are copied. A model on the meta device needs ``init``. ``loss`` is the
        loss module, if it has parameters. ``split_backward`` runs BI and BW instead of B."""
        self.captured = captured
        self.seed = seed
        self.steps = 0
        self._generator = torch.Generator(captured.device)
        self._runners = runners_of(captured)
        self._backward = (Pass.BI, Pass.BW) if split_backward else (Pass.B,)
        self._held = [_held(program, self._backward) for program in captured.programs]
        self._last_use = _last_uses(captured)
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        self._take_state(model, "", init)
        if loss is not None:
            self._take_state(loss, LOSS_PREFIX, init)
        for name, constant in captured.constants.items():
            self.buffers[name] = constant.to(captured.device)
        self._check_state()
        self._weights = {name: p.detach() for name, p in self.parameters.items()}
        trained = [(name, p) for name, p in self.parameters.items() if p.requires_grad]
        self.optimizer = None if optimizer is None else make(optimizer, trained)

    def step(self, *batch: Any) -> SingleStepResult:
        """Train on one batch: the inputs, then the targets, like the captured example."""
        start = time.perf_counter()
        loss, gradients, outputs = self.differentiate(*batch)
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return SingleStepResult(loss, time.perf_counter() - start, outputs)

    def differentiate(
        self, *batch: Any, order: Iterable[int] | None = None
    ) -> tuple[Tensor, dict[str, Tensor], tuple[Any, ...]]:
        """The loss, the gradients by parameter name, and the outputs of one batch. Updates nothing
        but mutated buffers. ``order`` is the order of the microbatches, by default 0, 1, 2, ..."""
        microbatches = self._microbatches(batch)
        sums = _Sums()
        for index in range(len(microbatches)) if order is None else order:
            self._microbatch(index, microbatches[index], sums)
        outputs = tuple(sums.outputs[i] for i in sorted(sums.outputs))
        total = torch.stack([sums.losses[i] for i in sorted(sums.losses)]).sum()
        if not sums.counts:
            return total / len(sums.losses), sums.gradients, outputs
        count = torch.stack([sums.counts[i] for i in sorted(sums.counts)]).sum()
        for gradient in sums.gradients.values():
            gradient.div_(count)
        return total / count, sums.gradients, outputs

    def _microbatch(self, index: int, batch: Sequence[Tensor], sums: _Sums) -> None:
        captured = self.captured
        values: dict[int, Tensor] = dict(enumerate(batch))
        kept: list[dict[Ref, Tensor]] = []
        for chunk, program, runners in zip(
            captured.chunks, captured.programs, self._runners, strict=True
        ):
            kept.append(self._forward(chunk, program, runners[Pass.F], values, index))
        loss = values[captured.cut.loss]
        sums.losses[index] = loss
        seed = torch.ones_like(loss)
        if captured.cut.count is None:
            seed /= captured.microbatches
        else:
            sums.counts[index] = values[captured.cut.count]
        if captured.output_tree.spec is not None:
            outputs = [values[i] for i in captured.cut.outputs]
            sums.outputs[index] = captured.output_tree.put(outputs)
        values.clear()
        gradients = {captured.cut.loss: seed}
        shared: dict[str, Tensor] = {}
        for chunk, program, runners in zip(
            reversed(captured.chunks),
            reversed(captured.programs),
            reversed(self._runners),
            strict=True,
        ):
            self._back(chunk, program, runners, kept.pop(), gradients, shared)
        for name, gradient in shared.items():
            if name in sums.gradients:
                sums.gradients[name].add_(gradient)
            else:
                sums.gradients[name] = gradient

    def _forward(
        self,
        chunk: Chunk,
        program: ChunkProgram,
        run: Runner,
        values: dict[int, Tensor],
        microbatch: int,
    ) -> dict[Ref, Tensor]:
        """Run a chunk forward and add its outputs to ``values``. Returns the tensors that its
        backward reads."""
        function = program.functions[Pass.F]
        tensors = {Ref(Kind.INPUT, i): values[value] for i, value in enumerate(chunk.inputs)}
        draws = fold(self.seed, step=self.steps, chunk=chunk.index, microbatch=microbatch)
        with seeded(self._generator, draws) if function.random else nullcontext():
            self._call(chunk, function, run, tensors)
        for i, value in enumerate(chunk.outputs):
            values[value] = tensors[Ref(Kind.OUTPUT, i)]
        for i, name in enumerate(chunk.updates):
            self.buffers[name].copy_(tensors[Ref(Kind.UPDATE, i)])
        for value in self._last_use[chunk.index]:
            del values[value]
        return {ref: tensors[ref] for ref in self._held[chunk.index] if ref in tensors}

    def _back(
        self,
        chunk: Chunk,
        program: ChunkProgram,
        runners: Mapping[Pass, Runner],
        tensors: dict[Ref, Tensor],
        gradients: dict[int, Tensor],
        shared: dict[str, Tensor],
    ) -> None:
        """Run a chunk backward and add its gradients to ``gradients`` and ``shared``."""
        for i, value in enumerate(chunk.outputs):
            if value in gradients:
                tensors[Ref(Kind.OUTPUT_GRAD, i)] = gradients.pop(value)
        for which in self._backward:
            if which in program.functions:
                last = which is self._backward[-1]
                self._call(chunk, program.functions[which], runners[which], tensors, last)
        for ref, tensor in tensors.items():
            if ref.kind is Kind.INPUT_GRAD:
                value = chunk.inputs[ref.index]
                gradients[value] = gradients[value] + tensor if value in gradients else tensor
            elif ref.kind is Kind.PARAMETER_GRAD:
                name = chunk.parameters[ref.index]
                shared[name] = shared[name].add_(tensor) if name in shared else tensor

    def _call(
        self,
        chunk: Chunk,
        function: Function,
        run: Runner,
        tensors: dict[Ref, Tensor],
        last: bool = False,
    ) -> None:
        """Run one pass on ``tensors`` and state. With ``last``, free its inputs."""
        arguments: list[Tensor] = []
        for ref in function.arguments:
            if ref.kind is Kind.PARAMETER:
                arguments.append(self._weights[chunk.parameters[ref.index]])
            elif ref.kind is Kind.BUFFER:
                arguments.append(self.buffers[chunk.buffers[ref.index]])
            else:
                arguments.append(tensors.pop(ref) if last else tensors[ref])
        if last:
            for ref in [r for r in tensors if r.kind not in _GRADIENTS]:
                del tensors[ref]
        with torch.no_grad():
            tensors.update(zip(function.results, run(arguments), strict=True))

    def _microbatches(self, batch: Sequence[Any]) -> list[tuple[Tensor, ...]]:
        captured = self.captured
        given = captured.example.like(*batch)
        parts = given.slices(captured.microbatches)
        totals = () if captured.totals is None else captured.totals.of(given.tensors, given.size)
        strides = [value.spec.stride for value in captured.cut.values]
        return [
            tuple(
                strided_like(x, stride, captured.device)
                for x, stride in zip((*part, *totals), strides, strict=False)
            )
            for part in parts
        ]

    def _check_state(self) -> None:
        """Refuse a model other than the captured one."""
        for chunk, program in zip(self.captured.chunks, self.captured.programs, strict=True):
            wanted = [(Ref(Kind.PARAMETER, i), n) for i, n in enumerate(chunk.parameters)]
            wanted += [(Ref(Kind.BUFFER, i), n) for i, n in enumerate(chunk.buffers)]
            for ref, name in wanted:
                tensor = self.parameters.get(name, self.buffers.get(name))
                if tensor is None and name.startswith(LOSS_PREFIX):
                    raise PiperError(f"the loss has a parameter {name!r}: give the module, loss=")
                if tensor is None:
                    raise PiperError(f"the model has no {name}: it is not the one captured")
                spec = program.specs[ref]
                if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                    raise PiperError(
                        f"{name} is {TensorSpec.of(tensor)}, but {spec} in the model captured"
                    )

    def _take_state(self, module: nn.Module, prefix: str, init: Init | None) -> None:
        device = self.captured.device
        taken = {id(parameter) for parameter in self.parameters.values()}
        for name, parameter in module.named_parameters():
            if id(parameter) in taken:  # the loss uses a parameter of the model
                continue
            data = materialised(prefix + name, parameter.detach(), device, init, self.seed)
            if data is not parameter.detach() and data.data_ptr() != parameter.data_ptr():
                parameter = nn.Parameter(data, requires_grad=parameter.requires_grad)
            self.parameters[prefix + name] = parameter
        for name, buffer in module.named_buffers():
            self.buffers[prefix + name] = materialised(
                prefix + name, buffer, device, init, self.seed
            )


_GRADIENTS = (Kind.INPUT_GRAD, Kind.PARAMETER_GRAD)


def runners_of(captured: Captured) -> list[dict[Pass, Runner]]:
    """Callables for every chunk's passes; each distinct program is compiled once."""
    compiled, where = captured.compiler.compile, captured.device
    made = {
        program: {which: compiled(f, which, where) for which, f in program.functions.items()}
        for program in captured.unique_programs
    }
    return [made[program] for program in captured.programs]


def _held(program: ChunkProgram, backward: tuple[Pass, ...]) -> frozenset[Ref]:
    return frozenset(ref for which in backward for ref in program.held(which))


def _last_uses(captured: Captured) -> list[list[int]]:
    """For each chunk, the values that no later chunk and no result of the step needs."""
    pinned = {captured.cut.loss, captured.cut.count, *captured.cut.outputs}
    last: dict[int, int] = {}
    for chunk in captured.chunks:
        for value in (*chunk.inputs, *chunk.outputs):
            last[value] = chunk.index
    uses: list[list[int]] = [[] for _ in captured.chunks]
    for value, index in last.items():
        if value not in pinned:
            uses[index].append(value)
    return uses
