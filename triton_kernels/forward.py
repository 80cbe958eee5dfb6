"""What a rank of another host sent, to the ranks of this host: stored and signalled in that rank's name.

The message is what `send_tokens` left at its source, a header, ids, weights and records, as the network brought it. The
header has the words of a dispatch line: the epoch in place of the flag, which is published here as it came. So a source
that gave up, and sends its last message again, is missing here like one that does not answer.

No rank of another host stores sums here: that its line of the combine phase lacks nothing is noted at once, in this
rank's memory alone. What it says of the round's end comes over the network, later.
"""

from __future__ import annotations

import torch

from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.dispatch import PLANE_TOKENS, is_near, owner_of, send_record, store_plane
from thinwire.triton_kernels.launch import Launcher, kept, launcher_of
from thinwire.triton_kernels.record import RecordLayout
from thinwire.triton_kernels.round_layout import Lane
from thinwire.triton_kernels.signal import (
    arrive,
    most_programs,
    publish,
    register_limit,
    signal_words,
    store_signal_words,
)
from thinwire.wire import WireFormat


@triton.jit(do_not_specialize=["source", "rank"])
def forward_tokens_kernel(
    message_in_ptr,  # int8, as RoundLayout has its offsets
    source,
    buffer_ptr,
    buffer_ptrs,
    control_ptr,
    rank,
    ROUND: tl.constexpr,
    LAYOUT: tl.constexpr,  # of a record as words, which are stored as they are
    PLANE_TOKENS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Planes and records to the host's ranks, then the signal. Any number of programs."""
    if tl.load(control_ptr + ROUND.STATUS) == ROUND.RUNNING:
        message = message_in_ptr.to(tl.int64)
        header = message.to(tl.pointer_type(tl.int32))
        told = tl.load(header + ROUND.TOKENS)
        num_tokens = tl.minimum(tl.maximum(told, 0), ROUND.MAX_TOKENS)  # whatever a peer says
        ids_ptr = (message + ROUND.MESSAGE_IDS).to(tl.pointer_type(tl.int32))
        weights_ptr = (message + ROUND.MESSAGE_WEIGHTS).to(tl.pointer_type(tl.float32))
        ks = tl.arange(0, K_BLOCK)
        start = tl.program_id(0) * PLANE_TOKENS
        while start < num_tokens:
            tokens = start + tl.arange(0, PLANE_TOKENS)
            mask = tl.where(ks[None, :] < ROUND.TOP_K, tokens[:, None] < num_tokens, False)
            entries = tokens[:, None].to(tl.int64) * ROUND.TOP_K + ks[None, :]
            ids = tl.load(ids_ptr + entries, mask=mask, other=-1)
            weights = tl.load(weights_ptr + entries, mask=mask, other=0.0)
            store_plane(ids, weights, entries, mask, buffer_ptrs, rank, source, ROUND)
            start += tl.num_programs(0) * PLANE_TOKENS
        token = tl.num_programs(0) - 1 - tl.program_id(0)
        while token < num_tokens:
            ids = tl.load(ids_ptr + token.to(tl.int64) * ROUND.TOP_K + ks, mask=ks < ROUND.TOP_K, other=-1)
            owners = owner_of(ids, ROUND)
            owners = tl.where(is_near(owners, rank, ROUND), owners, -1)
            slot = source.to(tl.int64) * ROUND.MAX_TOKENS + token
            record = message + ROUND.MESSAGE_RECORDS + token.to(tl.int64) * LAYOUT.ROW_BYTES
            row = tl.multiple_of(record.to(tl.pointer_type(LAYOUT.DTYPE)), 16)
            send_record(row, buffer_ptrs, rank, slot, owners, None, ROUND, LAYOUT)
            token += tl.num_programs(0)
        if arrive(control_ptr, ROUND, LAUNCH):
            lines: tl.constexpr = ROUND.COMBINE_SIGNALS
            peers = tl.arange(0, LAUNCH.BLOCK)
            far = tl.where(peers < ROUND.WORLD, is_near(peers, rank, ROUND) == 0, False)
            own, epoch = tl.load(control_ptr + ROUND.EPOCH), tl.load(header)
            base = buffer_ptr.to(tl.int64)
            tl.store(signal_words(base, lines, ROUND.END, peers, ROUND), ROUND.WITH_SUMS, mask=far)
            tl.store(signal_words(base, lines, 0, peers, ROUND), own, mask=far)
            store_signal_words(buffer_ptrs, source, ROUND.SIGNALS, ROUND.TOKENS, told, ROUND, LAUNCH)
            dtype = tl.load(header + ROUND.DTYPE)
            store_signal_words(buffer_ptrs, source, ROUND.SIGNALS, ROUND.DTYPE, dtype, ROUND, LAUNCH)
            publish(buffer_ptrs, source, ROUND.SIGNALS, epoch, ROUND, LAUNCH)


def forward_tokens(
    lane: Lane, message: torch.Tensor, source: int, dtype: torch.dtype, num_programs: int | None = None
) -> None:
    """Stores what came from a rank of another host at this host's ranks, and signals them in its name.

    Args:
        lane: this rank's, on which it sends its own tokens of the round before.
        message: int8 [bytes], contiguous, from 16 bytes on; what that rank's `send_tokens` left in its lane's.
        source: that rank.
        dtype: the tokens', which the size of a record follows from.
        num_programs: programs of the launch; None means enough to fill the GPU.
    """
    launch, most = kept(lane, _forwarding, dtype, num_programs)
    launch(max(1, min(lane.layout.MAX_TOKENS, most)), 1, (message,), (), (source,))


def _forwarding(lane: Lane, dtype: torch.dtype, num_programs: int | None) -> tuple[Launcher, int]:
    words = lane.wire.row_bytes(lane.layout.HIDDEN, dtype) // 4
    assert 4 * words <= lane.layout.RECORD_BYTES, (dtype, lane.wire)
    layout, device = RecordLayout.of(WireFormat.parse("none"), words, torch.float32), lane.buffer.device
    launch = launcher_of(
        lane, forward_tokens_kernel, {"LAYOUT": layout, "PLANE_TOKENS": PLANE_TOKENS}, ("message_in_ptr",), (),
        ("source",), num_warps=layout.num_warps, enable_fp_fusion=False, **register_limit(device, least=128),
    )  # fmt: skip
    return launch, most_programs(device, num_programs)
