"""Counts and displacements that do not fit are refused, by name, before anything is sent."""

from __future__ import annotations

import pytest
import torch

from thinwire.errors import CountsError
from thinwire.fused.counts import Segments, equal_split, parse_integers, receive_segments, send_segments


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 2, 3], "send_counts has 3 entries; this group has 2 ranks"),
        ([1, -2], r"send_counts\[1\] is -2"),
        ([1, 2.0], r"send_counts\[1\] is 2.0"),
        ([True, 1], r"send_counts\[0\] is True"),
        ("12", "got str"),
        (7, "got int"),
        (torch.tensor([1.0, 2.0]), "torch.float32"),
        (torch.tensor([[1, 2]]), r"\[1, 2\]"),
        (torch.tensor([True, False]), "torch.bool"),
    ],
)
def test_counts_that_are_not_counts_are_refused(values: object, message: str) -> None:
    with pytest.raises(CountsError, match=message):
        parse_integers(values, 2, "send_counts")  # type: ignore[arg-type]


def test_integer_tensors_of_every_width_are_counts() -> None:
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        assert parse_integers(torch.tensor([3, 0], dtype=dtype), 2, "send_counts") == [3, 0]


def test_segments_must_lie_within_their_tensor() -> None:
    with pytest.raises(CountsError, match=r"send_displs\[1\] \+ send_counts\[1\] = 3 \+ 2 is past the end: .* 4 rows"):
        send_segments([3, 2], None, 4)
    with pytest.raises(CountsError, match=r"recv_displs\[0\] \+ recv_counts\[0\] = 9 \+ 1"):
        receive_segments([1, 1], [9, 0], 5)
    assert send_segments([0, 4], [100, 0], 4).displs == [100, 0]  # where nothing is taken from does not matter


def test_received_segments_may_touch_but_not_overlap() -> None:
    assert receive_segments([2, 3, 1], [1, 3, 0], None).rows == 6
    with pytest.raises(CountsError, match="overlap: 0:3 from rank 1 and 2:4 from rank 0"):
        receive_segments([2, 3], [2, 0], None)
    assert send_segments([2, 3], [1, 0], 3).counts == [2, 3]  # reading a row twice is no fault


def test_an_uneven_split_is_refused() -> None:
    assert equal_split(6, 3) == [2, 2, 2]
    with pytest.raises(CountsError, match="7 rows cannot be split equally among 3 ranks; pass send_counts"):
        equal_split(7, 3)


@pytest.mark.parametrize(
    ("counts", "displs", "in_one_run"),
    [
        ([5, 4], [0, 5], False),  # whole, they lie in one run; halves do not
        ([0, 7, 0], [9, 1, 0], True),
        ([3, 0, 3], [4, 0, 0], False),
        ([2, 2], [1, 1], False),  # the same rows twice
        ([0, 0], [0, 3], True),
    ],
)
def test_rows_that_are_picked_are_those_of_the_index(counts: list[int], displs: list[int], in_one_run: bool) -> None:
    x, segments = torch.randn(9, 2), Segments(counts, displs)
    for start, stop in [(0, 2), (1, 5), (2, 9), (0, 9)]:
        picked, index = segments.pick(x, start, stop)
        assert torch.equal(x[segments.row_index(start, stop)], picked if index is None else picked[index])
        assert index is None or not in_one_run
    assert segments.pick(x, 0, 2)[1] is None or not in_one_run
