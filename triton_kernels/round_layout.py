"""What lies where in the memory of one lane: what peers store into, and what a rank keeps for itself.

Every rank of a group has one symmetric buffer a lane, with the same offsets everywhere::

    [ stuck lines ][ dispatch lines ][ combine lines ][ expert ids ][ router weights ][ records ][ sums ]

and behind all that, on a lane of backward, [ gradients of router weights ].

A *line* is 64 bytes that one peer writes: a flag, and behind it what the flag publishes. What a peer writes lies at
that peer's own place, so no two ranks ever write the same byte. `docs/protocol.md` says when each is written and read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.errors import RoutingError
from thinwire.triton_kernels.end import End, new_words, report_words
from thinwire.triton_kernels.signal import CONTROL_WORDS, SIGNAL_LINE_BYTES, SignalLayout
from thinwire.wire import WireFormat

_ALIGNMENT = 128

# Phases of a round, in the order in which they are signalled.
DISPATCH, COMBINE = 0, 1

# int32 words of a line, behind its flag.
SIGNAL_TOKENS, SIGNAL_DTYPE = 1, 2  # of a dispatch line: how many tokens the source has, and their dtype and tag
REFUSED = -(2**31)  # for a number of tokens: the source was given some that it cannot send, and raised
SIGNAL_END = 1  # of a combine line: how the source ended the round, one of the three that follow
ABANDONED, WITH_SUMS, LEFT_OPEN = range(3)  # the last: a later dispatch closed it, so its sums are missing

# Words of a lane's control block and of its report, beside those of `thinwire.triton_kernels.signal`.
CONTROL_TOKENS, CONTROL_ROWS = 3, 4  # how much of positions and index the last routing left filled
CONTROL_LEFT_OPEN = 5  # of Triton's kernels: as REPORT_LEFT_OPEN, of the last round
REPORT_BAD_IDS = 3
REPORT_LEFT_OPEN = 7  # 1 + a rank that left open the round that this one has combined, or 0

# What the kernels call a row's dtype.
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
DTYPE_BITS = 2  # of a dispatch line's word; above them is the tag, which ranks must agree on, too


#: Shape, dtype and first value of tensors, by their names.
Tensors = dict[str, tuple[tuple[int, ...], torch.dtype, int]]


def aligned(offset: int) -> int:
    """The next offset at which a part of a lane's memory may begin."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def filled(tensors: Tensors, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Allocates tensors and fills them with their first value."""
    return {
        name: torch.full(shape, value, dtype=dtype, device=device) for name, (shape, dtype, value) in tensors.items()
    }


def bytes_of(tensors: Tensors) -> int:
    """What `filled` allocates."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype, _ in tensors.values())


class ExpertRows:
    """Which experts a rank owns, and what routing writes there: the same of every layout of a lane."""

    WORLD: int
    NUM_EXPERTS: int
    TOP_K: int
    MAX_TOKENS: int

    def first_expert(self, rank: int) -> int:
        """The first expert of a rank; the first `NUM_EXPERTS % WORLD` ranks own one more than the others."""
        return rank * (self.NUM_EXPERTS // self.WORLD) + min(rank, self.NUM_EXPERTS % self.WORLD)

    def local_experts(self, rank: int) -> int:
        """How many experts a rank owns."""
        return self.first_expert(rank + 1) - self.first_expert(rank)

    def num_rows(self, rank: int, align: int) -> int:
        """The most rows that a rank's experts can be given, padding included."""
        local = self.local_experts(rank)
        return self.WORLD * self.MAX_TOKENS * min(self.TOP_K, local) + local * (align - 1)

    def routed(self, rank: int, align: int) -> Tensors:
        """What routing writes at a rank."""
        local, slots = self.local_experts(rank), self.WORLD * self.MAX_TOKENS
        return {
            "index": ((self.num_rows(rank, align),), torch.int64, -1),
            "expert_counts": ((local,), torch.int64, 0),
            "expert_offsets": ((local + 1,), torch.int64, 0),
            "positions": ((slots, self.TOP_K), torch.int64, -1),
            "weights": ((slots, self.TOP_K), torch.float32, 0),
        }


