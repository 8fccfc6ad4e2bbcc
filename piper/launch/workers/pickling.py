"""Callables of the user's by value, to be called in other processes."""

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
    """Cloudpickle copies the attributes of a class that is not where it says it is, which makes
    nothing of a compiled one. Such classes (``safetensors.safe_open`` is one) say that they are
    built into Python: they are imported from where the script has them from."""

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, type) and item.__module__ == "builtins":
            name = item.__name__
            if getattr(builtins, name, None) is not item and item not in _NAMELESS:
                return _found, (_home(item, name), name)
        return super().reducer_override(item)


_NAMELESS = (type(None), type(NotImplemented), type(...), *vars(types).values())
"""Types of Python's own that cloudpickle knows."""


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
