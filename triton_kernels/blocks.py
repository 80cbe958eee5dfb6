"""Blocks of 64 columns: how they are rotated, and cut into bit planes. `thinwire.wire` has the definitions.

A tile is in the shape that `tile_columns` gives it, [64 / WIDTH, blocks, WIDTH], of which a thread has whole blocks as
long as a program has a thread for each: no stage of a rotation and no plane takes anything from another thread, signs
are constants, and a rotation costs six additions a column.
"""

from __future__ import annotations

from thinwire.triton_kernels import hardware
from thinwire.triton_kernels.compat import tl, triton


@triton.jit
def _signed(x, LAYOUT: tl.constexpr):
    """x with the sign of each column's place in its block."""
    parts: tl.constexpr = 64 // LAYOUT.WIDTH
    column = tl.arange(0, parts)[:, None] * LAYOUT.WIDTH + tl.arange(0, LAYOUT.WIDTH)[None, :]
    odd = column & (column >> 1) & 0x15
    odd = odd ^ (odd >> 4)
    odd = (odd ^ (odd >> 2)) & 1
    return (x.to(tl.int32, bitcast=True) ^ (odd << 31)[:, None, :]).to(tl.float32, bitcast=True)


@triton.jit
def _stage(x, APART: tl.constexpr, ADD: tl.constexpr):
    """All pairs of elements that are so far apart in x, float32, as it lies in order: with ADD, sum and difference."""
    pairs = tl.permute(tl.reshape(x, (x.numel // (2 * APART), 2, APART)), (0, 2, 1))
    first, second = tl.split(pairs)
    if ADD:
        first, second = first + second, first - second
    return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), x.shape)


@triton.jit
def _stages(x, LAYOUT: tl.constexpr):
    for k in tl.static_range(6):
        # Columns that a load brings together lie side by side, others a row of all blocks apart.
        x = _stage(x, 1 << k if 1 << k < LAYOUT.WIDTH else LAYOUT.BLOCKS << k, True)
    # What was joined last is side by side in registers. Now four neighbours are, and words are packed of them: others
    # would have to be taken apart where they are stored. No instruction comes of this.
    for k in tl.static_range(2):
        x = _stage(x, 2 >> k, False)
    return x


@triton.jit
def rotated(x, LAYOUT: tl.constexpr):
    """A tile of a row, float32, as its scales and codes are made of it: unscaled, where the format rotates at all."""
    if LAYOUT.ROTATED:
        x = _stages(_signed(x, LAYOUT), LAYOUT)
    return x


@triton.jit
def rotated_back(y, LAYOUT: tl.constexpr):
    """A tile of a row, float32, of what a record encodes, or of the sum of several."""
    if LAYOUT.ROTATED:
        y = _signed(_stages(y, LAYOUT), LAYOUT)
    return y


@triton.jit
def _shifted(octets, UP: tl.constexpr):
    """Octets, int8, UP bits up, or down where that is negative; what is shifted in counts for nothing."""
    if hardware.capability() >= 80:
        return hardware.shifted(octets, UP) if UP != 0 else octets
    else:
        return octets << UP if UP > 0 else octets >> -UP


@triton.jit
def _selected(low, high, MASK: tl.constexpr):
    """The bits of `low` where MASK has ones, those of `high` elsewhere: octets, int8."""
    return hardware.selected(low, high, MASK) if hardware.capability() >= 80 else low & MASK | high & ~MASK


@triton.jit
def _halves(octets):
    """Octets, cut in two along the first axis."""
    halves = tl.reshape(octets, (2, octets.shape[0] // 2, octets.shape[1], octets.shape[2]))
    return tl.split(tl.permute(halves, (1, 2, 3, 0)))


@triton.jit
def _fold(octets, FIRST: tl.constexpr, SECOND: tl.constexpr, MASK: tl.constexpr):
    """The first half, shifted by FIRST, where MASK has ones; elsewhere the second, shifted by SECOND."""
    first, second = _halves(octets)
    return _selected(_shifted(first, FIRST), _shifted(second, SECOND), MASK)


@triton.jit
def nibble_plane(octets):
    """The low four bits of codes, int8 [parts, blocks, WIDTH]: int8 [parts / 2, blocks, WIDTH]."""
    return _fold(octets, 0, 4, 0x0F)


@triton.jit
def pair_plane(octets, PLACE: tl.constexpr):
    """Two bits of codes, from bit PLACE on, 0 or 4: int8 [parts / 4, blocks, WIDTH]."""
    return _fold(_fold(octets, -PLACE, 4 - PLACE, 0x0F), 0, 2, 0x33)


@triton.jit
def _joined(first, second, third, fourth):
    """Quarters of a tile, one behind the other along the first axis."""
    # Of float32, each in a register of its own: joined octets would have to be packed anew.
    quarters = tl.permute(tl.join(tl.join(first, second), tl.join(third, fourth)), (4, 3, 0, 1, 2))
    return tl.reshape(quarters, (4 * first.shape[0], first.shape[1], first.shape[2]))


@triton.jit
def _int6(octets):
    """Numbers of 6 bits, int8, to float32, exactly; the two bits above are whatever."""
    if hardware.capability() >= 80:
        return hardware.decode_octets(octets, 32)
    else:
        return (((octets & 63) ^ 32) - 32).to(tl.float32)


@triton.jit
def _int10(octets, pairs):
    """Numbers of 10 bits, the low 8 and the high 2 as int8, to float32; the bits above those are whatever."""
    if hardware.capability() >= 80:
        return hardware.decode_int10(octets, pairs)
    else:
        code = (octets.to(tl.int32) & 255) | ((pairs.to(tl.int32) & 3) << 8)
        return ((code ^ 512) - 512).to(tl.float32)


@triton.jit
def decode_int6(nibbles, pairs):
    """Both planes of int6 to float32 [parts, blocks, WIDTH]."""
    first, second = _halves(nibbles)
    return _joined(
        _int6(_selected(first, _shifted(pairs, 4), 0x0F)),
        _int6(_selected(second, _shifted(pairs, 2), 0x0F)),
        _int6(_selected(_shifted(first, -4), pairs, 0x0F)),
        _int6(_selected(_shifted(second, -4), _shifted(pairs, -2), 0x0F)),
    )


@triton.jit
def decode_int10(octets, pairs):
    """Both planes of int10 to float32 [parts, blocks, WIDTH]."""
    low, high = _halves(octets)
    first, second = _halves(low)
    third, fourth = _halves(high)
    return _joined(
        _int10(first, pairs),
        _int10(second, _shifted(pairs, -2)),
        _int10(third, _shifted(pairs, -4)),
        _int10(fourth, _shifted(pairs, -6)),
    )