@dataclass(frozen=True)
class RoundLayout(ExpertRows, SignalLayout):
    """Sizes and byte offsets of one lane's symmetric buffer; kernels get it whole, as one compile-time constant.

    The slot of a record at its receiver is its token's index at the sender: [world][max_tokens] records. A sum comes
    home to [max_tokens][SLOTS], the place in a token's row being the sender's ordinal among the ranks that the token
    went to. With INVARIANT each expert's row is a sum of its own, and the place is the expert's ordinal among the
    token's, in ascending id.
    """

    NUM_EXPERTS: int
    TOP_K: int
    HIDDEN: int
    MAX_TOKENS: int
    SLOTS: int  # sums that a token can get: a rank's each, or an expert's
    RECORD_BYTES: int  # from one dispatched record to the next
    SUM_BYTES: int  # from one combined record to the next
    SIGNALS: int  # byte offsets from here on: of the dispatch lines
    COMBINE_SIGNALS: int
    IDS: int  # int32 [world][max_tokens][top_k]
    WEIGHTS: int  # float32, the same shape
    RECORDS: int
    SUMS: int
    NUM_BYTES: int
    INVARIANT: bool = False
    WEIGHT_GRADS: int = 0  # byte offset of float32 [max_tokens][top_k] at home, or 0: none travel
    MEMBERS: int = 0  # of Triton's kernels: ranks of each of several hosts, one behind the other; 0: there is one host
    TOKENS: int = SIGNAL_TOKENS
    DTYPE: int = SIGNAL_DTYPE
    END: int = SIGNAL_END
    WITH_SUMS: int = WITH_SUMS
    LEFT_OPEN: int = LEFT_OPEN
    ROUTED_TOKENS: int = CONTROL_TOKENS
    ROUTED_ROWS: int = CONTROL_ROWS
    CONTROL_LEFT_OPEN: int = CONTROL_LEFT_OPEN
    BAD_IDS: int = REPORT_BAD_IDS
    REPORT_LEFT_OPEN: int = REPORT_LEFT_OPEN

    __hash__ = SignalLayout.__hash__

    @classmethod
    def of(
        cls,
        *,
        world: int,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        wire: WireFormat,
        combine_wire: WireFormat,
        dtype: torch.dtype | None = None,
        weight_grads: bool = False,
        invariant: bool = False,
    ) -> RoundLayout:
        """The layout, before anything is allocated.

        Args:
            dtype: the tokens'; None leaves room for float32. Only used for the wire format `none`.
            weight_grads: whether gradients of router weights come home with the sums.
            invariant: whether a sum is one expert's row, on lanes without `weight_grads`.

        >>> wire = WireFormat.parse("int8")
        >>> layout = RoundLayout.of(
        ...     world=8, num_experts=256, top_k=8, hidden=7168, max_tokens=128, wire=wire, combine_wire=wire
        ... )
        >>> layout.RECORD_BYTES, layout.NUM_BYTES
        (7296, 15009280)
        """
        assert not (invariant and weight_grads)
        slots = top_k if invariant else min(top_k, world)
        record_bytes = wire.row_bytes(hidden, dtype or torch.float32)
        sum_bytes = combine_wire.row_bytes(hidden, dtype or torch.float32)
        plane = world * max_tokens * top_k * 4
        stuck = 0
        signals = stuck + world * SIGNAL_LINE_BYTES
        ids = aligned(signals + 2 * world * SIGNAL_LINE_BYTES)
        weights = aligned(ids + plane)
        records = aligned(weights + plane)
        sums = aligned(records + world * max_tokens * record_bytes)
        grads = aligned(sums + max_tokens * slots * sum_bytes)
        return cls(
            WORLD=world,
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            HIDDEN=hidden,
            MAX_TOKENS=max_tokens,
            SLOTS=slots,
            RECORD_BYTES=record_bytes,
            SUM_BYTES=sum_bytes,
            STUCK=stuck,
            SIGNALS=signals,
            COMBINE_SIGNALS=signals + world * SIGNAL_LINE_BYTES,
            IDS=ids,
            WEIGHTS=weights,
            RECORDS=records,
            SUMS=sums,
            NUM_BYTES=aligned(grads + max_tokens * top_k * 4) if weight_grads else grads,
            INVARIANT=invariant,
            WEIGHT_GRADS=grads if weight_grads else 0,
        )

    # Byte offsets in the message of all of a rank's tokens to other hosts, behind the words of a dispatch line: ids
    # and weights [max_tokens][top_k], and records, one behind the other.

    @property
    def MESSAGE_IDS(self) -> int:  # named as kernels have it
        return _ALIGNMENT

    @property
    def MESSAGE_WEIGHTS(self) -> int:
        return self.MESSAGE_IDS + self.MAX_TOKENS * self.TOP_K * 4

    @property
    def MESSAGE_RECORDS(self) -> int:
        return aligned(self.MESSAGE_WEIGHTS + self.MAX_TOKENS * self.TOP_K * 4)

    @property
    def chunk(self) -> int:
        """Tokens, of one source, that one program routes: so many that few tokens still have many programs."""
        return 16 if self.WORLD * self.MAX_TOKENS <= 4096 else 64


