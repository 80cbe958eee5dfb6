"""A lane of CPU ranks: what lies where in the ranks' memory, and what kernels of a round know of it.

A rank writes into its own memory alone, and its peers read there. Of each lane it has::

    [ part of each source that it serves ] [ its sums ] [ on lanes of backward: gradients of router weights ]

A *part* holds what a rank dispatches: the number of its tokens, their expert ids, router weights and records, by the
token's number. A rank serves itself; over two levels also ranks of other hosts. Sums lie by source and its token's
number: one, or with `INVARIANT` one for each of the token's experts here, in ascending id. So do gradients, one for
each such expert.

Kernels take the address of a lane's *numbers*: sizes, offsets and addresses, the same in every round.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from thinwire.errors import WireFormatError
from thinwire.triton_kernels.cpu.codec import LAYOUT_FIELDS, dtype_code, record_layout
from thinwire.triton_kernels.cpu.compat import device
from thinwire.triton_kernels.cpu.ir.memory import load_int32, load_int64, reader_of, store_int64
from thinwire.triton_kernels.cpu.sums import scratch_bytes
from thinwire.triton_kernels.round_layout import ExpertRows, Tensors, aligned, bytes_of, filled
from thinwire.triton_kernels.signal import MAX_WORLD
from thinwire.wire import WireFormat

#: Bytes of an array of ranks, as int64.
RANKS_BYTES = 8 * MAX_WORLD
#: What a rank says of a round in its line behind a dispatch: a dtype and a tag, or this less the reason of a refusal.
REFUSED = -1


class PulledLayout(ExpertRows):
    """Sizes and byte offsets of one lane's memory, the same on every rank, before anything is allocated.

    Args:
        dtype: the tokens'; None leaves room for float32. Only used for the wire format `none`.
        sum_dtype: of sums; None means `dtype`.
        weight_grads: whether gradients of router weights come home with the sums.
        invariant: whether a sum is one expert's row, on lanes without `weight_grads`.
        served: the most sources that a rank of the group serves.

    >>> wire = WireFormat.parse("int8")
    >>> layout = PulledLayout(
    ...     world=8, num_experts=256, top_k=8, hidden=7168, max_tokens=128, wire=wire, combine_wire=wire
    ... )
    >>> layout.RECORD_BYTES, layout.NUM_BYTES
    (7296, 8413312)
    """

    def __init__(
        self,
        *,
        world: int,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        wire: WireFormat,
        combine_wire: WireFormat,
        dtype: torch.dtype | None = None,
        sum_dtype: torch.dtype | None = None,
        weight_grads: bool = False,
        invariant: bool = False,
        served: int = 1,
    ) -> None:
        self.WORLD, self.NUM_EXPERTS, self.TOP_K, self.HIDDEN = world, num_experts, top_k, hidden
        self.MAX_TOKENS, self.INVARIANT = max_tokens, invariant
        self.EACH = min(top_k, -(-num_experts // world)) if invariant else 1  # sums that a rank can have for a token
        self.RECORD_BYTES = wire.row_bytes(hidden, dtype or torch.float32)  # from one dispatched record to the next
        self.SUM_BYTES = combine_wire.row_bytes(hidden, sum_dtype or dtype or torch.float32)
        plane = max_tokens * top_k * 4
        self.IDS = aligned(8)  # from the beginning of a part: int32 [max_tokens][top_k]
        self.WEIGHTS = aligned(self.IDS + plane)  # float32, the same shape
        self.RECORDS = aligned(self.WEIGHTS + plane)
        self.PART_BYTES = aligned(self.RECORDS + max_tokens * self.RECORD_BYTES)
        self.SUMS = served * self.PART_BYTES  # [world][max_tokens][EACH]
        end = aligned(self.SUMS + world * max_tokens * self.EACH * self.SUM_BYTES)
        self.WEIGHT_GRADS = end if weight_grads else 0  # float32 [world][max_tokens][top_k], or 0: none travel
        self.NUM_BYTES = aligned(end + world * plane) if weight_grads else end


class PulledLane:
    """One rank's end of a lane.

    Attributes:
        wire, combine_wire: formats of records and of sums.
        align: every expert's rows begin at a multiple of this.
        board, channel: the address of the rank's board, and which of its channels is the lane's.
        memory: uint8 [NUM_BYTES], this rank's.
        lane_ptrs: int64 [world], the address of each rank's memory of the lane; this rank's own for those of other
            hosts, which no id leads to.
        part_ptrs: int64 [world], the address of each source's part.
        peers: int64 [ranks on the board], the numbers in the group of those that share memory.
        sum_dtype: of sums, where that is not the tokens'.
        index: int64 [num_rows], the record of each expert-sorted row, -1 for padding and behind the last row.
        expert_counts: int64 [local experts], rows of each expert, without padding.
        expert_offsets: int64 [local experts + 1], where each expert's rows begin, with padding.
        positions: int64 [world * max_tokens, top_k], the rows of each record in ascending expert id, -1 behind them.
        weights: float32 [world * max_tokens, top_k], their router weights.
        counts: int64 [world], tokens of each source in the round.
        said: int64 [world], what the line of each rank said that was taken last.
        filled: int64 [2], how much of positions and of index the last routing left filled.
        scratch: uint8, what sums need, for one kernel at a time.
        kept: numbers, by dtype.
    """

    index: torch.Tensor
    expert_counts: torch.Tensor
    expert_offsets: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    said: torch.Tensor
    filled: torch.Tensor
    scratch: torch.Tensor

    def __init__(
        self,
        layout: PulledLayout,
        wire: WireFormat,
        combine_wire: WireFormat,
        rank: int,
        align: int,
        board: int,
        channel: int,
        memory: torch.Tensor,
        lane_ptrs: torch.Tensor,
        part_ptrs: torch.Tensor,
        peers: torch.Tensor,
        sum_dtype: torch.dtype | None = None,
    ) -> None:
        self.layout, self.wire, self.combine_wire, self.sum_dtype = layout, wire, combine_wire, sum_dtype
        self.rank, self.align, self.board, self.channel = rank, align, board, channel
        self.memory, self.lane_ptrs, self.part_ptrs, self.peers = memory, lane_ptrs, part_ptrs, peers
        self.kept: dict[object, Any] = {}
        for name, tensor in filled(self._tensors_beside(layout, rank, align), "cpu").items():
            setattr(self, name, tensor)

    @staticmethod
    def _tensors_beside(layout: PulledLayout, rank: int, align: int) -> Tensors:
        """Names what is allocated beside the ranks' memory."""
        scratch = 8 * layout.TOP_K + scratch_bytes(layout.HIDDEN, layout.TOP_K, encoded=True)
        return layout.routed(rank, align) | {
            "counts": ((layout.WORLD,), torch.int64, 0),
            "said": ((layout.WORLD,), torch.int64, 0),
            "filled": ((2,), torch.int64, 0),
            "scratch": ((scratch,), torch.uint8, 0),
        }

    @classmethod
    def bytes_beside(cls, layout: PulledLayout, rank: int, align: int) -> int:
        """Counts what a lane allocates, and the addresses and numbers of all ranks that it is given, on one host."""
        return 3 * layout.WORLD * torch.int64.itemsize + bytes_of(cls._tensors_beside(layout, rank, align))

    def part(self, served: int = 0) -> dict[str, torch.Tensor]:
        """Views of a part in this rank's memory: `ids`, `weights` and `records` by token, and `tokens`, int64 []."""
        layout, first = self.layout, served * self.layout.PART_BYTES
        part, tokens, top_k = self.memory[first : first + layout.PART_BYTES], layout.MAX_TOKENS, layout.TOP_K
        planes = {"ids": (layout.IDS, torch.int32), "weights": (layout.WEIGHTS, torch.float32)}
        views = {
            name: part[begin : begin + 4 * tokens * top_k].view(dtype).view(tokens, top_k)
            for name, (begin, dtype) in planes.items()
        }
        records = part[layout.RECORDS :][: tokens * layout.RECORD_BYTES].view(tokens, layout.RECORD_BYTES)
        return views | {"records": records, "tokens": part[:8].view(torch.int64)[0]}


