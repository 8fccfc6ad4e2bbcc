"""One thread for torch in every test process: several processes share the cores, and some CPU
kernels (``index_put`` with ``accumulate``) give the same bits only on one thread.

``pytest tests/test_properties.py --examples 10000 -s`` tries more random strategies.
"""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--examples",
        type=int,
        default=300,
        help="random strategies, and tenths of mutations of files, to try",
    )
    parser.addoption(
        "--first", type=int, default=0, help="the seed of the strategies that are trained"
    )
