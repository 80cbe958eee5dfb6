"""Random records, routing and weights for products of experts, and the comparison of one backend with plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tests.helpers.wires import assert_same_bits, magnitudes
from thinwire.triton_kernels.codec_reference import quantize_reference
from thinwire.triton_kernels.expert_gemm import INNER_WIRE, expert_gemm_reference
from thinwire.triton_kernels.int8_weights import Int8Weights
from thinwire.wire import WireFormat

#: Wire, inward, outward, counts of each expert, alignment.
CASES: tuple[tuple[str, int, int, tuple[int, ...], int], ...] = (
    ("int8", 200, 72, (3, 0, 17, 1), 4),
    ("int8", 256, 130, (70, 2), 1),
    ("int8:32", 100, 64, (0, 5), 8),
    ("int8:256", 300, 5, (1, 1, 1), 1),
    ("int8:row", 150, 150, (20, 4), 1),
    ("int8:64", 65, 1, (), 1),
)


def make_rows(
    wire: WireFormat, hidden: int, counts: Sequence[int], align: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Records (one of NaN, and hostile ones that nobody names), an index with padding and bad entries, and offsets."""
    generator = torch.Generator().manual_seed(seed)
    x = magnitudes(11, hidden, torch.bfloat16, generator)
    x = torch.where(x.isfinite() & (x.abs() < 1e4), x, 1.0)
    x[5, hidden // 2] = torch.nan
    records = torch.randint(0, 256, (13, wire.row_bytes(hidden) + 32), dtype=torch.uint8, generator=generator)
    records = records[:, : wire.row_bytes(hidden)]
    records[:11] = quantize_reference(x, wire)
    index, offsets = [], [0]
    for count in counts:
        index += torch.randint(0, 11, (count,), generator=generator).tolist() + [-1] * (-count % align)
        offsets.append(len(index))
    index += [-1, 3, -1]  # behind the last expert
    if index[0] >= 0 and counts[0] > 1:
        index[1] = 2**40
    return records, torch.tensor(index), torch.tensor(offsets)


def make_weights(inward: int, outward: int, experts: int, gated: bool, activate: bool = False) -> Int8Weights:
    generator = torch.Generator().manual_seed(inward)
    w = torch.randn(experts, inward, outward, generator=generator) / inward**0.5
    gate = torch.randn(experts, inward, outward, generator=generator) / inward**0.5 if gated else None
    if experts:
        w[0, :, 0] = 0  # a channel without a scale
    return Int8Weights.of(w, gate, activate=activate)


def check_products(
    expert_gemm: Callable[..., None], cases: Sequence[tuple[str, int, int, tuple[int, ...], int]]
) -> None:
    """Every variant of a product against plain torch, to the last bit, and that rows behind the last are left."""
    for spec, inward, outward, counts, align in cases:
        wire = WireFormat.parse(spec)
        records, index, offsets = make_rows(wire, inward, counts, align)
        for gated, activate, dtype in (
            (False, False, torch.float32),
            (True, False, torch.bfloat16),
            (False, True, torch.float16),
        ):
            weights = make_weights(inward, outward, len(counts), gated, activate)
            whole = torch.full((len(index), outward + 3), 7.0, dtype=dtype)
            got, want = whole[:, :outward], torch.full((len(index), outward), 7.0, dtype=dtype)
            expert_gemm(records, wire, index, offsets, weights, got)
            expert_gemm_reference(records, wire, index, offsets, weights, want)
            assert_same_bits(f"{spec} {inward} -> {outward}, gated {gated}, SiLU {activate}", want, got)
            assert (whole[:, outward:] == 7.0).all(), "elements behind a row were written"
            assert (got[int(offsets[-1]) :] == 7.0).all(), "rows behind the last expert's were written"
            if not (gated or activate):
                continue
            inner = torch.full((len(index), INNER_WIRE.row_bytes(outward)), 0xAB, dtype=torch.uint8)
            expected = inner.clone()
            expert_gemm(records, wire, index, offsets, weights, inner, INNER_WIRE)
            expert_gemm_reference(records, wire, index, offsets, weights, expected, INNER_WIRE)
            meant = INNER_WIRE.scales_offset(outward) + 2 * INNER_WIRE.num_groups(outward)
            assert torch.equal(inner[:, :meant], expected[:, :meant]), f"records of {spec} {inward} -> {outward}"
            back = make_weights(outward, inward, len(counts), False)
            got, want = torch.full((2, len(index), inward), 7.0)
            expert_gemm(inner, INNER_WIRE, None, offsets, back, got)
            expert_gemm_reference(expected, INNER_WIRE, None, offsets, back, want)
            assert_same_bits(f"{spec}: the second product", want, got)