#: Numbers of a lane that have the names of `PulledLayout`, in lower case.
_OF_LAYOUT = (
    "world", "num_experts", "top_k", "hidden", "max_tokens", "each", "record_bytes", "sum_bytes", "ids", "weights",
    "records", "sums", "invariant", "weight_grads",
)  # fmt: skip

#: The addresses of the lane's tensors of these names.
_TENSORS = (
    "lane_ptrs", "part_ptrs", "peers", "index", "expert_counts", "expert_offsets", "positions", "counts", "said",
    "filled", "scratch",
)  # fmt: skip

#: All that is the same in every round of a lane.
numbers_at = reader_of(
    *_OF_LAYOUT, *_TENSORS,
    "row_weights",  # the address of the lane's `weights`; those of the layout are where they are read
    "num_peers", "board", "channel", "rank", "align",
    "experts_each", "larger_ranks",  # so many ranks own one expert more
    "first_expert", "local_experts",
    "num_rows",  # that the index has room for
    "dtype", "sum_dtype",  # of the tokens, and of sums
    # the layouts of a dispatched record and of a sum, as the codec has them
    *(f"record_{name}" for name in LAYOUT_FIELDS), *(f"sum_{name}" for name in LAYOUT_FIELDS),
)  # fmt: skip


def numbers_of(lane: PulledLane, dtype: torch.dtype) -> int:
    """The address of the numbers of a lane whose tokens have a dtype.

    Raises:
        WireFormatError: a dtype that cannot travel, or whose records are larger than the lane's.
    """
    numbers: tuple[np.ndarray, int] | None = lane.kept.get(dtype)
    if numbers is None:
        words = _numbers(lane, dtype)
        numbers = lane.kept[dtype] = words, words.ctypes.data
    return numbers[1]


