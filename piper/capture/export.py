"""Model, loss and one example microbatch go in; one flat functional graph of ATen ops comes out.

The model is never run on data and never touched: a copy whose tensors are fake is exported with
its loss. What leaves has no mutation, no module and no control flow; each op carries the regions
it was traced in; what training must not differentiate is behind an explicit ``detach``.
"""

from __future__ import annotations

import copy
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import traceback
from torch.utils import _pytree as pytree

from piper.capture import opaque
from piper.capture.attention import restore_eager_attention
from piper.capture.blame import explain, is_data_dependent
from piper.capture.regions import (
    LOSS,
    Region,
    annotate,
    check_tags_entered,
    recording,
    tag_modules,
)
from piper.errors import CaptureError, PiperError

Loss = Callable[..., Tensor | tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of ``inputs`` and ``targets`` in order, and how to put them back in place."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    @staticmethod
    def of(inputs: Sequence[Any] | Mapping[str, Any], targets: Sequence[Any]) -> Batch:
        args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
        leaves, spec = pytree.tree_flatten((args, kwargs, tuple(targets)))
        return Batch(tuple(leaves), spec)

    def like(self, *batch: Any) -> Batch:
        """Another batch of this structure, given as the inputs followed by the targets."""
        args, kwargs, targets = self.spec.unflatten(list(self.leaves))
        n = 1 if kwargs else len(args)
        if len(batch) != n + len(targets):
            raise PiperError(
                f"a batch here is {n} input(s) and {len(targets)} target(s), as in the example "
                f"that was captured; {len(batch)} were given"
            )
        found = Batch.of(batch[0] if kwargs else batch[:n], batch[n:])
        expected = [(tuple(x.shape), x.dtype) for x in self.tensors]
        given = [(tuple(x.shape), x.dtype) for x in found.tensors]
        if given != expected or found.spec != self.spec:
            raise PiperError(
                f"the batch is not like the example that was captured: it has {_shapes(given)}, "
                f"the example {_shapes(expected)}"
            )
        return found

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Tensor))

    @property
    def size(self) -> int:
        """The batch size: dimension 0 of every tensor that has dimensions."""
        sizes = {leaf.shape[0] for leaf in self.tensors if leaf.dim()}
        if len(sizes) > 1:
            found = ", ".join(f"{self.path(i)} has {n}" for i, n in enumerate(self._sizes()))
            raise CaptureError(
                f"inputs and targets disagree on the batch size (dimension 0): {found}; "
                "give every tensor the same first dimension"
            )
        if not sizes:
            raise CaptureError("inputs and targets hold no tensor with a batch dimension")
        return sizes.pop()

    def _sizes(self) -> list[int | str]:
        return [x.shape[0] if x.dim() else "none" for x in self.tensors]

    def path(self, index: int) -> str:
        """How the caller wrote the ``index``-th tensor: ``inputs[0]``, ``targets[1]``, ..."""
        paths, _ = pytree.tree_flatten_with_path(self.spec.unflatten(list(self.leaves)))
        keys = [key for key, leaf in paths if isinstance(leaf, Tensor)][index]
        root = "targets" if str(keys[0]) == "[2]" else "inputs"
        return root + "".join(str(key) for key in keys[1:])

    def slices(self, parts: int) -> list[tuple[Tensor, ...]]:
        """The tensors cut along dimension 0 into ``parts`` equal microbatches."""
        size = self.size
        if size % parts:
            options = [n for n in range(1, size + 1) if size % n == 0]
            raise CaptureError(
                f"a batch of {size} does not divide into {parts} microbatches; "
                f"counts that work: {', '.join(map(str, options))}"
            )
        n = size // parts
        return [
            tuple(x[i * n : (i + 1) * n] if x.dim() else x for x in self.tensors)
            for i in range(parts)
        ]


def _shapes(tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(s)}" for s, dtype in tensors)


