"""torch's grouped matrix product: where it takes the place of a loop over experts, and what it is given.

`torch.nn.functional.grouped_mm` multiplies consecutive rows by the matrices of consecutive groups, in one call. On GPUs
it takes the ends of the groups from the device: the host does not wait. It has such kernels for bfloat16 on compute
capability 9 and 10; for others it reads the ends on the host, in every product, so there the loop, which reads them
once, is as good. On the CPU it is a loop too, but in C++ and without copies, and equal to the other to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ALIGNMENT = 16  # bytes, of rows and strides
_WIDEST_VECTORS = 128  # bytes: two of AVX-512's, which torch takes at a time on the CPU
_MAJORS = (9, 10)  # of compute capabilities with kernels


def why_not(tokens: torch.Tensor, weights: Sequence[torch.Tensor], expert_counts: torch.Tensor) -> str | None:
    """What keeps grouped_mm from taking these; None: nothing does.

    Args:
        tokens: [rows, hidden].
        weights: of each product, [experts, inward, outward]; at least one.
        expert_counts: rows of each expert, wherever they lie.
    """
    dtype, device = weights[0].dtype, tokens.device
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm"
    if device.type not in ("cpu", "cuda"):
        return f"what grouped_mm does on {device.type} is not known"
    if dtype not in _DTYPES:
        return f"grouped_mm takes float32, float16 and bfloat16, not {dtype}"
    if any(tensor.dtype != dtype for tensor in (tokens, *weights)):
        return "tokens and weights have different dtypes"
    if torch.is_autocast_enabled(device.type):
        return "under autocast, which grouped_mm may not know"
    if not weights[0].shape[0]:
        return "there are no experts"
    for weight in weights:
        if not _is_aligned(weight):
            return (
                f"weights {list(weight.shape)} of {dtype} with strides {list(weight.stride())}: grouped_mm needs "
                f"multiples of {_ALIGNMENT} bytes"
            )
    if device.type == "cpu":
        if dtype != torch.bfloat16 and torch.compiler.is_compiling():
            return f"torch.compile takes grouped_mm for bfloat16 alone, and this is {dtype}"
        if weights[0].shape[0] == 1:
            return "one expert needs no groups"
        width = weights[0].shape[2]
        # torch's vector and scalar code for an activation differ in the last bit; the scalar one is for what is left.
        left = width * dtype.itemsize % _WIDEST_VECTORS
        return f"rows of {width} x {dtype} would be rounded by where they lie" if left else None
    if expert_counts.device.type == "cpu":
        return "the counts are on the host already"
    if torch.version.hip is not None:
        return "not every build of ROCm's torch has kernels for grouped_mm"
    capability = torch.cuda.get_device_capability(device)
    if dtype != torch.bfloat16 or capability[0] not in _MAJORS:
        return (
            f"grouped_mm has kernels for bfloat16 on compute capability 9 and 10, not for {dtype} on "
            f"{capability[0]}.{capability[1]}, and reads the counts on the host"
        )
    return None


def _is_aligned(matrix: torch.Tensor) -> bool:
    """Whether one of the last two dimensions lies side by side, in steps of 16 bytes over the others."""
    rows, columns = matrix.stride()[-2:]
    height, width = matrix.shape[-2:]
    across = rows if columns == 1 and rows >= width else columns if rows == 1 and columns >= height else 0
    # Where storages begin is a multiple of more.
    steps = (across, *matrix.stride()[:-2], matrix.storage_offset())
    return across > 0 and all(step * matrix.itemsize % _ALIGNMENT == 0 for step in steps)


def aligned(rows: torch.Tensor) -> torch.Tensor:
    """The rows, copied if grouped_mm does not take them as they lie."""
    return rows if _is_aligned(rows) else rows.clone(memory_format=torch.contiguous_format)


def ends_of_experts(num_rows: int, expert_counts: torch.Tensor, expert_offsets: torch.Tensor | None) -> torch.Tensor:
    """Where each expert's rows end, with its padding: int32 [experts] on the device of the counts.

    The device is not waited for. So nobody can look at the counts: what does not fit the rows is cut off, so that no
    memory is touched but theirs.
    """
    ends = (expert_counts.cumsum(0) if expert_offsets is None else expert_offsets[1:]).clamp(0, num_rows)
    return ends.cummax(0).values.int()


def rows_of_experts(
    num_rows: int, expert_counts: torch.Tensor, expert_offsets: torch.Tensor | None, ends: torch.Tensor
) -> torch.Tensor:
    """Which rows are no padding, bool [num_rows], where experts' rows end at `ends`; see `ends_of_experts`."""
    starts = F.pad(ends[:-1], (1, 0)) if expert_offsets is None else expert_offsets[:-1]
    rows = torch.arange(num_rows, device=ends.device, dtype=ends.dtype)
    owner = torch.searchsorted(ends, rows, right=True)
    nobody = (0, 1)  # who owns the rows behind the last end
    first, last = F.pad(starts, nobody)[owner], F.pad(starts + expert_counts, nobody)[owner]
    return (rows >= first) & (rows < last)


def biases_of_rows(biases: torch.Tensor, is_row: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each row's bias, [rows, width], and zero where `is_row` is; rows behind the last end hold anything.

    A product with 1 and as many zeros as the alignment asks for: exact, and its gradient is summed in a fixed order, as
    that of an index is not on GPUs.
    """
    width = _ALIGNMENT // biases.itemsize
    ones = F.pad(is_row.to(biases.dtype).unsqueeze(1), (0, width - 1))
    return F.grouped_mm(ones, F.pad(biases.unsqueeze(1), (0, 0, 0, width - 1)), offs=ends)
