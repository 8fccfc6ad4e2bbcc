"""The private interfaces of torch that Piper uses, last seen in torch 2.15. A new version may
change any: then this test names it. Whoever needs another one looks for a public one first."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "piper"

KNOWN = frozenset(
    (
        "torch._C.DisableTorchFunction",
        "torch._C._check_schema_allow_fake_script_object",
        "torch._C._dispatch_dump",
        "torch._C._dispatch_has_kernel",
        "torch._C._distributed_c10d",
        "torch._C._get_mkldnn_enabled",
        "torch._C._nn",
        "torch._C._set_grad_enabled",
        "torch._C._set_mkldnn_enabled",
        "torch._disable_dynamo",
        "torch._dynamo.exc.TorchDynamoException",
        "torch._dynamo.exc.UserError",
        "torch._foreach_add_",
        "torch._foreach_copy_",
        "torch._foreach_norm",
        "torch._functorch.config",
        "torch._functorch.partitioners.min_cut_rematerialization_partition",
        "torch._fused_dropout",
        "torch._grouped_mm",
        "torch._guards.TracingContext",
        "torch._guards.tracing",
        "torch._higher_order_ops.wrap.wrap_with_autocast",
        "torch._higher_order_ops.wrap.wrap_with_set_grad_enabled",
        "torch._inductor.compile_fx.compile_fx_inner",
        "torch._inductor.config",
        "torch._inductor.decomposition.select_decomp_table",
        "torch._inductor.fx_passes.joint_graph.joint_graph_passes",
        "torch._inductor.virtualized.V",
        "torch._library.custom_ops",
        "torch._ops.HigherOrderOperator",
        "torch._ops.OpOverload",
        "torch._ops.OpOverloadPacket",
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch._subclasses.fake_tensor.unset_fake_temporarily",
        "torch.amp.autocast_mode._enter_autocast",
        "torch.cuda._sleep",
        "torch.distributed.tensor._dtensor_spec.DTensorSpec",
        "torch.distributed.tensor._dtensor_spec.TensorMeta",
        "torch.distributed.tensor._op_schema.OpSchema",
        "torch.distributed.tensor._op_schema.RuntimeSchemaInfo",
        "torch.distributed.tensor.placement_types._StridedShard",
        "torch.export._trace",
        "torch.fx._lazy_graph_module._LazyGraphModule",
        "torch.fx._lazy_graph_module._use_lazy_graph_module",
        "torch.fx.experimental.proxy_tensor.make_fx",
        "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv",
        "torch.library._scoped_library",
        "torch.nn.modules.batchnorm._NormBase",
        "torch.ops.aten._assert_tensor_metadata.default",
        "torch.ops.aten._unsafe_view.default",
        "torch.optim.optimizer._global_optimizer_post_hooks",
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        "torch.optim.optimizer._use_grad_for_differentiable",
        "torch.overrides._get_current_function_mode_stack",
        "torch.utils._config_module.ConfigModule",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._python_dispatch._disable_current_modes",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "torch.utils._pytree",
        "torch.utils._pytree.tree_leaves",
    )
)


def test_private_interfaces_of_torch_are_listed() -> None:
    users: defaultdict[str, set[str]] = defaultdict(set)
    for file in ROOT.rglob("*.py"):
        for name in _private(ast.parse(file.read_text())):
            users[name].add(str(file.relative_to(ROOT)))
    assert {name: users[name] for name in users.keys() - KNOWN} == {}


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_private_interfaces_are_there(name: str) -> None:
    pkgutil.resolve_name(name)


def _private(tree: ast.Module) -> Iterator[str]:
    """The private modules and names of torch that a file imports or reads from ``torch``."""
    inner = {id(x.value) for x in ast.walk(tree) if isinstance(x, ast.Attribute)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            names = [ast.unparse(node)]
        for name in names:
            parts = name.split(".")
            private = any(part.startswith("_") and not part.startswith("__") for part in parts)
            if parts[0] == "torch" and (private or parts[:3] == ["torch", "fx", "experimental"]):
                yield name


@pytest.mark.parametrize(
    ("version", "warns"),
    [pytest.param("2.15.3", False, marks=pytest.mark.slow), ("2.16.0", True)],
)
def test_an_unseen_torch_is_warned_of(version: str, warns: bool) -> None:
    code = (
        "import torch, warnings; "
        f"torch.__version__ = torch.torch_version.TorchVersion({version!r}); "
        "warnings.simplefilter('always'); import piper; piper.Strategy"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (f"torch {version} is newer than" in run.stderr) == warns
