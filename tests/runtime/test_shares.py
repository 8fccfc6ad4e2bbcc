"""A GPU's SMs partitioned among streams, as pure arithmetic: shares are disjoint, nothing is left
over where a stream asks for the rest, and the error names what does not fit."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piper.base.errors import PiperError
from piper.ir.rules import Rest, Sms, StreamRule
from piper.runtime.streams.sm_shares import Shares, divide

H200 = (132, 8, 4)
"""SMs, the SMs of an allocation unit, and the SMs that fill no unit."""
OTHER_H200 = (132, 8, 12)
"""Working SMs differ from chip to chip, and so does the number of units they form."""

REST = Rest.REST


def test_shares_follow_each_other_in_whole_units() -> None:
    found = divide(*H200, {"a": 64, "b": 20, "c": 1, "d": 8})
    assert found == {"a": range(8), "b": range(8, 11), "c": range(11, 12), "d": range(12, 13)}


def test_the_rest_is_what_numbers_leave_wherever_it_is_asked_for() -> None:
    found = divide(*H200, {"first": REST, "a": 64, "b": 16, "last": REST})
    assert found == {
        "a": range(8),
        "b": range(8, 10),
        "first": range(10, 16),
        "last": range(10, 16),
    }


def test_the_rest_alone_is_everything() -> None:
    assert divide(*H200, {"a": REST}) == {"a": range(16)}


def test_the_rest_may_be_the_remainder_alone() -> None:
    assert divide(*H200, {"a": 128, "b": REST}) == {"a": range(16), "b": range(16, 16)}


@pytest.mark.parametrize(
    ("gpu", "asked", "says"),
    [
        (
            H200,
            {"a": 64, "b": 65},
            [
                "do not fit on the GPU, whose 132 SMs are handed out in 16 units of 8",
                "'a' asks for 64, which takes 8 of them; 'b' asks for 65, which takes 9 of them.",
                "rounded up to a multiple of 8, add up to at most 128",
            ],
        ),
        (OTHER_H200, {"a": 128}, ["15 units of 8", "which takes 16 of them", "at most 120"]),
        (H200, {"a": 129}, ["'a' asks for 129, which takes 17 of them.", "at most 128"]),
        (H200, {"a": 132, "b": REST}, ["do not fit", "'a' asks for 132, which takes 17 of them"]),
        (
            (128, 8, 0),
            {"a": 64, "b": REST, "c": 57, "d": REST},
            [
                "sms='rest' of 'b' and 'd': nothing is left of the GPU",
                "whose 128 SMs are handed out in 16 units of 8",
                "'a' asks for 64, which takes 8 of them; 'c' asks for 57, which takes 8 of them.",
                "add up to at most 120",
            ],
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    gpu: tuple[int, int, int], asked: dict[str, Sms], says: list[str]
) -> None:
    with pytest.raises(PiperError) as caught:
        divide(*gpu, asked)
    for part in says:
        assert part in str(caught.value)


@pytest.mark.slow
@given(
    units=st.integers(1, 40),
    unit=st.integers(1, 16),
    left=st.integers(0, 20),
    asked=st.dictionaries(st.text(max_size=3), st.integers(1, 120) | st.just(REST), max_size=6),
)
def test_any_division_is_disjoint_and_large_enough(
    units: int, unit: int, left: int, asked: dict[str, Sms]
) -> None:
    total = units * unit + left
    numbers = {name: sms for name, sms in asked.items() if isinstance(sms, int)}
    needed = sum(-(-sms // unit) for sms in numbers.values())
    asks_rest = len(numbers) < len(asked)
    if needed > units or (asks_rest and needed == units and not left):
        with pytest.raises(PiperError):
            divide(total, unit, left, asked)
        return
    found = divide(total, unit, left, asked)
    assert found.keys() == asked.keys()
    for name, sms in numbers.items():
        assert 0 <= len(found[name]) * unit - sms < unit
    shares = {found[name] for name in asked if name not in numbers}
    assert len(shares) == asks_rest, "all that ask for the rest have one share"
    taken = [u for part in [*shares, *(found[name] for name in numbers)] for u in part]
    assert len(taken) == len(set(taken)), "no unit belongs to two shares"
    assert set(taken) <= set(range(units))
    if asks_rest:
        assert set(taken) == set(range(units)), "the rest leaves nothing"


def test_missing_bindings_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(PiperError, match="pip install cuda-bindings, or leave sms out"):
        Shares(torch.device("cuda", 0), {"a": StreamRule(sms=8)})


def test_nothing_is_needed_where_no_share_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    Shares(torch.device("cuda", 0), {"a": StreamRule(priority=1)})
