"""Torch runs on one thread in every test process: several processes share the cores, and some CPU
kernels (``index_put`` with ``accumulate``) are deterministic only on one thread. The cache of
compiled programs is off, also in processes that tests start. A compilation that takes long on a
busy machine says nothing. What the first import brings is left
out of garbage collections, and these are rare: they took a sixth of the time.

``pytest tests/strategies/test_properties.py --examples 10000 -s`` tries more random strategies.
"""

from __future__ import annotations

import gc
import os

import pytest
import torch
import torch._inductor.compile_fx

import piper.api  # noqa: F401  so that it is part of what is frozen
from piper.program.compile import stages

os.environ["PIPER_CACHE"] = "off"
torch.set_num_threads(1)
stages.LONG_SECONDS = 1e6
gc.freeze()
gc.set_threshold(20_000, 50, 100)

SLOW = 1
"""At most so many cases of a test marked ``cases`` are slow; the rest are thorough."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--examples",
        type=int,
        default=200,
        help="random strategies, and tenths of mutations of files, to try",
    )
    parser.addoption(
        "--first", type=int, default=0, help="the seed of the strategies that are trained"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For a test marked ``cases(fast=n, slow=m)``: its first n cases not marked slow always run, m
    others become slow, and the rest thorough."""
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("cases") is not None:
            families.setdefault(item.nodeid.split("[")[0], []).append(item)
    for family in families.values():
        mark = family[0].get_closest_marker("cases")
        assert mark is not None
        quick = [item for item in family if item.get_closest_marker("slow") is None]
        kept = quick[: mark.kwargs.get("fast", 0)]
        others = [item for item in family if item not in kept]
        count = min(mark.kwargs.get("slow", len(others)), SLOW)
        chosen = {i * len(others) // count for i in range(count)} if count else set()
        for i, item in enumerate(others):
            item.own_markers = [m for m in item.own_markers if m.name != "slow"]
            item.add_marker(pytest.mark.slow if i in chosen else pytest.mark.thorough)
