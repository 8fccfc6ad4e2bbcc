"""The key of a compiled program: a digest of everything that compiling it may read.

Besides the arguments of ``compile`` these are the versions of Python, of Piper and of all installed
packages, the user's modules, functions that replace those of packages, values of the packages that
the model is made of, environment variables that are named in the user's code, and torch's settings.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.backends import mha, opt_einsum
from torch.nn.modules import module as global_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._config_module import ConfigModule
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from piper.base.modes import autocast_kinds
from piper.program.cache.installed import (
    PIPER,
    distributions,
    file_of,
    files_in,
    is_installed,
    is_users,
    loaded_modules,
)
from piper.program.compile.digest import Digest, digest_of
from piper.runtime.torch_flags import Flags

_LIBRARIES = re.compile(r"(TORCH(?!ELASTIC)|PYTORCH|HF_|TRANSFORMERS_|CUDA|CUBLAS|NVIDIA_)")
"""Environment variables that libraries read."""
_ANY_NAME = re.compile(rb"\benviron\b|\bgetenv\b")
_ONE_NAME = re.compile(rb"""\benviron(\.get\(|\.setdefault\(|\[)\s*["']|\bgetenv\(\s*["']""")
_HOOKS = re.compile("_global_.*hooks")

_RANDOM = re.compile("[0-9a-f-]{32,}")
"""The name that a library gives to this process."""
_KNOWN = sys.stdlib_module_names | {"torch", "piper"}
"""Packages whose files do not count: the first two have versions."""


@dataclass(frozen=True, slots=True)
class Key:
    """What a program is found by."""

    own: str
    """A digest of the arguments and the user's modules. If it changes while a program is compiled,
    the program is not of this key."""
    text: str
    unseen: str | None
    """Why there is no key."""


def key_of(*given: object) -> Key:
    """The key of what is compiled from ``given`` in this process, as it is now."""
    own = own_digest(*given)
    values = digest_of(shallow=_values(own.modules))
    others = digest_of(shallow=_values(values.modules - own.modules))
    functions = digest_of(shallow=_functions_of_torch())
    packages = {name.partition(".")[0] for name in own.modules | values.modules}
    digest = digest_of(
        (own.text, values.text, others.text, functions.text),
        (sys.version, platform.machine(), torch.__version__, torch.version.git_version),
        list(_sources_of_piper()),
        distributions(),
        [list(files_in(package)) for package in sorted(packages - _KNOWN)],
        _environment([text for _, text in _sources()]),
        Flags.here().values,
        (mha.get_fastpath_enabled(), opt_einsum.enabled, opt_einsum.strategy),
        list(_settings()),
        {k: v for k, v in vars(global_hooks).items() if _HOOKS.match(k)},
        list(_replaced()),
    )
    return Key(own.text, digest.text, own.unseen or _mode() or digest.unseen)


def own_digest(*given: object) -> Digest:
    """A digest of ``given`` and of the user's modules."""
    return digest_of(*given, list(_sources()))


def _sources() -> Iterator[tuple[str, bytes]]:
    """The files of all modules that are not installed. One that cannot be read counts as its name:
    ``digest_of`` looks at the functions of modules without files."""
    for name, module in loaded_modules():
        file = file_of(module)
        if file is not None and not is_installed(file):
            try:
                with open(file, "rb") as content:
                    yield name, content.read()
            except OSError:
                yield name, file.encode()


def _sources_of_piper() -> Iterator[tuple[str, bytes]]:
    for path in sorted(PIPER.rglob("*.py")):
        yield str(path.relative_to(PIPER)), hashlib.sha256(path.read_bytes()).digest()


def _environment(texts: Sequence[bytes]) -> list[tuple[str, str]]:
    """The variables that libraries read, and those that the user's code names. If it reads others,
    or cannot be read, all. A shell sets ``_`` to the command as it was written."""
    main = sys.modules["__main__"]
    every = file_of(main) is None and "os" in vars(main)
    every = every or any(len(_ANY_NAME.findall(x)) > len(_ONE_NAME.findall(x)) for x in texts)
    return [
        (name, value)
        for name, value in sorted(os.environ.items())
        if name != "_"
        and (every or _LIBRARIES.match(name) or any(name.encode() in text for text in texts))
    ]


def _settings() -> Iterator[tuple[str, str, object]]:
    """Torch's settings that are not the default ones."""
    for name, module in loaded_modules():
        for key in module._config if isinstance(module, ConfigModule) else ():
            value = None if module._is_default(key) else getattr(module, key)
            if value is not None and value != module._config[key].default:
                yield name, key, value


def _mode() -> str | None:
    """A mode of torch that is on, and that may change what is traced."""
    if kinds := autocast_kinds():
        return f"torch.autocast is on for {kinds[0]}"
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return "gradients are off"
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return f"the mode {type(modes[0]).__name__} of torch is on" if modes else None


def _replaced() -> Iterator[tuple[str, FunctionType]]:
    """The user's functions that stand in installed modules and their classes."""
    for name, module in loaded_modules():
        file = file_of(module)
        if file is None or not is_installed(file):
            continue
        for place, value in list(vars(module).items()):
            if type(value) is FunctionType:
                parts: Iterable[tuple[str, Any]] = ((place, value),)
            elif issubclass(type(value), type) and value.__module__ == name:
                parts = vars(value).items()
            else:
                continue
            for part, function in parts:
                kind = type(function)
                if kind is staticmethod or kind is classmethod:
                    function = function.__func__
                    kind = type(function)
                if kind is FunctionType and is_users(function):
                    yield f"{name}.{place}.{part}", function


def _functions_of_torch() -> Iterator[object]:
    """The functions that torch's modules call, and the methods of tensors: others may replace
    them."""
    yield from vars(Tensor).items()
    for module in (torch, torch.nn.functional, torch._C._nn):
        for place, value in list(vars(module).items()):
            if callable(value) and not issubclass(type(value), type | ModuleType):
                yield place
                yield value


def _values(modules: Iterable[str]) -> Iterator[object]:
    """The values in installed modules: functions may be replaced, registries extended."""
    for name in sorted(modules):
        if name.partition(".")[0] not in _KNOWN and name in sys.modules:
            for place, value in list(vars(sys.modules[name]).items()):
                random = type(value) is str and _RANDOM.fullmatch(value)
                if not (place.startswith("__") or random or issubclass(type(value), ModuleType)):
                    yield place
                    yield value
