"""How kernels of rounds are launched: what is the lane's they get by the names of their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from thinwire.triton_kernels.launch import Launcher
from thinwire.triton_kernels.round_layout import Lane
from thinwire.triton_kernels.signal import Launch


def round_launcher(
    lane: Lane,
    kernel: Any,
    staying: Mapping[str, Any],
    tensors: Sequence[str] = (),
    strides: Sequence[str] = (),
    counts: Sequence[str] = (),
    **options: Any,
) -> Launcher:
    """See `Launcher`. `staying` has what is not the same for all kernels of the lane."""
    layout = lane.layout
    launch = Launch.of(layout, lane.buffer.device)
    of_lane = {
        "buffer_ptr": lane.buffer.view(torch.int8),
        "buffer_ptrs": lane.buffer_ptrs,
        "control_ptr": lane.control,
        "report_ptr": lane.report,
        "index_ptr": lane.index,
        "num_rows": lane.index.shape[0],
        "expert_counts_ptr": lane.expert_counts,
        "expert_offsets_ptr": lane.expert_offsets,
        "first_expert": layout.first_expert(lane.rank),
        "num_local": lane.expert_counts.shape[0],
        "positions_ptr": lane.positions,
        "weights_ptr": lane.weights,
        "scratch_ptr": lane.scratch,
        "rank": lane.rank,
        "ROUND": layout,
        "CHUNK": lane.CHUNK,
        "ALIGN": lane.align,
        "K_BLOCK": 1 << max(0, layout.TOP_K - 1).bit_length(),  # lanes of a vector that holds a token's experts
        "LAUNCH": launch,
    }
    staying, direct = of_lane | {**staying}, launch.PLATFORM == "cuda"
    return Launcher(kernel, tensors, strides, counts, staying, lane.buffer, direct, **options)
