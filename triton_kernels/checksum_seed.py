"""Seeds of the sums of `thinwire.triton_kernels.checksum`, in plain Python: exchanging messages needs no kernels.

Source: splitmix64 is Vigna's, from Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

#: Bytes of a row's two sums.
CHECKSUM_BYTES = 16


def _signed(word: int) -> int:
    """The number of the same 64 bits that int64 holds."""
    return (word & 0xFFFFFFFFFFFFFFFF) - ((word & 0x8000000000000000) << 1)


#: splitmix64's: the step of its counter, and for each of its three stages the shift and the factor.
GOLDEN = _signed(0x9E3779B97F4A7C15)
STAGES = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))


def seed_of(*words: int) -> int:
    """One number, an int64, from several, such as a call's number and its sender's rank.

    >>> seed_of(1, 2) != seed_of(2, 1)
    True
    """
    seed = 0
    for word in words:
        z = (seed ^ word) + GOLDEN & 0xFFFFFFFFFFFFFFFF
        for shift, factor in STAGES:
            z = (z ^ z >> shift) * factor & 0xFFFFFFFFFFFFFFFF
        seed = z
    return _signed(seed)
