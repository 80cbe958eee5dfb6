"""What the CPU's kernels know of a lane, and the small functions that all of them share.

Kernels of a round take the address of a lane's *numbers*: sizes, offsets and addresses, the same in every round.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from thinwire.errors import RoutingError, WireFormatError
from thinwire.triton_kernels.cpu.codec import LAYOUT_FIELDS, Layout, dtype_code, record_layout
from thinwire.triton_kernels.cpu.compat import device
from thinwire.triton_kernels.cpu.ir.fields import in_memory, reader_of
from thinwire.triton_kernels.cpu.ir.intrinsics import load_int32, load_int64, store_int64, zero_bytes
from thinwire.triton_kernels.cpu.ir.vectors import NONE
from thinwire.triton_kernels.cpu.launch import addresses
from thinwire.triton_kernels.cpu.signal import own_line
from thinwire.triton_kernels.round_layout import DTYPE_BITS, DTYPE_CODES, SIGNAL_DTYPE, SIGNAL_TOKENS, Lane
from thinwire.triton_kernels.signal import MAX_WORLD

#: What kernels that fill an output return.
WRITTEN, POISONED, MIXED_DTYPES = 0, 1, 2

_DTYPE_MASK = (1 << DTYPE_BITS) - 1

#: Bytes of an array of ranks, as int64.
RANKS_BYTES = 8 * MAX_WORLD


#: Numbers of a lane that have the names of `RoundLayout`, in lower case.
_OF_LAYOUT = (
    "world", "num_experts", "top_k", "hidden", "max_tokens", "slots", "record_bytes", "sum_bytes",
    "stuck", "signals", "combine_signals", "ids", "weights", "records", "sums", "invariant", "weight_grads",
)  # fmt: skip

#: The addresses of the lane's tensors of these names.
_TENSORS = (
    "buffer_ptrs", "home_ptrs", "control", "report", "seen", "index", "expert_counts", "expert_offsets", "positions",
)  # fmt: skip

#: All that is the same in every round of a lane.
numbers_at = reader_of(
    *_OF_LAYOUT, *_TENSORS,
    "row_weights",  # the address of the lane's `weights`; those of the layout are where they arrive
    "rank", "align",
    "experts_each", "larger_ranks",  # so many ranks own one expert more
    "first_expert", "local_experts",
    "num_rows",  # that the index has room for
    "dtype", "dtype_word",  # of the rows, and how a dispatch line names that of the tokens
    # the layouts of a dispatched record and of a combined one, as the codec has them
    *(f"record_{name}" for name in LAYOUT_FIELDS), *(f"sum_{name}" for name in LAYOUT_FIELDS),
)  # fmt: skip


class Numbers(NamedTuple):
    """A lane's numbers in memory, and why rows of this dtype cannot travel on the lane, where they cannot."""

    words: np.ndarray
    address: int
    refusal: str


def _numbers(lane: Lane, dtype: torch.dtype | None) -> Numbers:
    layout, rank = lane.layout, lane.rank
    if layout.WORLD > MAX_WORLD:
        raise RoutingError(f"a lane of {layout.WORLD} ranks; accepted: at most {MAX_WORLD}")
    legs: list[Layout] = []
    refusal = ""
    for leg, room in ((lane.wire, layout.RECORD_BYTES), (lane.combine_wire, layout.SUM_BYTES)):
        legs.append((0,) * 6 if dtype is None else record_layout(leg, layout.HIDDEN, dtype))
        if legs[-1][-1] > room:
            refusal = (
                f"a row of {layout.HIDDEN} elements of {dtype} takes {legs[-1][-1]} bytes in wire format {str(leg)!r}, "
                f"and this lane was laid out for {room}; accepted: rows of the dtype that it was laid out for"
            )
    words = in_memory(
        *(getattr(layout, name.upper()) for name in _OF_LAYOUT), *addresses(lane, *_TENSORS, "weights"),
        rank, lane.align,
        layout.NUM_EXPERTS // layout.WORLD, layout.NUM_EXPERTS % layout.WORLD,
        layout.first_expert(rank), layout.first_expert(rank + 1) - layout.first_expert(rank),
        layout.num_rows(rank, lane.align),
        0 if dtype is None else dtype_code(dtype), -1 if dtype is None else DTYPE_CODES[lane.tokens_dtype or dtype],
        *legs[0], *legs[1],
    )  # fmt: skip
    return Numbers(*words, refusal)


def numbers_of(lane: Lane, dtype: torch.dtype | None = None) -> Numbers:
    """The numbers of a lane whose rows have a dtype; without one, of a kernel that looks at no row.

    Raises:
        WireFormatError: for a dtype that cannot travel.
        RoutingError: for more ranks than `MAX_WORLD`.
    """
    numbers: Numbers | None = lane.kept.get(dtype)
    if numbers is None:
        numbers = lane.kept[dtype] = _numbers(lane, dtype)
    return numbers


