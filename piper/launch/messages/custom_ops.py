"""Finds where the user's custom operations are defined, and defines them in worker processes."""

from __future__ import annotations

import importlib
import runpy
import sys
from typing import Any

import torch
from torch._ops import OpOverload

from piper.base.errors import PiperError
from piper.capture.code.executables import Executables

_WORKER = "piper.launch.workers.fork_server"


def defining_modules(*codes: Executables) -> tuple[tuple[str, ...], str | None]:
    """The modules that define the custom operations of ``codes``, and the user's script, if it
    defines some."""
    made: Any = getattr(torch._library.custom_ops, "OPDEFS", {})
    called = {
        node.target._schema.name
        for code in codes
        for row in code.programs.values()
        for chunk in row
        for function in chunk.functions.values()
        for node in function.module.graph.nodes
        if isinstance(node.target, OpOverload)
    }
    homes = {name: made[name]._init_fn.__module__ for name in sorted(called) if name in made}
    modules = sorted({home for home in homes.values() if home != "__main__"})
    own = [name for name, home in homes.items() if home == "__main__"]
    if not own:
        return tuple(modules), None
    main = sys.modules["__main__"]
    if main.__spec__ is not None:  # python -m
        return (*modules, main.__spec__.name), None
    script = getattr(main, "__file__", None)
    if script is None:
        raise PiperError(
            f"the operation {own[0]} is defined in an interactive session, where other processes "
            "cannot find it: define it in a module, and import that"
        )
    return tuple(modules), str(script)


def define(modules: tuple[str, ...], script: str | None) -> None:
    """Import ``modules``, and run ``script`` without its ``if __name__ == "__main__":`` part."""
    for module in modules:
        importlib.import_module(module)
    if script is not None:
        runpy.run_path(script, run_name="__piper_worker__")
    made: Any = getattr(torch._library.custom_ops, "OPDEFS", {})
    for operation in made.values():
        for kernel in getattr(operation, "_backend_fns", {}).values():
            if function := getattr(kernel, "__wrapped__", None):
                function.__dynamo_disable = function  # otherwise its first call imports the tracer


def refuse_in_worker() -> None:
    """Refuse to launch in a worker that runs the user's script to define its operations."""
    spec = sys.modules["__main__"].__spec__
    if spec is not None and spec.name == _WORKER:
        raise PiperError(
            "a worker process runs this script too, because it defines operations of the model: "
            'put what trains under if __name__ == "__main__":'
        )
