"""Counts and displacements of an all-to-all-v, checked before anything is sent. Pure arithmetic, in rows of dim 0."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import add
from typing import NamedTuple

import torch

from thinwire.comm.result_memory import ResultMemory
from thinwire.comm.tensors import require_dense
from thinwire.errors import CapacityError, CountsError

Counts = Sequence[int] | torch.Tensor

_LARGEST = 2**63 - 1  # what kernels and messages hold
_PLAIN = {int}


class Segments(NamedTuple):
    """Where each peer's rows lie: `counts[r]` rows from row `displs[r]` on."""

    counts: list[int]
    displs: list[int]

    @property
    def rows(self) -> int:
        """The largest `displ + count`: rows of a tensor that holds all segments."""
        return max(map(add, self.counts, self.displs))

    def within(self, start: int, stop: int) -> Segments:
        """Rows start ... stop - 1 of every segment; fewer, or none, where it ends before."""
        firsts = [min(start, count) for count in self.counts]
        counts = [min(stop, count) - first for count, first in zip(self.counts, firsts, strict=True)]
        return Segments(counts, [displ + first for displ, first in zip(self.displs, firsts, strict=True)])

    def cut(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every segment of a tensor."""
        return [x[displ : displ + count] for count, displ in zip(*self, strict=True)]

    def row_index(self, start: int, stop: int, device: torch.device | None = None) -> torch.Tensor:
        """Rows start ... stop - 1 of every segment, in order of peers: int64, made on `device`, not copied to it.

        >>> Segments([2, 0, 3], [4, 0, 7]).row_index(1, 3).tolist()
        [5, 8, 9]
        """
        pairs = zip(*self.within(start, stop), strict=True)
        return torch.cat([torch.arange(displ, displ + count, device=device) for count, displ in pairs])

    def pick(self, x: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows start ... stop - 1 of every segment of x, in order of peers: a tensor, and which of its rows they are.

        None stands for all of them, a view. An index, which takes several operations of torch's to make, is made only
        where they do not lie in one run.

        >>> Segments([2, 0, 3], [4, 0, 6]).pick(torch.arange(9), 0, 3)
        (tensor([4, 5, 6, 7, 8]), None)
        >>> Segments([2, 0, 3], [4, 0, 6]).pick(torch.arange(9), 0, 1)
        (tensor([0, 1, 2, 3, 4, 5, 6, 7, 8]), tensor([4, 6]))
        """
        runs = [(displ, displ + count) for count, displ in zip(*self.within(start, stop), strict=True) if count]
        if any(end != begin for (_, end), (begin, _) in pairwise(runs)):
            return x, self.row_index(start, stop, x.device)
        return x[runs[0][0] : runs[-1][1]] if runs else x[:0], None


def dense_segments(counts: list[int]) -> Segments:
    """Segments that follow one another from row 0."""
    return Segments(counts, [0, *accumulate(counts[:-1])])


def parse_integers(values: Counts, size: int, name: str) -> list[int]:
    """A list of `size` ints, 0 to 2**63 - 1, from a list, a tuple or a dense integer tensor; or CountsError."""
    if type(values) is list and len(values) == size and {*map(type, values)} == _PLAIN:
        if min(values) >= 0 and max(values) <= _LARGEST:  # the usual case, told apart at little cost
            return values.copy()
    if isinstance(values, torch.Tensor):
        require_dense(name, values)
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool or values.dim() != 1:
            raise CountsError(f"{name} must be a 1-D integer tensor; got {values.dtype} {list(values.shape)}")
        values = values.tolist()
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise CountsError(f"{name} must be a list of {size} ints or a 1-D integer tensor; got {type(values).__name__}")
    if len(values) != size:
        raise CountsError(f"{name} has {len(values)} entries; this group has {size} ranks, and each needs one")
    parsed = []
    for peer, value in enumerate(values):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise CountsError(f"{name}[{peer}] is {value!r}; an int of at least 0 is needed")
        if not 0 <= int(value) <= _LARGEST:
            raise CountsError(f"{name}[{peer}] is {int(value)}; counts and displacements are 0 to 2**63 - 1")
        parsed.append(int(value))
    return parsed


def equal_split(rows: int, size: int) -> list[int]:
    """The counts when none are given; CountsError when the rows cannot be dealt out evenly."""
    if rows % size:
        raise CountsError(f"{rows} rows cannot be split equally among {size} ranks; pass send_counts and recv_counts")
    return [rows // size] * size


def _segments(counts: list[int], displs: Counts | None, name: str) -> Segments:
    if displs is None:
        return dense_segments(counts)
    return Segments(counts, parse_integers(displs, len(counts), name))


def send_segments(counts: list[int], displs: Counts | None, rows: int) -> Segments:
    """What is read of the input, or CountsError. Segments may overlap: reading twice is no fault."""
    segments = _segments(counts, displs, "send_displs")
    if displs is not None or sum(counts) > rows:
        _check_bounds(segments, rows, "send", "the input has")
    return segments


def receive_segments(counts: list[int], displs: Counts | None, rows: int | None) -> Segments:
    """What is written of the output, which has `rows` rows or as many as are needed; CountsError where two overlap."""
    segments = _segments(counts, displs, "recv_displs")
    if rows is not None and (displs is not None or sum(counts) > rows):
        _check_bounds(segments, rows, "recv", "out has")
    if displs is None:
        return segments
    filled = sorted((d, d + c, peer) for peer, (c, d) in enumerate(zip(*segments, strict=True)) if c)
    for (start, stop, peer), (next_start, next_stop, next_peer) in zip(filled, filled[1:], strict=False):
        if next_start < stop:
            raise CountsError(
                f"received rows overlap: {start}:{stop} from rank {peer} and {next_start}:{next_stop} from rank "
                f"{next_peer}; give recv_displs that keep them apart"
            )
    return segments


def new_rows(
    x: torch.Tensor, rows: int, tail: Sequence[int], zero: bool = False, memory: ResultMemory | None = None
) -> torch.Tensor:
    """A new tensor of x's dtype for rows of shape `tail`, whose number peers may have said; or CapacityError."""
    try:
        if memory is not None:
            out = memory.new_empty(x, (rows, *tail))
            return out.zero_() if zero else out
        return x.new_zeros(rows, *tail) if zero else x.new_empty(rows, *tail)
    except torch.OutOfMemoryError:
        raise  # of a GPU, which callers may know how to help
    except (RuntimeError, TypeError) as error:  # torch has either for sizes of more than 64 bits
        raise CapacityError(f"{rows} rows of {x.dtype} {list(tail)} cannot be allocated: {error}") from error


def _check_bounds(segments: Segments, rows: int, side: str, owner: str) -> None:
    for peer, (count, displ) in enumerate(zip(*segments, strict=True)):
        if count and displ + count > rows:
            raise CountsError(
                f"{side}_displs[{peer}] + {side}_counts[{peer}] = {displ} + {count} is past the end: "
                f"{owner} {rows} rows"
            )