@dataclass(frozen=True, slots=True)
class Exported:
    """One microbatch's step, forward only, as a functional graph and the roles of its ends."""

    graph: fx.Graph
    parameters: dict[fx.Node, str]
    buffers: dict[fx.Node, str]
    inputs: dict[fx.Node, int]
    loss: fx.Node
    count: fx.Node | None
    outputs: tuple[fx.Node, ...]
    updates: dict[str, fx.Node]
    constants: dict[str, Tensor]
    regions: dict[Region, str]
    output_tree: OutputTree


@dataclass(slots=True)
class OutputTree:
    """The shape of what the model returned: tensors by number, everything else as it was."""

    spec: pytree.TreeSpec | None = None
    fixed: list[Any] = field(default_factory=list)

    def take(self, output: Any) -> list[Tensor]:
        """Remember the structure of ``output`` and return its tensors."""
        leaves, self.spec = pytree.tree_flatten(output)
        self.fixed = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def put(self, tensors: Sequence[Tensor]) -> Any:
        """The model's output again, from its tensors."""
        assert self.spec is not None
        source = iter(tensors)
        leaves = [next(source) if leaf is _TENSOR else leaf for leaf in self.fixed]
        return pytree.tree_unflatten(leaves, self.spec)

    @property
    def tensors(self) -> int:
        return sum(leaf is _TENSOR for leaf in self.fixed)


_TENSOR = object()


class _Step(nn.Module):
    """What is exported: the model, then the loss as a region of its own."""

    def __init__(self, model: nn.Module, loss: Loss, batch: Batch, keep_outputs: bool) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss
        self.tree = OutputTree()
        self._batch = batch
        self._keep = keep_outputs

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        source = iter(tensors)
        leaves = [next(source) if isinstance(x, Tensor) else x for x in self._batch.leaves]
        args, kwargs, targets = self._batch.spec.unflatten(leaves)
        output = self.model(*args, **kwargs)
        kept = self.tree.take(output) if self._keep else []
        with annotate(LOSS):
            loss = _check_loss(self.loss_fn(output, *targets))
        return (*loss, *kept)