@dataclass(frozen=True)
class Lane(End):
    """One rank's end of a lane.

    Attributes:
        wire, combine_wire: formats of the two legs.
        align: every expert's rows begin at a multiple of this.
        index: int64 [num_rows], the record of each expert-sorted row, -1 for padding and behind the last row.
        expert_counts: int64 [local experts], rows of each expert, without padding.
        expert_offsets: int64 [local experts + 1], where each expert's rows begin, with padding.
        positions: int64 [world * max_tokens, top_k], the rows of each record in ascending expert id, -1 behind them.
        weights: float32 [world * max_tokens, top_k], their router weights.
        scratch: int32 [chunks, local experts], what routing notes for itself.
        home_ptrs: int64 [world], where each rank's sums come home: an address from which SUMS and WEIGHT_GRADS count.
            It is `buffer_ptrs`, where they come home to the rank itself.
        message: int8 [bytes], what other hosts get of Triton's kernels, if there are any.
    """

    layout: RoundLayout
    wire: WireFormat
    combine_wire: WireFormat
    align: int
    index: torch.Tensor
    expert_counts: torch.Tensor
    expert_offsets: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor
    scratch: torch.Tensor
    home_ptrs: torch.Tensor
    message: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        layout: RoundLayout,
        wire: WireFormat,
        combine_wire: WireFormat,
        rank: int,
        align: int,
        buffer: torch.Tensor,
        buffer_ptrs: torch.Tensor,
    ) -> Lane:
        """A lane over a symmetric buffer; all else is allocated here, on the buffer's device."""
        device = buffer.device
        beside: dict[str, Any] = filled(cls._tensors_beside(layout, rank, align), device)
        return cls(
            layout=layout,
            wire=wire,
            combine_wire=combine_wire,
            rank=rank,
            align=align,
            buffer=buffer,
            buffer_ptrs=buffer_ptrs,
            home_ptrs=buffer_ptrs,
            **(new_words(layout.WORLD, device) | beside),
        )

    def arguments(self) -> dict[str, Any]:
        """See `End`."""
        return super().arguments() | {
            "home_ptrs": self.home_ptrs,
            "message_ptr": self.message,
            "index_ptr": self.index,
            "num_rows": self.index.shape[0],
            "expert_counts_ptr": self.expert_counts,
            "expert_offsets_ptr": self.expert_offsets,
            "first_expert": self.layout.first_expert(self.rank),
            "num_local": self.expert_counts.shape[0],
            "positions_ptr": self.positions,
            "weights_ptr": self.weights,
            "scratch_ptr": self.scratch,
            "ROUND": self.layout,
            "CHUNK": self.layout.chunk,
            "ALIGN": self.align,
            "K_BLOCK": 1 << max(0, self.layout.TOP_K - 1).bit_length(),  # lanes of a vector of a token's experts
        }

    @classmethod
    def _tensors_beside(cls, layout: RoundLayout, rank: int, align: int) -> Tensors:
        """What is allocated on the buffer's device."""
        chunks = layout.WORLD * -(-layout.MAX_TOKENS // layout.chunk)
        return layout.routed(rank, align) | {"scratch": ((chunks, layout.local_experts(rank)), torch.int32, 0)}

    @classmethod
    def bytes_beside(cls, layout: RoundLayout, rank: int, align: int) -> int:
        """What `of` allocates beside the symmetric buffer, and the addresses of all ranks' that it was given.

        >>> wire = WireFormat.parse("int8")
        >>> layout = RoundLayout.of(
        ...     world=8, num_experts=256, top_k=8, hidden=7168, max_tokens=128, wire=wire, combine_wire=wire
        ... )
        >>> Lane.bytes_beside(layout, rank=0, align=1)
        172808
        """
        given = (CONTROL_WORDS + report_words(layout.WORLD)) * torch.int32.itemsize
        given += layout.WORLD * torch.int64.itemsize
        return given + bytes_of(cls._tensors_beside(layout, rank, align))

    @property
    def records(self) -> torch.Tensor:
        """uint8 [world * max_tokens, RECORD_BYTES], the slots that peers store records into."""
        layout = self.layout
        size = layout.WORLD * layout.MAX_TOKENS * layout.RECORD_BYTES
        return self.buffer[layout.RECORDS : layout.RECORDS + size].view(-1, layout.RECORD_BYTES)

    @property
    def weight_grads(self) -> torch.Tensor:
        """float32 [max_tokens, top_k], which each expert's rank stores into for its own; only if the layout has it."""
        layout = self.layout
        size = 4 * layout.MAX_TOKENS * layout.TOP_K
        plane = self.buffer[layout.WEIGHT_GRADS : layout.WEIGHT_GRADS + size]
        return plane.view(torch.float32).view(-1, layout.TOP_K)

    @property
    def memory_bytes(self) -> int:
        """All that the lane holds; what launchers set aside for kernels in `kept` is not among it."""
        held = {id(value): value for value in vars(self).values() if isinstance(value, torch.Tensor)}
        return sum(value.numel() * value.itemsize for value in held.values())


def check_weight_grads(lane: Lane, weight_grads: torch.Tensor | None) -> torch.Tensor | None:
    """`weight_grads`, contiguous, if they are what a lane carries.

    Raises:
        RoutingError: they are not.
    """
    shape = lane.weights.shape if lane.layout.WEIGHT_GRADS else None
    if weight_grads is None and shape is None:
        return None
    if weight_grads is None or weight_grads.shape != shape or weight_grads.dtype != torch.float32:
        given = None if weight_grads is None else f"{weight_grads.dtype} {tuple(weight_grads.shape)}"
        accepted = f"torch.float32 {tuple(shape)}" if shape else "None, as this lane carries none"
        raise RoutingError(f"weight_grads is {given}; accepted: {accepted}")
    return weight_grads.contiguous()


def check_home_grads(lane: Lane, out: torch.Tensor, weight_grads: torch.Tensor | None) -> torch.Tensor | None:
    """`weight_grads`, if that is what `sum_home` fills beside `out` on a lane.

    Raises:
        RoutingError: it is not.
    """
    shape = (len(out), lane.layout.TOP_K) if lane.layout.WEIGHT_GRADS else None
    if weight_grads is None and shape is None:
        return None
    fits = weight_grads is not None and weight_grads.dtype == torch.float32 and weight_grads.is_contiguous()
    if weight_grads is None or not fits or weight_grads.shape != shape:
        given = None if weight_grads is None else f"{weight_grads.dtype} {tuple(weight_grads.shape)}"
        accepted = f"contiguous torch.float32 {shape}" if shape else "None, as this lane carries none"
        raise RoutingError(f"weight_grads is {given}; accepted: {accepted}")
    return weight_grads
