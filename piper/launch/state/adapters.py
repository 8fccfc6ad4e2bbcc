"""Exports models with adapters of the peft library: peft itself writes the active adapter, under
the names that it reads.

Devices send the tensors of the adapter, which are small; the base weights are not written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from piper.base.atomic import FileKind
from piper.base.errors import PiperError
from piper.base.units import class_text
from piper.program.program import Program

ADAPTER = FileKind(
    "adapter",
    re.compile("(?P<stem>(?!))(?P<number>)"),  # matches no file: an adapter has no parts
    ("adapter_model.safetensors", "adapter_config.json"),
)
_CARD = "README.md"


def adapted_part(model: nn.Module) -> tuple[str, Any] | None:
    """The prefix of its names and the part of a model that has peft adapters; None without
    adapters."""
    for name, module in model.named_modules():
        if not type(module).__module__.startswith("peft.") and not _injected(module):
            continue
        if _injected(module) or hasattr(module, "create_or_update_model_card"):
            return f"{name}." if name else "", module
        raise PiperError(
            f"{name or type(model).__name__} is {class_text(module)} of peft in a model that "
            "cannot write its adapter: compile what peft.get_peft_model returned, or a module "
            "that has it as a submodule, or take the values from trainer.state_dict()"
        )
    return None


def _injected(module: Any) -> bool:
    """Whether a transformers model has adapters from its ``add_adapter``."""
    return getattr(module, "_hf_peft_config_loaded", False) is True


class Adapter:
    """The active adapter of a program's model."""

    def __init__(self, program: Program, prefix: str, model: Any) -> None:
        self._model = model
        shapes = program.names.shapes
        self._keys = {
            key.removeprefix(prefix): name
            for key, name in program.names.keys.items()
            if key.startswith(prefix)
        }
        given = {
            key: torch.empty(shapes[prefix + key], device="meta", requires_grad=False)
            for key in self._keys
        }
        self._name = _active(model)
        self._written = _written(model, self._name, given)
        kept = {self._keys[key] for key in self._written}
        if lost := [name for name in program.trained if name not in kept]:
            raise PiperError(
                f"{lost[0]} is trained, and the files of peft's adapter do not hold it"
                + (f", nor {len(lost) - 1} more" if len(lost) > 1 else "")
                + ": name its module in modules_to_save of the adapter's configuration, freeze it "
                "before compiling, or take the values from trainer.state_dict()"
            )

    @property
    def names(self) -> frozenset[str]:
        """The tensors that are written."""
        return frozenset(self._keys[key] for key in self._written)

    def write(self, folder: Path, find: Callable[[str], Tensor], dtype: torch.dtype | None) -> None:
        """Write configuration and weights into ``folder``; ``find`` returns a tensor by its
        name."""
        state = {}
        for key in self._written:
            tensor = find(self._keys[key])
            convert = dtype is not None and tensor.is_floating_point()
            state[key] = tensor.to(dtype) if convert else tensor
        only = {} if _injected(self._model) else {"selected_adapters": [self._name]}
        self._model.save_pretrained(folder, state_dict=state, **only)
        (folder / _CARD).unlink(missing_ok=True)  # the target may have the user's own
        if (inner := folder / self._name).is_dir():  # for an adapter not called "default"
            for path in inner.iterdir():
                path.rename(folder / path.name)
            inner.rmdir()


def _active(model: Any) -> str:
    names = model.active_adapters() if _injected(model) else model.active_adapters
    if len(names) != 1:
        raise PiperError(
            f"{len(names)} adapters of peft are active ({', '.join(names)}), and a folder holds "
            "one: call set_adapter of the model for each, and export it to a folder of its own"
        )
    return str(names[0])


def _written(model: Any, adapter: str, given: Mapping[str, Tensor]) -> list[str]:
    """The keys of the tensors that peft writes. It selects and renames them, so ask it."""
    from peft import get_peft_model_state_dict

    keys = {id(tensor): key for key, tensor in given.items()}
    chosen = get_peft_model_state_dict(model, state_dict=dict(given), adapter_name=adapter)
    for key, tensor in chosen.items():
        if id(tensor) not in keys:
            raise PiperError(
                f"peft computes {key} of the adapter {adapter!r} when it is saved, which cannot be "
                "done with tensors on several devices: take trainer.state_dict(), load it into the "
                "model, and call its save_pretrained"
            )
    return list(dict.fromkeys(keys[id(tensor)] for tensor in chosen.values()))
