"""Digests of what is compiled: equal for equal scripts, also in other processes; different for any
difference that would be compiled."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from piper.program.compile.digest import digest_of


class Scaled(nn.Module):
    def __init__(self, scale: float, kinds: set[str] | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = scale
        self.kinds = kinds or {"one", "two", "three"}
        self.again = self.inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale  # type: ignore[no-any-return]


class Other(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.scale  # type: ignore[no-any-return]


def scaled_loss(scale: Any) -> Callable[..., Tensor]:
    return lambda x, y: (x - y).mean() * scale


def frozen() -> nn.Module:
    model = Scaled(2.0)
    model.inner.weight.requires_grad_(requires_grad=False)
    return model


def everything() -> list[Any]:
    """Objects whose digests all differ."""
    return [
        Scaled(2.0), Scaled(3.0), Scaled(2.0).eval(), Scaled(2.0).double(), Other(2.0), frozen(),
        Scaled(2.0, {"one"}), nn.Sequential(Scaled(2.0)), mse_loss, scaled_loss(1), scaled_loss(2),
        scaled_loss(torch.ones(2)), scaled_loss(torch.zeros(2)), Scaled(2.0).forward,
        partial(mse_loss, reduction="sum"), partial(mse_loss, reduction="mean"), {"a": 1}, {"a": 2},
        [1, 2], [2, 1], torch.float32, torch.device("cpu"), None, Scaled, Other,
    ]  # fmt: skip


def test_digests_differ_where_programs_would() -> None:
    digests = [digest_of(one).text for one in everything()]
    assert len(set(digests)) == len(digests)
    assert digests == [digest_of(one).text for one in everything()]


def sharing(*places: int) -> list[Any]:
    """A list of lists, of which those with equal numbers are the same."""
    lists: dict[int, list[Any]] = {}
    return [lists.setdefault(place, []) for place in places]


def attributed(value: int) -> Any:
    it = Ordered()
    it.value = value
    return it


class Ordered(OrderedDict[str, int]):
    value: int


def test_containers_differ_by_kind_items_and_sharing() -> None:
    plain = OrderedDict[str, int]()
    with_attribute = OrderedDict[str, int]()
    vars(with_attribute)["hidden"] = 1
    given: list[Any] = [
        [], (), {}, set(), frozenset(), plain, with_attribute, [[]], [()], [{}], [[[]]],
        [[], [1]], [[1], []], [1], [True], ["1"], [1.0], ["1", "2"], ["1', '2"], [[1, 2]], [[1], 2],
        {"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": "1"}, {"a": [1]}, {"a": [1], "b": []},
        {"a": [], "b": [1]}, [("a", 1)], ["plain []"], ["empty"], [scaled_loss(1), 1], {1, 2}, {1},
        sharing(0, 0, 1), sharing(0, 1, 1), sharing(0, 1, 0), sharing(0, 1, 2),
        attributed(1), attributed(2), Ordered(), Ordered(a=1),
    ]  # fmt: skip
    digests = [digest_of(one).text for one in given]
    assert len(set(digests)) == len(digests)
    shallow = [digest_of(shallow=[one]).text for one in given]
    assert len(set(shallow)) == len(shallow) - 1  # the order of a dict does not count


def test_digests_are_those_of_another_process() -> None:
    """Hashes of strings, and with them the order of sets, differ from process to process."""
    script = (
        "from tests.program.test_digest import digest_of, everything\n"
        "print(*(digest_of(one).text for one in everything()))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [digest_of(one).text for one in everything()]
