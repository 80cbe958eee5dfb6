"""The pieces of an all-to-all-v, each by one thread or, in a large call, by a team.

A large call's `move` runs in the thread that leads. It alone sends and receives by turns, looks at what peers publish,
and publishes; the others know nothing of the call but what is posted. For each piece it posts the parts, works with
them until all are done, and only then goes on to what says so: a tail, a head, a header. So what a flag covers is what
it covered before: the leading thread has read with acquire that everybody's stores (or loads, before a head) are done.
It waits for no thread that has not taken a part, and between pieces it leaves nothing under way: wherever `move`
returns, for Python's signal handlers too, the caller's memory is its own again.

Which thread does a part changes no bit: a part is whole rows, or bytes that are only copied.

*Why parts of a piece*, and not a thread for each peer: this way one segment has several threads too, however few ranks
there are, no flag has another writer, and a rank waits as before.
"""

from __future__ import annotations

import numpy as np

from thinwire.triton_kernels.cpu.compat import device, kernel
from thinwire.triton_kernels.cpu.ir.intrinsics import copy_bytes, load_int64, store_int64
from thinwire.triton_kernels.cpu.ir.streaming import stream_bytes
from thinwire.triton_kernels.cpu.pieces import STREAM_BYTES, P, pack_part, units_of, unpack_part
from thinwire.triton_kernels.cpu.team import JOB, claim, finish, post, rows_of_chunk, wait_for_team, wait_for_work

_LEAST_SHARED = 32 << 10  # bytes that lie in a slot: they take about as long as handing them over does

# What is posted: int64 words of the job.
_PACK, _UNPACK, _STRAIGHT = np.int64(0), np.int64(1), np.int64(2)
_KIND, _PEER, _NUMBER, _ADDRESS = (JOB + 8 * word for word in range(4))


@device
def units_of_piece(call, count, number):
    """Units of piece `number` of so many rows."""
    return min(call.units_per_piece, units_of(call, count) - number * call.units_per_piece)


@device
def is_shared(call, units):
    """Whether so many units are for a team."""
    return call.team != 0 and units * (1 if call.exact else call.record_bytes) >= _LEAST_SHARED


@device
def store_part(call, peers, peer, number, target, begin, end):
    """Stores bytes of an exact piece in their place in an output, at the address `target`."""
    units = units_of(call, peers[P.SEND_COUNT, peer])
    source = call.x + peers[P.SEND_DISPL, peer] * call.x_step + number * call.units_per_piece
    if units >= STREAM_BYTES:
        stream_bytes(target + begin, source + begin, end - begin)
    else:
        copy_bytes(target + begin, source + begin, end - begin)


@device
def do_part(call, peers, team, chunk):
    """A part of the piece that was posted last."""
    kind, peer, number = load_int64(team + _KIND), load_int64(team + _PEER), load_int64(team + _NUMBER)
    address = load_int64(team + _ADDRESS)
    count = peers[P.RECV_COUNT, peer] if kind == _UNPACK else peers[P.SEND_COUNT, peer]
    begin, end = rows_of_chunk(team, chunk, units_of_piece(call, count, number))
    if kind == _PACK:
        pack_part(call, peers, peer, number, address, begin, end)
    elif kind == _STRAIGHT:
        store_part(call, peers, peer, number, address, begin, end)
    else:
        unpack_part(call, peers, peer, number, address, begin, end)


@kernel
def share_piece(call, peers, kind, peer, number, address, units):
    """Does a piece with the team."""
    team = call.team
    store_int64(team + _KIND, kind)
    store_int64(team + _PEER, peer)
    store_int64(team + _NUMBER, number)
    store_int64(team + _ADDRESS, address)
    post(team, units)
    chunk = claim(team)
    while chunk >= 0:
        do_part(call, peers, team, chunk)
        finish(team)
        chunk = claim(team)
    wait_for_team(team)


@device
def help_with_pieces(call, peers, team):
    """What a thread of the team does that does not lead: parts, until it is dismissed."""
    while True:
        chunk = wait_for_work(team)
        if chunk < 0:
            return
        do_part(call, peers, team, chunk)
        finish(team)


# ---------------------------------------------------------------------------------------------------------------------
# Pieces


@device
def pack_piece(call, peers, peer, number, target):
    """Stores a piece of what goes to `peer` at the address `target`."""
    units = units_of_piece(call, peers[P.SEND_COUNT, peer], number)
    if is_shared(call, units):
        share_piece(call, peers, _PACK, peer, number, target, units)
    else:
        pack_part(call, peers, peer, number, target, np.int64(0), units)


@device
def unpack_piece(call, peers, peer, number, source):
    """Puts a piece of what came from `peer`, at the address `source`, into its rows of the output."""
    units = units_of_piece(call, peers[P.RECV_COUNT, peer], number)
    if is_shared(call, units):
        share_piece(call, peers, _UNPACK, peer, number, source, units)
    else:
        unpack_part(call, peers, peer, number, source, np.int64(0), units)


@device
def store_piece(call, peers, peer, number, target):
    """Stores a piece of exact rows where it belongs in the output of `peer`, at the address `target`."""
    units = units_of_piece(call, peers[P.SEND_COUNT, peer], number)
    if is_shared(call, units):
        share_piece(call, peers, _STRAIGHT, peer, number, target, units)
    else:
        store_part(call, peers, peer, number, target, np.int64(0), units)