def numbers_that_fit(lane: Lane, dtype: torch.dtype | None) -> Numbers:
    """The same, or WireFormatError for a dtype whose records are larger than the lane's slots."""
    numbers = numbers_of(lane, dtype)
    if numbers.refusal:
        raise WireFormatError(numbers.refusal)
    return numbers


# ---------------------------------------------------------------------------------------------------------------------
# In kernels


@device
def record_layout_of(lane):
    """What the codec's row functions must know of a dispatched record: a `Layout`."""
    return lane[-12:-6]


@device
def sum_layout_of(lane):
    """The same of a combined record."""
    return lane[-6:]


@device
def mixed_dtypes(lane, kind):
    """Whether records of `kind` hold elements of another dtype than `lane` has: only those of `none` hold a dtype."""
    word = np.int64(load_int32(own_line(lane, lane.signals, lane.rank) + 4 * SIGNAL_DTYPE))
    return kind == NONE and (word < 0 or word & _DTYPE_MASK != lane.dtype_word)


@device
def token_count(lane, source):
    """How many tokens a rank sent this rank in this round; 0 where it wrote a number that cannot be."""
    tokens = load_int32(own_line(lane, lane.signals, source) + 4 * SIGNAL_TOKENS)
    return np.int64(tokens) if 0 <= tokens <= lane.max_tokens else np.int64(0)


@device
def owner_of(expert, lane):
    """The rank that owns an expert; -1 where an id is no expert's."""
    boundary = lane.larger_ranks * (lane.experts_each + 1)
    if 0 <= expert < boundary:
        return expert // (lane.experts_each + 1)
    if 0 <= expert < lane.num_experts:
        return lane.larger_ranks + (expert - boundary) // lane.experts_each
    return -1


@device
def destinations(ids, lane, ranks):
    """Writes the ranks that own a token's experts, ascending, each once, and returns how many: at most `slots`.

    `ids` is the address of the token's int32 ids, any numbers, and `ranks` of `RANKS_BYTES` for int64.
    """
    zero_bytes(ranks, 8 * lane.world)
    for k in range(lane.top_k):
        owner = owner_of(load_int32(ids + 4 * k), lane)
        if owner >= 0:
            store_int64(ranks + 8 * owner, 1)
    count = 0
    for rank in range(lane.world):
        if load_int64(ranks + 8 * rank) != 0:
            store_int64(ranks + 8 * count, rank)
            count += 1
    return count


@device
def senders(ids, lane, ranks):
    """As `destinations`: the rank that each of a token's sums comes from. With `invariant`, one for each expert."""
    if not lane.invariant:
        return destinations(ids, lane, ranks)
    count = 0
    for k in range(lane.top_k):
        owner = owner_of(load_int32(ids + 4 * k), lane)
        if owner >= 0:
            place = count
            while place > 0 and load_int64(ranks + 8 * (place - 1)) > owner:
                store_int64(ranks + 8 * place, load_int64(ranks + 8 * (place - 1)))
                place -= 1
            store_int64(ranks + 8 * place, owner)
            count += 1
    return count


# ---------------------------------------------------------------------------------------------------------------------
# In launchers


def check_rows(rows: torch.Tensor, hidden: int, name: str) -> None:
    """Raises RoutingError for what is not rows of so many elements."""
    if rows.dim() != 2 or rows.shape[1] != hidden:
        raise RoutingError(f"{name} has the shape {tuple(rows.shape)}; accepted: [rows, {hidden}]")


def check_out(out: torch.Tensor, hidden: int) -> None:
    """Raises RoutingError for an output that a kernel, which sees an address and a row stride, cannot fill."""
    check_rows(out, hidden, "out")
    if hidden > 1 and out.stride(1) != 1:
        raise RoutingError(f"out has the strides {out.stride()}; accepted: each row's columns side by side")


def readable_rows(rows: torch.Tensor, hidden: int, name: str) -> torch.Tensor:
    """Rows with their columns side by side: the same ones, or a copy where they are not."""
    check_rows(rows, hidden, name)
    return rows if hidden == 1 or rows.stride(1) == 1 else rows.contiguous()


def check_dtype(result: int, name: str, dtype: torch.dtype) -> None:
    """Raises RoutingError for rows of another dtype than the records hold, if a kernel said so."""
    if result == MIXED_DTYPES:
        raise RoutingError(f"{name} is {dtype}; with wire format 'none' it must be of the dtype of the tokens sent")
