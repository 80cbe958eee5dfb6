"""Counts and displacements, and the rows that they stand for."""

from __future__ import annotations

import pytest
import torch

from thinwire.fused.counts import Segments, equal_split, parse_integers, receive_segments, send_segments


def test_integer_tensors_of_every_width_are_counts() -> None:
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        assert parse_integers(torch.tensor([3, 0], dtype=dtype), 2, "send_counts") == [3, 0]


def test_what_is_not_moved_may_lie_anywhere_and_received_segments_may_touch() -> None:
    assert equal_split(6, 3) == [2, 2, 2]
    assert send_segments([0, 4], [100, 0], 4).displs == [100, 0]  # where nothing is taken from does not matter
    assert receive_segments([2, 3, 1], [1, 3, 0], None).rows == 6
    assert send_segments([2, 3], [1, 0], 3).counts == [2, 3]  # reading a row twice is no fault


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
