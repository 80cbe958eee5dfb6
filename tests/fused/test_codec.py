"""The codec's promises, held on the backend that CPU users get; all backends are equal to the last bit."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.wires import DTYPES, WIRES, assert_same_bits, magnitudes, relative_error
from thinwire.errors import TransportUnavailable, WireFormatError
from thinwire.fused import backend
from thinwire.fused.codec import dequantize, quantize
from thinwire.triton_kernels.codec_reference import (
    dequantize_reference,
    quantize_reference,
    rotated_reference,
    scaled_reference,
)
from thinwire.wire import WireFormat

HIDDEN_SIZES = st.one_of(st.sampled_from([1, 7, 127, 128, 129, 4096, 7168]), st.integers(1, 2000))
QUANTIZED = [wire for wire in WIRES if wire != "none"]


def _assert_equal_to_reference(x: torch.Tensor, spec: str) -> None:
    wire = WireFormat.parse(spec)
    rows = quantize(x, wire)
    assert torch.equal(rows.records, quantize_reference(x, wire)), f"records of {spec}"
    for dtype in DTYPES if wire.quantized else (x.dtype,):
        expected = dequantize_reference(rows.records, wire, x.shape[1], dtype)
        assert_same_bits(f"{spec} to {dtype}", expected, dequantize(rows, dtype))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(WIRES), HIDDEN_SIZES, st.integers(0, 6), st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_every_magnitude_is_equal_to_the_reference(
    spec: str, hidden: int, rows: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    _assert_equal_to_reference(magnitudes(max(rows, 1), hidden, dtype, generator)[:rows], spec)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(WIRES),
    st.integers(1, 300),
    st.sampled_from(DTYPES),
    st.lists(
        st.tuples(st.integers(0, 10**6), st.sampled_from([float("nan"), float("inf"), -float("inf")])), min_size=1
    ),
)
def test_non_finite_values_at_any_position_make_their_group_nan_and_no_other(
    spec: str, hidden: int, dtype: torch.dtype, planted: list[tuple[int, float]]
) -> None:
    wire = WireFormat.parse(spec)
    x = torch.linspace(-3, 5, 2 * hidden).view(2, hidden).to(dtype)
    for position, value in planted:
        x.view(-1)[position % x.numel()] = value
    _assert_equal_to_reference(x, spec)
    if wire.quantized:
        group = wire.group or hidden
        groups = torch.nn.functional.pad(x.float(), (0, -hidden % group)).view(2, -1, group)
        poisoned = (~groups.isfinite()).any(-1).repeat_interleave(group, dim=1)[:, :hidden]
        assert torch.equal(dequantize(quantize(x, wire)).isnan(), poisoned)


def test_each_single_position_of_a_group_is_seen_as_non_finite() -> None:
    x = torch.ones(129, 129)
    x[torch.arange(129), torch.arange(129)] = torch.nan
    back = dequantize(quantize(x, "int8"))
    assert back[:128, :128].isnan().all() and not back[:128, 128].isnan().any()
    assert back[128, 128].isnan() and not back[128, :128].isnan().any()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([w for w in QUANTIZED if not w.startswith("fp8")]), HIDDEN_SIZES, st.integers(0, 2**31))
def test_integer_formats_keep_the_bound_of_half_a_step(spec: str, hidden: int, seed: int) -> None:
    wire = WireFormat.parse(spec)
    x = magnitudes(5, hidden, torch.float32, torch.Generator().manual_seed(seed))
    x[x.abs() < 2.0**-110] = 0.0  # smaller groups are zeroed: another rule, tested on its own
    records = quantize(x, wire).records
    q_times_s = scaled_reference(records, wire, hidden, torch.float32).double()
    columns = q_times_s.shape[1]
    exact = torch.nn.functional.pad(x, (0, columns - hidden))
    exact = rotated_reference(exact, back=False).double() / 64 if wire.rotated else exact.double()
    start = wire.scales_offset(hidden)
    scales = records[:, start : start + wire.num_groups(hidden) * wire.scale_bytes].contiguous()
    step = scales.view(torch.float32 if wire.row_scale else torch.bfloat16).double()
    step = step.repeat_interleave(wire.group or columns, dim=1)[:, :columns]
    finite = q_times_s.isfinite()  # at the very top q * s overflows float32, and saturates on the way out
    error = (q_times_s - exact).abs()
    assert (error <= step * (0.5 + 2.0**-22 * wire.qmax))[finite].all()


@pytest.mark.parametrize("spec", QUANTIZED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_finite_group_never_comes_out_infinite(spec: str, dtype: torch.dtype) -> None:
    largest = min(torch.finfo(dtype).max, 2.0**122 if WireFormat.parse(spec).rotated else torch.inf)
    x = torch.full((1, 256), largest, dtype=dtype)
    for target in DTYPES:
        assert dequantize(quantize(x, spec), target).isfinite().all()


@pytest.mark.parametrize("spec", QUANTIZED)
def test_groups_below_the_threshold_become_zeros_and_those_at_it_do_not(spec: str) -> None:
    # A block of equal values has eight times their magnitude everywhere when it is rotated.
    at = torch.full((1, 64), 2.0 ** (-113 if WireFormat.parse(spec).rotated else -110))
    below = at.nextafter(torch.zeros(1))
    assert (dequantize(quantize(below, spec)) == 0).all() and not quantize(below, spec).records.any()
    assert (dequantize(quantize(at, spec)) > 0).all()
    assert not quantize(torch.zeros(1, 64), spec).records.any()


@pytest.mark.parametrize(
    ("spec", "theory", "gate", "worst_gate"),
    [
        ("int8", 0.0065, 0.0068, 0.0072),
        ("int8:row", 0.0090, 0.0095, 0.0135),
        ("int8:32", 0.0054, 0.0057, None),
        ("int4", 0.097, 0.102, None),
        ("fp8", 0.0257, 0.0270, None),
        ("int6", 0.0266, 0.0280, None),
        ("int10", 0.00161, 0.0018, None),
        ("int8+h64", 0.0065, 0.0068, 0.0072),
        ("int8:row+h64", 0.0090, 0.0095, 0.0135),
        ("int6+h64", 0.0266, 0.0280, None),
        ("int10+h64", 0.00161, 0.0018, None),
    ],
)
def test_gaussian_rows_keep_the_accuracy_gates(
    spec: str, theory: float, gate: float, worst_gate: float | None, record_property: pytest.RecordProperty
) -> None:
    x = torch.randn(512, 7168)
    back = dequantize(quantize(x, spec))
    error = relative_error(x, back)
    worst = float(((back - x).norm(dim=1) / x.norm(dim=1)).max())
    gain_bias = float((x.double() * back.double()).sum() / x.double().square().sum()) - 1
    print(f"{spec}: relative error {error:.5f}, worst token {worst:.5f}, gain bias {gain_bias:+.1e}")
    assert 0.9 * theory <= error <= gate  # far below the theory would mean that nothing was quantised
    assert worst_gate is None or worst <= worst_gate
    assert not spec.startswith("int8") or abs(gain_bias) <= 1e-4


@pytest.mark.parametrize(
    ("spec", "rest", "gate"),
    [
        ("int8", 0.030, 0.033),
        ("int8:row", 0.173, 0.190),
        ("int8:32", 0.016, 0.0176),
        ("int4", 0.148, 0.163),
        ("fp8", 0.026, 0.0286),
        ("int8+h64", 0.0080, 0.0085),
        ("int6+h64", 0.0327, 0.0350),
        ("int10+h64", 0.0020, 0.0022),
    ],
)
def test_outlier_channels_cost_the_other_channels_what_theory_says(spec: str, rest: float, gate: float) -> None:
    x = torch.randn(256, 7168)
    outliers = torch.tensor([100, 2000, 4001, 7100])
    x[:, outliers] *= 50
    others = torch.ones(7168, dtype=torch.bool)
    others[outliers] = False
    error = relative_error(x[:, others], dequantize(quantize(x, spec))[:, others])
    print(f"{spec}: relative error of the other channels {error:.4f}")
    assert 0.9 * rest <= error <= gate


def test_leading_dimensions_and_strides_are_kept() -> None:
    x = torch.randn(30, 50, 140)[:, ::2, 3:133]
    back = dequantize(quantize(x, "int8"))
    assert back.shape == x.shape and relative_error(x, back) < 0.0072


def test_unaligned_records_are_copied() -> None:
    rows = quantize(torch.randn(4, 256), "int8")
    shifted = torch.empty(4 * 288 + 1, dtype=torch.uint8)[1:].view(4, 288)
    for records in (shifted.copy_(rows.records), rows.records.t().contiguous().t()):
        assert torch.equal(dequantize(replace(rows, records=records)), dequantize(rows))
    assert torch.equal(dequantize(quantize(torch._neg_view(torch.ones(1, 8)), "none")), -torch.ones(1, 8))


@pytest.mark.parametrize(
    ("version", "wire", "times"),
    [("3.6.0", "int8+h64", 1), ("3.6.0", "int8", 0), ("3.7.0", "int8+h64", 0), ("3.10.1+git1", "int4+h64", 0)],
)
def test_rotated_formats_warn_once_of_a_triton_that_spills(
    version: str, wire: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend._warn_of_spills.cache_clear()
    monkeypatch.setattr(backend, "triton", SimpleNamespace(__version__=version))
    monkeypatch.setattr(backend, "_triton", lambda device, reason: SimpleNamespace(name="triton", reason=reason))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for index in range(2):
            backend._select.__wrapped__(torch.device("cuda", index), WireFormat.parse(wire), 1, None, None, True)
    assert len(said) == times and all("use 'int8'" in str(warning.message) for warning in said)


def test_the_wire_variable_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(quantize(torch.zeros(1, 8)).wire) == "int8"
    monkeypatch.setenv("THINWIRE_WIRE", "int4:64")
    assert str(quantize(torch.zeros(1, 8)).wire) == "int4:64"
    monkeypatch.setenv("THINWIRE_WIRE", "int9")
    with pytest.raises(WireFormatError, match="int9"):
        quantize(torch.zeros(1, 8))


def test_the_torch_backend_gives_the_same_and_an_unknown_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 300).bfloat16()
    expected = quantize(x, "int8")
    monkeypatch.setenv("THINWIRE_BACKEND", "torch")
    assert torch.equal(quantize(x, "int8").records, expected.records)
    assert_same_bits("dequantize", dequantize(expected), dequantize(quantize(x, "int8")))
    monkeypatch.setenv("THINWIRE_BACKEND", "cuda")
    with pytest.raises(TransportUnavailable, match="accepted: triton, numba, torch"):
        quantize(x, "int8")
