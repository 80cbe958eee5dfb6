"""How kernels reach another rank's memory: where it is, and the one way in which something is stored there.

Every rank maps all ranks' buffers, so to put is to store. A kernel that takes in what came reads its own rank's buffer,
which is found in the same way. Flags are the exception, see `store_released` in `thinwire.triton_kernels.signal`: they
are stored in release order.
"""

from __future__ import annotations

from thinwire.triton_kernels.compat import tl, triton


@triton.jit
def base_of(buffer_ptrs, rank, known=None):
    """The address of a rank's buffer, int64; or those of a vector of ranks, 0 where they are not `known`."""
    if known is None:
        base = tl.load(buffer_ptrs + rank)
    else:
        base = tl.load(buffer_ptrs + rank, mask=known, other=0)
    return base


@triton.jit
def record_at(address):
    """The record at an address, which is on a 16-byte boundary, as int8."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int8)), 16)


@triton.jit
def put(pointers, values, mask):
    """Stores `values` where `pointers`, of any rank's buffer, point to."""
    tl.store(pointers, values, mask=mask)
