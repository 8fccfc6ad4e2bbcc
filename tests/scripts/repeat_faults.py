"""Runs every test of ``test_processes.py`` and ``test_torchrun.py`` many times.

    python tests/scripts/repeat_faults.py 20 [pytest options, such as -x or -k killed]

It is also a pytest plugin, which runs each test ``--times`` times.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=int, default=1, help="how often each test is run")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    times = metafunc.config.getoption("--times")
    metafunc.fixturenames.append("time")
    metafunc.parametrize("time", range(times))


if __name__ == "__main__":
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = str(ROOT)
    sys.path.insert(0, str(ROOT))
    times, *more = sys.argv[1:]
    plugin = ["-p", "tests.scripts.repeat_faults", "--times", times]
    tests = ["tests/launch/test_processes.py", "tests/launch/test_torchrun.py"]
    sys.exit(pytest.main([*plugin, "-m", "not gpu", "-q", "--numprocesses", "2", *tests, *more]))
