"""Pickles what a call sends to another process: the user's callables by value, the programs of
chunks as plain data, with the modules that define their operations."""

from __future__ import annotations

import builtins
import inspect
import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle

from piper.base.errors import PiperError
from piper.base.units import class_text
from piper.capture.code.chunk_program import ChunkProgram
from piper.capture.code.serialize import program_to_json
from piper.ir.plan.plan import Plan
from piper.launch.device.weight_readers import FirstWeights
from piper.launch.device.worker_group import BatchRows, Each
from piper.launch.messages.calls import attribute_of, program, unpacked
from piper.launch.messages.custom_ops import defining_modules
from piper.state.device_program import DeviceProgram


class Pickled:
    """Plans and programs of chunks as bytes, made once for all devices that get them."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[object, bytes]] = {}

    def of(self, item: object, data: Callable[[], Any]) -> bytes:
        """The bytes of ``data()``, which stands for ``item``."""
        if id(item) not in self._made:  # the table holds the item, so the id stays its own
            self._made[id(item)] = item, pickle.dumps(data(), pickle.HIGHEST_PROTOCOL)
        return self._made[id(item)][1]


def sendable(given: Any, device: int, pickled: Pickled) -> Any:
    """One device's argument of a call in a form that ``pickle`` sends to its process."""
    item = given.of(device) if isinstance(given, Each | BatchRows) else given
    if isinstance(given, BatchRows):
        return [x.cpu().clone() for x in item]
    if isinstance(item, FirstWeights):
        return _Packed(item, (), None, pickled)
    if isinstance(item, DeviceProgram):
        return _Packed(item, *defining_modules(*(code for _, code in item.steps)), pickled)
    return item


class _Packed:
    """``item`` by value. The receiver first defines the operations that it uses."""

    def __init__(
        self, item: Any, modules: tuple[str, ...], script: str | None, pickled: Pickled
    ) -> None:
        self._parts = item, modules, script, pickled

    def __reduce__(self) -> Any:
        item, modules, script, pickled = self._parts
        try:
            content = by_value(item, pickled)
        except PiperError:
            raise
        except Exception as error:
            raise PiperError(
                f"{_unsendable(item)} cannot be sent to other processes: {error}. Create what it "
                "refers to inside the function, or at the top of a module that workers import"
            ) from error
        return unpacked, (modules, script, content)


def _unsendable(item: FirstWeights | DeviceProgram) -> str:
    """Which of the user's functions in ``item`` cannot be pickled, and what it refers to."""
    if isinstance(item, FirstWeights):
        functions: dict[str, Any] = {"init=": item.init}
    else:
        functions = {"optimizer=": item.training.optimizer, "scheduler=": item.training.scheduler}
    for name, function in functions.items():
        if _fails(function):
            inside = inspect.unwrap(function)
            values = inspect.getclosurevars(inside) if inspect.isfunction(inside) else None
            known = {} if values is None else {**values.globals, **values.nonlocals}
            bad = [f"{key!r} ({class_text(x)})" for key, x in known.items() if _fails(x)]
            return f"{name} refers to {bad[0]} and" if bad else name
    return ", ".join(functions)


def _fails(item: Any) -> bool:
    try:
        cloudpickle.dumps(item)
    except Exception:  # noqa: BLE001 - pickle runs code of the user's classes
        return True
    return False


def by_value(item: Any, pickled: Pickled | None = None, own: Any = None) -> bytes:
    """``item`` for ``cloudpickle.loads`` in another process; with ``own``, a part of it that every
    process has itself, for ``received``."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.pickled, pickler.own = pickled or Pickled(), own
    pickler.dump(item)
    return buffer.getvalue()


def received(content: bytes, own: Any = None) -> Any:
    """The item of ``by_value``, with this process's ``own`` part."""
    unpickler = _Unpickler(io.BytesIO(content))
    unpickler.own = own
    return unpickler.load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle copies the attributes of a class that is not in the module it names; for a
    compiled class the copy is useless. Such classes (``safetensors.safe_open`` is one) name the
    module ``builtins``. They are imported by name from a module that has them."""

    pickled: Pickled
    own: Any

    def persistent_id(self, item: Any) -> Any:
        return "own" if self.own is not None and item is self.own else None

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, ChunkProgram) and item.functions:
            content = self.pickled.of(item, lambda: program_to_json(item))
            return program, (content,)
        if isinstance(item, Plan):
            return pickle.loads, (self.pickled.of(item, lambda: item),)
        if isinstance(item, type) and item.__module__ == "builtins":
            name = item.__name__
            if getattr(builtins, name, None) is not item and item not in _NAMELESS:
                return attribute_of, (_home(item, name), name)
        return super().reducer_override(item)


class _Unpickler(pickle.Unpickler):
    own: Any

    def persistent_load(self, _: Any) -> Any:
        return self.own


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
