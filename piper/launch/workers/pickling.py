"""Pickles the user's callables by value, to be called in other processes."""

from __future__ import annotations

import builtins
import importlib
import io
import pickle
import sys
import types
from typing import Any

import cloudpickle


def by_value(item: Any) -> bytes:
    """``item`` for ``cloudpickle.loads`` in another process."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(item)
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle copies the attributes of a class that is not in the module it names; for a
    compiled class the copy is useless. Such classes (``safetensors.safe_open`` is one) name the
    module ``builtins``. They are imported by name from a module that has them."""

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, type) and item.__module__ == "builtins":
            name = item.__name__
            if getattr(builtins, name, None) is not item and item not in _NAMELESS:
                return _found, (_home(item, name), name)
        return super().reducer_override(item)


_NAMELESS = (type(None), type(NotImplemented), type(...), *vars(types).values())
"""Python's own types that cloudpickle handles."""


def _home(item: type, name: str) -> str:
    homes = [
        module
        for module, content in list(sys.modules.items())
        if module != "__main__" and getattr(content, "__dict__", {}).get(name) is item
    ]
    if not homes:
        raise pickle.PicklingError(
            f"{name} is a compiled class that no imported module has under this name; import it "
            "inside the function that uses it"
        )
    return min(homes, key=lambda module: (module.count("."), module.startswith("_"), module))


def _found(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
