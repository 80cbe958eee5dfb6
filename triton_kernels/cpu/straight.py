"""Exact rows of an all-to-all-v straight into the receivers' outputs, where these lie in memory of `thinwire.empty`.

A *region* is one symmetric allocation of that function; its number is the same on all ranks. `docs/protocol.md`,
"Straight into the output", has the argument. What it takes lies in lines of all-to-all-v, behind their flags:

    head of p at q    int64 words 1 to 3: where the rows that q sends to p may be stored, as a region, an offset in p's
                      memory of it, and bytes; region 0: nowhere
    tail of q at p    int64 word 1: which of the pieces that q has ever put into its ring at p stands for rows that were
                      stored straight; int32 word 4: how many pieces q has ever stored straight at p, which says that it
                      is there, and nothing of the rows
"""

from __future__ import annotations

import numpy as np

from thinwire.triton_kernels.cpu.compat import device, kernel
from thinwire.triton_kernels.cpu.ir.atomics import load_acquire, store_release
from thinwire.triton_kernels.cpu.ir.intrinsics import load_int64, store_int64
from thinwire.triton_kernels.cpu.piece_team import store_piece
from thinwire.triton_kernels.cpu.pieces import P, units_of
from thinwire.triton_kernels.cpu.signal import own_line

#: Words of a region in the host's table: its number, its bytes on each rank, and from here on each rank's address.
REGION_NUMBER, REGION_BYTES, REGION_PTRS = 0, 1, 2

_HEAD_REGION, _HEAD_OFFSET, _HEAD_BYTES = 8, 16, 24  # byte offsets in a line
_TAIL_PIECE, _TAIL_STORED = 8, 16


@device
def region_at(call, index):
    """The address of a region's words."""
    return call.regions + 8 * index * (REGION_PTRS + call.world)


@device
def stored_by(peers, peer):
    """How many pieces a peer says that it has ever stored straight."""
    return np.int64(load_acquire(peers[P.TAIL_HERE, peer] + _TAIL_STORED))


@kernel
def tell_places(call, peers):
    """Tells every peer where its rows of this call may be stored, or that they may not; before the header does."""
    number, before = np.int64(0), np.int64(0)
    for index in range(call.num_regions):
        region = region_at(call, index)
        offset = call.out - load_int64(region + 8 * (REGION_PTRS + call.rank))
        if call.exact and 0 <= offset < load_int64(region + 8 * REGION_BYTES):
            number, before = load_int64(region + 8 * REGION_NUMBER), offset
    for peer in range(call.world):
        line, count = peers[P.HEAD_THERE, peer], peers[P.RECV_COUNT, peer]
        told = number != 0 and peer != call.rank and count > 0 and units_of(call, count) > call.units_per_piece
        peers[P.TOLD, peer], peers[P.PLACE, peer], peers[P.SEEN_STORED, peer] = told, 0, stored_by(peers, peer)
        store_int64(line + _HEAD_REGION, number if told else np.int64(0))
        store_int64(line + _HEAD_OFFSET, before + peers[P.RECV_DISPL, peer] * call.out_step)
        store_int64(line + _HEAD_BYTES, units_of(call, count))


@kernel
def read_place(call, peers, peer):
    """Notes where a peer, whose header is there, wants the rows that this rank sends it: 0 for in its ring.

    What cannot be such a place is none. Each word is read once: what follows from it shall not change with it.
    """
    line, size = peers[P.HEAD_HERE, peer], units_of(call, peers[P.SEND_COUNT, peer])
    number, offset = load_int64(line + _HEAD_REGION), load_int64(line + _HEAD_OFFSET)
    if number == 0 or not call.exact or load_int64(line + _HEAD_BYTES) != size:
        return
    for index in range(call.num_regions):
        region = region_at(call, index)
        if number == load_int64(region + 8 * REGION_NUMBER):
            if 0 <= offset <= load_int64(region + 8 * REGION_BYTES) - size:
                peers[P.PLACE, peer] = load_int64(region + 8 * (REGION_PTRS + peer)) + offset


@device
def place_is_gone(call, peers, peer):
    """Whether a peer that told a place has given up since: its output is its user's again."""
    return peers[P.PLACE, peer] != 0 and load_acquire(own_line(call, call.stuck, peer)) != 0


@device
def store_straight(call, peers, peer, number):
    """Stores a piece of what goes to `peer` where it told, and says that this rank has come so far."""
    store_piece(call, peers, peer, number, peers[P.PLACE, peer] + number * call.units_per_piece)
    peers[P.STORED, peer] += 1
    store_release(peers[P.TAIL_THERE, peer] + _TAIL_STORED, np.int32(peers[P.STORED, peer]))


@device
def mark_straight(peers, peer, piece):
    """Says that the ring's piece of this number, counted from 1, stands for what was stored straight."""
    store_int64(peers[P.TAIL_THERE, peer] + _TAIL_PIECE, piece)


@device
def came_straight(peers, peer, piece):
    """Whether the ring's piece of this number stands for what the peer stored straight, and may have."""
    if peers[P.TOLD, peer] == 0 or load_int64(peers[P.TAIL_HERE, peer] + _TAIL_PIECE) != piece:
        return False
    peers[P.STRAIGHT, peer] += 1
    return True


@device
def stores_meanwhile(peers, peer):
    """Whether a peer that was told a place has stored more pieces there than at the last look."""
    return peers[P.TOLD, peer] != 0 and stored_by(peers, peer) != peers[P.SEEN_STORED, peer]


@device
def look_at_stores(peers, peer):
    """Begins the peer's time anew if it has stored more since the last look."""
    if stores_meanwhile(peers, peer):
        peers[P.SEEN_STORED, peer], peers[P.LIMIT, peer] = stored_by(peers, peer), 0
