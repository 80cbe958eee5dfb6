"""Which kernels a configuration launches: the launchers that ranks call, called with tensors that have no memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from thinwire.comm.integrity import resolve_integrity
from thinwire.errors import TransportUnavailable
from thinwire.fused.backend import RoundKernels
from thinwire.fused.codec import FLOAT_DTYPES
from thinwire.moe.config import ParallelSettings
from thinwire.moe.direct import launch_each
from thinwire.moe.routing import expert_range
from thinwire.triton_kernels import combine, dispatch, pack, permute, sums
from thinwire.triton_kernels.round_layout import Lane, RoundLayout
from thinwire.triton_kernels.support import require_wire_support
from thinwire.wire import WireFormat

if TYPE_CHECKING:
    from argparse import Namespace

    from triton.backends.compiler import GPUTarget

_META = torch.device("meta")
_ID_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Configuration:
    """What ranks will call.

    Attributes:
        settings: ExpertParallel's arguments; lanes with `dtype` and without one are both compiled for.
        ranks: of the group.
        dtypes: of tokens.
        checksums: whether the communicator has integrity="checksum".
        gradients: whether a dispatch will want them.
    """

    settings: ParallelSettings
    ranks: int
    dtypes: tuple[torch.dtype, ...]
    checksums: bool = False
    gradients: bool = False

    def describe(self) -> str:
        """One line."""
        settings, names = self.settings, [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        beside = [text for text, there in (("checksums", self.checksums), ("gradients", self.gradients)) if there]
        return (
            f"{self.ranks} ranks, {settings.num_experts} experts, top-{settings.top_k}, hidden {settings.hidden_size}, "
            f"{settings.max_tokens} tokens a rank, {', '.join(names)}; {settings.wire}, {settings.combine_wire} back"
            + "".join(f", {text}" for text in beside)
        )

    def require(self, target: GPUTarget) -> None:
        """Raises TransportUnavailable where ranks on such GPUs would, before anything is compiled."""
        why = self.settings.why_staged(self.ranks)
        if why is not None and self.settings.transport == "direct":
            raise TransportUnavailable(f"ExpertParallel cannot take the direct transport: {why}")
        if target.backend == "cuda":
            for wire in (self.settings.wire, self.settings.combine_wire, self.settings.grad_wire):
                require_wire_support(wire, divmod(int(target.arch), 10))

    @property
    def staged(self) -> bool:
        """Whether rounds go through the process group."""
        return self.settings.transport == "staged" or self.settings.why_staged(self.ranks) is not None

    def launch(self) -> None:
        """Launches every kernel of it."""
        for dtype in self.dtypes:
            if self.staged:
                launch_staged(self.settings, self.ranks, dtype, self.gradients)
                continue
            for room in (dtype, None):
                self._launch_rounds(replace(self.settings, dtype=room), dtype, False)
                if self.gradients:
                    self._launch_rounds(replace(self.settings, dtype=room).of_backward, dtype, True)

    def _launch_rounds(self, settings: ParallelSettings, dtype: torch.dtype, backward: bool) -> None:
        layout = settings.lane_layout(self.ranks, checksums=self.checksums, weight_grads=backward)
        kernels = RoundKernels(
            dispatch.send_tokens, dispatch.wait, permute.route, permute.gather, combine.send_sums,
            dispatch.close_round, combine.sum_home, dispatch.refuse,
        )  # fmt: skip
        # Ranks that own different numbers of experts have kernels of their own.
        owned = {len(expert_range(settings.num_experts, self.ranks, rank)): rank for rank in range(self.ranks)}
        for rank in owned.values():
            lane = _lane(settings, layout, rank)
            for id_dtype in _ID_DTYPES:
                x = torch.empty(1, layout.HIDDEN, dtype=dtype, device=_META)
                ids = torch.empty(1, layout.TOP_K, dtype=id_dtype, device=_META)
                launch_each(kernels, lane, x, ids, ids.float(), settings.num_programs)
            if settings.combine_wire.quantized and not backward:
                records = torch.empty(
                    1, settings.combine_wire.row_bytes(layout.HIDDEN), dtype=torch.uint8, device=_META
                )
                for as_they_are in (False, True):
                    combine.send_sums(lane, records, dtype, settings.num_programs, None, as_they_are)


def _lane(settings: ParallelSettings, layout: RoundLayout, rank: int) -> Lane:
    buffer = torch.empty(layout.NUM_BYTES, dtype=torch.uint8, device=_META)
    buffer_ptrs = torch.empty(layout.WORLD, dtype=torch.int64, device=_META)
    return Lane.of(layout, settings.wire, settings.combine_wire, rank, settings.align, buffer, buffer_ptrs)


def launch_staged(settings: ParallelSettings, ranks: int, dtype: torch.dtype, gradients: bool) -> None:
    """Kernels of a round over the process group, and of its backward."""
    hidden, top_k = settings.hidden_size, settings.top_k
    index = torch.empty(1, dtype=torch.int64, device=_META)
    positions = torch.empty(1, top_k, dtype=torch.int64, device=_META)
    weights = torch.empty(1, top_k, device=_META)
    home = torch.empty(1, min(top_k, ranks), dtype=torch.int64, device=_META)
    row = torch.empty(1, hidden, dtype=dtype, device=_META)

    def records(wire: WireFormat, row_bytes: int | None = None) -> torch.Tensor:
        length = wire.row_bytes(hidden, dtype)
        return torch.empty(1, row_bytes or length, dtype=torch.uint8, device=_META)[:, :length]

    legs = [(settings.wire, settings.combine_wire)] + [(settings.grad_wire, settings.grad_wire)] * gradients
    for wire, back in legs:
        message = records(wire, settings.message_bytes(dtype))
        pack.pack_rows(row, wire, index, message)
        pack.unpack_rows(message, wire, index, index, row)
        for out_dtype in FLOAT_DTYPES:
            sums.pack_weighted_sums(row.to(out_dtype), positions, weights, back, dtype, records(back), hidden)
        if back.quantized:
            sums.pack_weighted_sums(records(back), positions, weights, back, dtype, records(back), hidden)
        sums.sum_records(records(back), home, back, row)


def configuration_of(options: Namespace) -> Configuration:
    """What the options of `thinwire warmup` say.

    Raises:
        ArgumentError, RoutingError, WireFormatError, TransportUnavailable: as ExpertParallel and `tw.init`.
    """
    dtype: torch.dtype = getattr(torch, options.dtype)
    settings = ParallelSettings.of(
        options.experts, options.top_k, options.hidden, options.max_tokens, wire=options.wire,
        combine_wire=options.combine_wire, grad_wire=options.grad_wire, transport=options.transport,
        lanes=options.lanes, align=options.align, num_programs=None, timeout=None, dtype=dtype,
    )  # fmt: skip
    return Configuration(
        settings, options.ranks, (dtype,), resolve_integrity(options.integrity) != "none", options.gradients
    )