def _numbers(lane: PulledLane, dtype: torch.dtype) -> np.ndarray:
    layout, rank, sum_dtype = lane.layout, lane.rank, lane.sum_dtype or dtype
    record = record_layout(lane.wire, layout.HIDDEN, dtype)
    total = record_layout(lane.combine_wire, layout.HIDDEN, sum_dtype)
    if record[-1] > layout.RECORD_BYTES or total[-1] > layout.SUM_BYTES:
        raise WireFormatError(
            f"a row of {layout.HIDDEN} elements of {dtype} takes {record[-1]} bytes on the way out and {total[-1]} on "
            f"the way home, and this lane was laid out for {layout.RECORD_BYTES} and {layout.SUM_BYTES}"
        )
    numbers = (
        *(getattr(layout, name.upper()) for name in _OF_LAYOUT),
        *(getattr(lane, name).data_ptr() for name in (*_TENSORS, "weights")),
        lane.peers.numel(), lane.board, lane.channel, rank, lane.align,
        layout.NUM_EXPERTS // layout.WORLD, layout.NUM_EXPERTS % layout.WORLD,
        layout.first_expert(rank), layout.local_experts(rank),
        layout.num_rows(rank, lane.align), dtype_code(dtype), dtype_code(sum_dtype), *record, *total,
    )  # fmt: skip
    return np.array(numbers, np.int64)


# ---------------------------------------------------------------------------------------------------------------------
# In kernels


@device
def record_layout_of(lane):
    """Gives the codec's `Layout` of a dispatched record."""
    return lane[-12:-6]


@device
def sum_layout_of(lane):
    """Gives the codec's `Layout` of a sum."""
    return lane[-6:]


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
def senders(ids, lane, ranks):
    """Writes the rank that each of a token's sums comes from, ascending, and returns how many there are.

    There is one of each rank that owns one of its experts; with `invariant`, one for each expert. `ids` is the address
    of the token's int32 ids, any numbers, and `ranks` of `RANKS_BYTES` for int64.
    """
    count = 0
    for k in range(lane.top_k):
        owner = owner_of(load_int32(ids + 4 * k), lane)
        place = count
        while place > 0 and load_int64(ranks + 8 * (place - 1)) > owner:
            place -= 1
        known = place > 0 and load_int64(ranks + 8 * (place - 1)) == owner
        if owner < 0 or (known and not lane.invariant):
            continue
        for later in range(count, place, -1):
            store_int64(ranks + 8 * later, load_int64(ranks + 8 * (later - 1)))
        store_int64(ranks + 8 * place, owner)
        count += 1
    return count
