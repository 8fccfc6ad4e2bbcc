"""Piper: distributed training of PyTorch models from named regions and a few directives.

The names of ``piper.api`` are imported when the first one is used: the command line prints its help
without torch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from piper.api import *  # noqa: F403


class _Piper(ModuleType):
    def __getattr__(self, name: str) -> object:
        if not name.startswith("__") or name == "__all__":
            api = importlib.import_module("piper.api")
            for public in ("__all__", *api.__all__):
                super().__setattr__(public, getattr(api, public))
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: object) -> None:
        """Python binds every imported subpackage. ``capture`` and ``launch`` are functions."""
        if not (name in ("capture", "launch") and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *importlib.import_module("piper.api").__all__})


sys.modules[__name__].__class__ = _Piper
