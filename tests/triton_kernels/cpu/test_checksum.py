"""The sums of rows on the CPU: those of the plain-torch reference, and what they see."""

from __future__ import annotations

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.triton_kernels.checksum import row_checksums_reference
from thinwire.triton_kernels.checksum_seed import seed_of
from thinwire.triton_kernels.cpu.checksum import row_checksums

POISON = 7


def checked(data: torch.Tensor, row_bytes: int, seed: int, first: int) -> torch.Tensor:
    """The sums, after checking that nothing else was written."""
    rows = -(-data.numel() // row_bytes)
    memory = torch.full((rows + 1, 2), POISON)
    row_checksums(data, row_bytes, seed, first, memory[:rows])
    assert (memory[rows] == POISON).all()
    return memory[:rows]


def octets(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 3000), st.integers(1, 1500), st.integers(0, 7), st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**40),
)  # fmt: skip
def test_the_sums_equal_the_reference(count: int, row_bytes: int, offset: int, seed: int, first: int) -> None:
    data = octets(count + offset, count)[offset:]
    assert torch.equal(checked(data, row_bytes, seed, first), row_checksums_reference(data, row_bytes, seed, first))


def test_the_sums_are_what_the_docstring_says() -> None:
    data, seed, mask = octets(41), seed_of(3, 1), (1 << 64) - 1
    words = [int.from_bytes(bytes(data[8 * i : 8 * i + 8].tolist()), "little") for i in range(6)]
    a, b = (number & mask for number in row_checksums_reference(data, 41, seed, 9)[0].tolist())
    s = seed_of(seed ^ 9) & mask | 1
    t = seed_of(s - (s >> 63 << 64)) & mask
    assert a == sum(words) + s & mask
    assert b == sum((i + 1) * word for i, word in enumerate(words)) + t & mask


def test_splitmix64_is_splitmix64() -> None:
    # The first outputs of the generator that begins with 0, by its author's program.
    golden, first = 0x9E3779B97F4A7C15, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    for number, expected in enumerate(first):
        state = golden * number & (1 << 64) - 1
        assert seed_of(state - (state >> 63 << 64)) & (1 << 64) - 1 == expected


def test_every_single_bit_and_every_pair_of_words_that_change_places_is_seen() -> None:
    data = octets(96, 5)
    good = checked(data, 96, 1, 0)
    for bit in range(96 * 8):
        changed = data.clone()
        changed[bit // 8] ^= 1 << bit % 8
        assert not torch.equal(checked(changed, 96, 1, 0), good), bit
    for first in range(12):
        for second in range(first):
            changed = data.view(12, 8).clone()
            changed[[first, second]] = changed[[second, first]]
            assert not torch.equal(checked(changed.view(-1), 96, 1, 0), good), (first, second)


def test_zeroed_memory_and_other_places_do_not_fit() -> None:
    zeros = torch.zeros(64 * 50, dtype=torch.uint8)
    sums = [checked(zeros, 64, seed_of(call, source), 0) for call in range(20) for source in range(4)]
    stacked = torch.cat(sums)
    assert (stacked[:, 0] != 0).all()
    assert len(stacked.unique(dim=0)) == len(stacked) == 20 * 4 * 50
