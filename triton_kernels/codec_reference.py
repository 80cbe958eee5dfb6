"""The reference of the codec in plain torch, on any device: records of rows, and rows of records.

Kernels on all backends must equal it to the last bit. `thinwire.wire` defines the formats.
"""

from __future__ import annotations

import torch
from einops import rearrange, repeat

from thinwire.octets import as_bytes
from thinwire.wire import BLOCK, FORMATS, WireFormat


def quantize_reference(x: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """Records of x [rows, hidden], uint8 [rows, row_bytes], by torch's own arithmetic and casts.

    >>> quantize_reference(torch.tensor([[1.0, -0.5, 0.25]]), WireFormat.parse("int8"))[0, :4].view(torch.int8).tolist()
    [127, -64, 32, 0]
    """
    rows, hidden = x.shape
    records = torch.zeros(rows, wire.row_bytes(hidden, x.dtype), dtype=torch.uint8, device=x.device)
    if not rows:
        return records
    if not wire.quantized:
        raw = rearrange(as_bytes(x.contiguous()), "(rows bytes) -> rows bytes", rows=rows)
        records[:, : raw.shape[1]] = raw
        return records
    columns, groups = wire.columns(hidden), wire.num_groups(hidden)
    group = wire.group or columns
    padded = torch.nn.functional.pad(x.float(), (0, max(columns, groups * group) - hidden))
    if wire.rotated:
        padded = rotated_reference(padded, back=False)
    padded = rearrange(padded, "rows (groups elements) -> rows groups elements", groups=groups)
    amax_bits = (padded.view(torch.int32) & 0x7FFFFFFF).amax(-1)
    amax = amax_bits.view(torch.float32)
    scale = amax * torch.tensor(1.0 / wire.qmax, dtype=torch.float32, device=x.device)
    scale = scale.to(torch.float32 if wire.row_scale else torch.bfloat16)
    scale = scale.masked_fill(amax < 2.0**-110, 0.0)
    scale = scale.masked_fill(~amax.isfinite(), torch.nan)
    of_elements = repeat(scale, "rows groups -> rows groups elements", elements=group)
    scaled = torch.where(of_elements > 0, padded * (1.0 / of_elements.float()), 0.0)
    if wire.name == "fp8":
        payload = scaled.clamp(-wire.qmax, wire.qmax).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        largest = (1 << FORMATS[wire.name].bits - 1) - 1
        payload = scaled.round().clamp(-largest, largest).to(torch.int32)
    payload = rearrange(payload, "rows groups elements -> rows (groups elements)")
    if wire.name == "int4":
        even, odd = rearrange(payload, "rows (bytes two) -> two rows bytes", two=2)
        payload = (even & 0xF) | (odd << 4)
    if planes := FORMATS[wire.name].planes:
        payload = planes_reference(payload[:, :columns], planes)
    payload = payload[:, : wire.payload_bytes(hidden)].to(torch.uint8)
    records[:, : payload.shape[1]] = payload
    if wire.rotated:
        scale = scale * 2.0**-6
    # A NaN's pattern is fixed on the wire, whatever the hardware's own is.
    nan_pattern = torch.tensor(0x7FC00000 if wire.row_scale else 0x7FC0, dtype=torch.int32, device=x.device)
    integer = torch.int32 if wire.row_scale else torch.int16
    scale_bits = torch.where(scale.isnan(), nan_pattern.to(integer), scale.view(integer)).contiguous()
    start = wire.scales_offset(hidden)
    records[:, start : start + groups * wire.scale_bytes] = scale_bits.view(torch.uint8)
    return records


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which rows of a dtype are added up: float32, but for float64, of which only the references know."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scaled_reference(records: torch.Tensor, wire: WireFormat, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """q * s of records, [rows, wire.columns(hidden)] in `sum_dtype(dtype)`; `dtype` is the elements' for `none`.

    Where rows are rotated, so is this; `row_reference` makes rows of it, or of the sum of some.
    """
    rows = records.shape[0]
    if not rows:
        return torch.empty(0, wire.columns(hidden), dtype=sum_dtype(dtype), device=records.device)
    payload = records[:, : wire.payload_bytes(hidden, dtype)].contiguous()
    if not wire.quantized:
        return payload.view(dtype).to(sum_dtype(dtype))
    columns, groups, start = wire.columns(hidden), wire.num_groups(hidden), wire.scales_offset(hidden)
    group = wire.group or columns
    scales = records[:, start : start + groups * wire.scale_bytes].contiguous()
    scale = scales.view(torch.float32 if wire.row_scale else torch.bfloat16).float()
    if wire.name == "fp8":
        q = payload.view(torch.float8_e4m3fn).float()
        # The two codes that stand for NaN are never written; kernels, which do not look for them, read on to 480.
        q = torch.where(q.isnan(), torch.where(payload < 128, 480.0, -480.0), q)
    elif wire.name == "int4":
        even, odd = (payload << 4).view(torch.int8) >> 4, payload.view(torch.int8) >> 4
        q = rearrange([even, odd], "two rows bytes -> rows (bytes two)").float()
    elif planes := FORMATS[wire.name].planes:
        q = codes_reference(payload, planes).float()
    else:
        q = payload.view(torch.int8).float()
    return q[:, :columns] * repeat(scale, "rows groups -> rows (groups elements)", elements=group)[:, :columns]


def row_reference(total: torch.Tensor, wire: WireFormat, hidden: int) -> torch.Tensor:
    """Rows, [rows, hidden], of what `scaled_reference` gave, or of the sum of some."""
    return (rotated_reference(total, back=True) if wire.rotated else total)[:, :hidden]


def round_reference(y: torch.Tensor, dtype: torch.dtype, saturate: bool) -> torch.Tensor:
    """float32 to `dtype`, half to even; `saturate` keeps what is not NaN finite. A bfloat16's NaN becomes 0x7FFF."""
    if saturate:
        largest = torch.finfo(dtype).max
        y = y.clamp(-largest, largest)
    if dtype == torch.bfloat16:
        nan = torch.tensor(0x7FFF, dtype=torch.int16, device=y.device).view(dtype)
        return torch.where(y.isnan(), nan, y.to(dtype))
    return y.to(dtype)


def dequantize_reference(records: torch.Tensor, wire: WireFormat, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of records, [rows, hidden] in `dtype`; for `none`, bit for bit."""
    if not wire.quantized and records.shape[0]:
        return records[:, : wire.payload_bytes(hidden, dtype)].contiguous().view(dtype)
    return round_reference(
        row_reference(scaled_reference(records, wire, hidden, dtype), wire, hidden), dtype, saturate=True
    )


def rotated_reference(rows: torch.Tensor, back: bool) -> torch.Tensor:
    """Rows, float [rows, columns], with each block of 64 columns rotated, or rotated back; unscaled both ways."""
    column = torch.arange(BLOCK, device=rows.device)
    odd = column & (column >> 1) & 0x15
    odd = (odd ^ odd >> 2 ^ odd >> 4) & 1
    signs = (1.0 - 2.0 * odd).to(rows.dtype)
    blocks = rearrange(rows, "rows (blocks columns) -> rows blocks columns", columns=BLOCK)
    blocks = blocks if back else blocks * signs
    for stage in range(6):
        first, second = rearrange(
            blocks, "rows blocks (outer two inner) -> two rows blocks outer inner", two=2, inner=1 << stage
        )
        blocks = rearrange(
            [first + second, first - second], "two rows blocks outer inner -> rows blocks (outer two inner)"
        )
    return rearrange(blocks * signs if back else blocks, "rows blocks columns -> rows (blocks columns)")


def planes_reference(codes: torch.Tensor, planes: tuple[int, ...]) -> torch.Tensor:
    """The bit planes, int32 [rows, bytes], of int32 codes [rows, columns]."""
    blocks, parts, taken = rearrange(codes, "rows (blocks columns) -> rows blocks columns", columns=BLOCK), [], 0
    for bits in planes:
        fields = blocks >> taken & (1 << bits) - 1
        fields = rearrange(fields, "rows blocks (parts octets) -> rows blocks octets parts", octets=8 * bits)
        places = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)
        parts.append((fields << places).sum(-1).int().flatten(1))
        taken += bits
    return torch.cat(parts, 1)


def codes_reference(payload: torch.Tensor, planes: tuple[int, ...]) -> torch.Tensor:
    """The inverse of `planes_reference`: int32 [rows, columns] of uint8 [rows, bytes]."""
    columns, start, taken = payload.shape[1] * 8 // sum(planes), 0, 0
    codes = torch.zeros(len(payload), columns // BLOCK, BLOCK, dtype=torch.int32, device=payload.device)
    for bits in planes:
        plane = payload[:, start : start + columns * bits // 8].int()
        plane = rearrange(plane, "rows (blocks octets) -> rows blocks octets", octets=8 * bits)
        fields = torch.cat([plane >> place & (1 << bits) - 1 for place in range(0, 8, bits)], -1)
        codes, taken, start = codes | fields << taken, taken + bits, start + columns * bits // 8
    sign = 1 << taken - 1
    return rearrange((codes ^ sign) - sign, "rows blocks columns -> rows (blocks columns)")
