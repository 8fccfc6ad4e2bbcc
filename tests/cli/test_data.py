"""The byte-level data: what is read, repeatable batches, and disjoint splits."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import pytest
import torch

from piper.base.errors import PiperError
from piper.capture.batch import Batch
from piper.cli.demo.text_data import ByteBatches, source_bytes, stdlib_bytes

RAMP = torch.arange(200, dtype=torch.uint8)  # each byte is its own index


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())


def text_of(data: torch.Tensor) -> str:
    return bytes(data.tolist()).decode()


def test_the_real_library_is_long_and_the_same_each_time() -> None:
    text = stdlib_bytes(500_000)
    assert text.dtype == torch.uint8
    assert text.shape == (500_000,)
    assert torch.equal(text, stdlib_bytes(500_000))
    assert torch.equal(text[:1000], stdlib_bytes(1000))
    assert "import" in text_of(text[:20_000])


def test_files_come_in_the_order_of_their_paths(tmp_path: Path) -> None:
    write(tmp_path, {"b.py": "3", "a/z.py": "1", "a/b/c.py": "0", "a0.py": "2", "a/data.txt": "x"})
    assert text_of(source_bytes(tmp_path)) == "0123"


def test_packages_and_tests_are_left_out(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "json/tool.py": "kept ",
            "site-packages/torch.py": "no",
            "test/test_os.py": "no",
            "idlelib/idle_test/test_editor.py": "no",
            "idlelib/editor.py": "",
            "unittest/test/test_case.py": "no",
            "unittest/case.py": "too",
        },
    )
    assert text_of(source_bytes(tmp_path)) == "kept too"


def test_unreadable_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "a", "c.py": "c"})
    os.symlink(tmp_path / "missing", tmp_path / "b.py")
    assert text_of(source_bytes(tmp_path)) == "ac"


def test_limit_cuts_within_a_file(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "abc", "b.py": "def"})
    assert [text_of(source_bytes(tmp_path, n)) for n in (1, 3, 4, 9)] == [
        "a",
        "abc",
        "abcd",
        "abcdef",
    ]


def test_no_source_at_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(PiperError, match="is the Python source installed"):
        source_bytes(tmp_path)


def test_limit_must_be_positive() -> None:
    with pytest.raises(PiperError, match="limit=0"):
        stdlib_bytes(0)


@pytest.mark.parametrize(("batch", "seq"), [(4, 16), (1, 7), (3, 1)])
def test_targets_are_the_next_bytes(batch: int, seq: int) -> None:
    x, y = ByteBatches(RAMP, batch=batch, seq=seq)[5]
    assert x.shape == y.shape == (batch, seq)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1)
    assert torch.equal(x, x[:, :1] + torch.arange(seq))


def test_a_step_gives_the_same_batch_whenever_it_is_asked_for() -> None:
    batches = ByteBatches(RAMP, batch=4, seq=8, seed=3)
    from_start = [x for x, _ in islice(batches, 6)]
    torch.manual_seed(99)
    resumed = ByteBatches(RAMP, batch=4, seq=8, seed=3)
    for step in (5, 2, 0):
        assert torch.equal(resumed[step][0], from_start[step])


def test_reading_a_batch_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    ByteBatches(RAMP, batch=4, seq=8)[0]
    assert torch.equal(torch.get_rng_state(), state)


def test_steps_seeds_and_splits_give_different_batches() -> None:
    text = torch.zeros(2**16, dtype=torch.uint8).random_(generator=torch.Generator().manual_seed(0))
    seen = [
        ByteBatches(text, batch=2, seq=8, seed=seed, split=split, valid_fraction=0.5)[step][0]
        for seed in (0, 1)
        for split in ("train", "valid")
        for step in range(4)
    ]
    assert len({tuple(x.flatten().tolist()) for x in seen}) == len(seen)


def test_splits_share_no_byte_and_leave_none_out() -> None:
    def read(split: str) -> set[int]:
        batches = ByteBatches(RAMP, batch=64, seq=5, split=split, valid_fraction=0.1)
        return {
            int(byte) for step in range(30) for part in batches[step] for byte in part.flatten()
        }

    assert read("train") == set(range(180))
    assert read("valid") == set(range(180, 200))


def test_a_split_may_hold_exactly_one_sequence() -> None:
    x, y = ByteBatches(RAMP, batch=2, seq=19, split="valid", valid_fraction=0.1)[0]
    assert torch.equal(x, torch.arange(180, 199).expand(2, -1))
    assert torch.equal(y, torch.arange(181, 200).expand(2, -1))


def test_a_text_shorter_than_a_sequence_says_what_to_change() -> None:
    with pytest.raises(PiperError, match="valid split has 20 of the text's 200 bytes") as error:
        ByteBatches(RAMP, batch=2, seq=20, split="valid", valid_fraction=0.1)
    assert "21" in str(error.value)
    assert "use a shorter seq" in str(error.value)
    with pytest.raises(PiperError, match="valid split has 0"):
        ByteBatches(RAMP, batch=2, seq=4, split="valid", valid_fraction=0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": RAMP.long()}, "must be one-dimensional uint8"),
        ({"text": RAMP.view(2, 100)}, "must be one-dimensional uint8"),
        ({"batch": 0}, "batch=0"),
        ({"seq": 0}, "seq=0"),
        ({"split": "test"}, "split='test': must be 'train' or 'valid'"),
        ({"valid_fraction": 1.0}, "valid_fraction=1.0"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(PiperError, match=message):
        ByteBatches(**{"text": RAMP, "batch": 2, "seq": 4, **change})


def test_a_negative_step_is_an_error() -> None:
    with pytest.raises(PiperError, match="step=-1"):
        ByteBatches(RAMP, batch=2, seq=4)[-1]


def test_a_batch_of_keywords_says_that_they_are_one_mapping() -> None:
    x = torch.randn(2, 3)
    example = Batch.of({"input_ids": x, "mask": x}, (x,))
    wanted = r"1 mapping of input_ids, mask and 1 target, .*; 3 values given"
    with pytest.raises(PiperError, match=wanted):
        example.like(x, x, x)