def export(
    model: nn.Module,
    batch: Batch,
    loss: Loss,
    tags: Mapping[str, str],
    *,
    parts: int,
    device: torch.device,
    keep_outputs: bool,
) -> Exported:
    """Export ``model`` and ``loss`` at the shapes of one of ``parts`` microbatches."""
    fake = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
    example = [_fake(x, fake, device) for x in batch.slices(parts)[0]]
    skeleton, names = _skeleton(model, fake, device)
    tag_modules(skeleton, tags)
    step = _Step(skeleton, loss, batch, keep_outputs)
    with _quiet(), recording() as recorder:
        try:
            program = torch.export.export(step, tuple(example), strict=False)
        except CaptureError:
            raise
        except Exception as error:
            raise explain(error, type(model).__name__) from error
    check_tags_entered(tags, recorder.entered.values())
    opaque.hide(program.graph_module)
    with _quiet():
        program = program.run_decompositions({})
    opaque.restore(program.graph)
    restore_eager_attention(program.graph)
    return _roles(program, step, names, recorder.entered)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep each op's metadata while tracing. torch's deprecation notes, and the graph that it
    dumps when control flow depends on data, are not meant for the user."""
    said = io.StringIO()
    try:
        with traceback.preserve_node_meta(), warnings.catch_warnings(), redirect_stderr(said):
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        if is_data_dependent(error):
            said.truncate(0)
        raise
    finally:
        sys.stderr.write(said.getvalue())


def _roles(
    program: ExportedProgram, step: _Step, names: dict[str, str], regions: dict[Region, str]
) -> Exported:
    """Read off which end of the graph is which, in the user's names."""
    graph = program.graph
    _drop_asserts(graph)
    _refuse_dynamic(graph)
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    parameters: dict[fx.Node, str] = {}
    buffers: dict[fx.Node, str] = {}
    inputs: dict[fx.Node, int] = {}
    constants: dict[str, Tensor] = {}
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind is InputKind.PARAMETER:
            parameters[node] = _user_name(str(spec.target), names)
        elif spec.kind is InputKind.BUFFER:
            buffers[node] = _user_name(str(spec.target), names)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            buffers[node] = str(spec.target)
            constants[str(spec.target)] = program.constants[str(spec.target)]
        elif spec.kind is InputKind.USER_INPUT and not isinstance(spec.arg, ConstantArgument):
            inputs[node] = len(inputs)
    results = _computed_results(graph)
    returned: list[fx.Node] = []
    updates: dict[str, fx.Node] = {}
    for spec, node in zip(program.graph_signature.output_specs, results, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            returned.append(node)
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            updates[_user_name(str(spec.target), names)] = node
        else:
            what = spec.kind.name.lower().replace("_", " ")
            raise CaptureError(
                f"unsupported mutation ({what}): the model writes in place to "
                f"{_user_name(str(spec.target), names)!r}; only buffers may be mutated: write to "
                "a copy, or register it with register_buffer"
            )
    n_loss = len(returned) - step.tree.tensors
    return Exported(
        graph=graph,
        parameters=parameters,
        buffers=buffers,
        inputs=inputs,
        loss=returned[0],
        count=returned[1] if n_loss == 2 else None,
        outputs=tuple(returned[n_loss:]),
        updates=updates,
        constants=constants,
        regions=regions,
        output_tree=step.tree,
    )


def _computed_results(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The graph's results; one that is a parameter, buffer or input itself becomes a copy."""
    output = graph.output_node()
    for node in graph.find_nodes(op="placeholder"):
        if output in node.users:
            with graph.inserting_before(output):
                copied = graph.call_function(torch.ops.aten.clone.default, (node,))
            copied.meta["val"] = node.meta["val"]
            output.replace_input_with(node, copied)
    results = output.args[0]
    assert isinstance(results, tuple)
    return results  # type: ignore[return-value]


def _user_name(target: str, names: dict[str, str]) -> str:
    """The path in the user's model (its first path, for a tied tensor) of an exported tensor."""
    path = target.removeprefix("model.")
    return names.get(path, path)


def _drop_asserts(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)


def _refuse_dynamic(graph: fx.Graph) -> None:
    """A shape that depends on data cannot be planned for."""
    for node in graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            dynamic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) or (
                isinstance(value, Tensor)
                and any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))
            )
            if dynamic:
                where = (node.meta.get("stack_trace") or "").strip()
                raise CaptureError(
                    f"the op {node.target} yields a shape or number known only at run time:\n"
                    f"{where}\nuse an op of fixed shape (a mask, a capacity, torch.where)"
                )


def _fake(x: Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    with mode:
        fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    assert isinstance(fake, FakeTensor)
    return fake


def _skeleton(
    model: nn.Module, mode: FakeTensorMode, device: torch.device
) -> tuple[nn.Module, dict[str, str]]:
    """A copy of ``model`` with fake tensors, and each tensor's path to its first path (ties)."""
    memo: dict[int, Any] = {}
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        names[path] = first.setdefault(id(parameter), path)
        fake = nn.Parameter(_fake(parameter, mode, device), requires_grad=parameter.requires_grad)
        memo.setdefault(id(parameter), fake)
    for path, buffer in model.named_buffers(remove_duplicate=False):
        names[path] = first.setdefault(id(buffer), path)
        memo.setdefault(id(buffer), _fake(buffer, mode, device))
    return copy.deepcopy(model, memo), names


def _check_loss(loss: Any) -> tuple[Tensor, ...]:
    parts = loss if isinstance(loss, tuple) else (loss,)
    good = len(parts) in (1, 2) and all(isinstance(x, Tensor) and x.numel() == 1 for x in parts)
    if not good:
        shape = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in parts]
        raise CaptureError(
            "the loss must return one scalar (a mean over the microbatch) or a pair of scalars "
            f"(sum, count); it returned {shape}"
        )
    return parts
