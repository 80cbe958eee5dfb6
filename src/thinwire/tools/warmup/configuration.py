"""The calls of ranks, and the kernels that they launch, called with tensors and memory that are not there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.errors import TransportUnavailable
from thinwire.fused.backend import require_wire_support
from thinwire.fused.channel import channel_layout
from thinwire.fused.codec import FLOAT_DTYPES
from thinwire.fused.collective import DirectCollectives, collective_layout
from thinwire.fused.counts import dense_segments
from thinwire.fused.device_channel import DeviceChannel
from thinwire.fused.partition import LONG_ROW, SHORT_ROW
from thinwire.moe.config import ParallelSettings
from thinwire.moe.direct import RoundKernels, launch_each
from thinwire.moe.routing import expert_range
from thinwire.octets import as_bytes
from thinwire.triton_kernels import collective_launches, combine, pack, sums
from thinwire.triton_kernels.expert_gemm import INNER_WIRE, expert_gemm
from thinwire.triton_kernels.int8_weights import Int8Weights, require_int8_sums
from thinwire.triton_kernels.leg_layout import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, LegLayout
from thinwire.triton_kernels.round_layout import Lane
from thinwire.wire import WireFormat

if TYPE_CHECKING:
    from argparse import Namespace

    from triton.backends.compiler import GPUTarget

_META = torch.device("meta")
_ID_DTYPES = (torch.int32, torch.int64)
_TIMEOUT = 1.0  # seconds; no kernel knows it before it runs


@dataclass(frozen=True)
class Configuration:
    """What ranks will call.

    Attributes:
        settings: ExpertParallel's arguments; lanes with and without `dtype` are both compiled for.
        ranks: of the group.
        dtype: of tokens.
        gradients: whether a dispatch will want gradients.
        int8_experts: elements between the two products of `tw.Int8Experts`; 0: there are none.
        collectives, all_to_all_v: whether these are called too, in the wire format of dispatch and with rows of its
            size.
    """

    settings: ParallelSettings
    ranks: int
    dtype: torch.dtype
    gradients: bool = False
    int8_experts: int = 0
    collectives: bool = False
    all_to_all_v: bool = False

    @classmethod
    def of(cls, options: Namespace) -> Configuration:
        """The configuration that the options of `thinwire warmup` describe.

        Raises:
            ArgumentError, RoutingError, WireFormatError: as ExpertParallel and `tw.init`.
        """
        dtype: torch.dtype = getattr(torch, options.dtype)
        settings = ParallelSettings.of(
            options.experts, options.top_k, options.hidden, options.max_tokens, wire=options.wire,
            combine_wire=options.combine_wire, grad_wire=options.grad_wire, transport=options.transport,
            lanes=options.lanes, align=options.align, invariant=options.invariant, num_programs=None, timeout=None,
            dtype=dtype,
        )  # fmt: skip
        beside = options.gradients, options.int8_experts, options.collectives, options.all_to_all_v
        return cls(settings, options.ranks, dtype, *beside)

    def describe(self) -> str:
        """One line."""
        settings, name = self.settings, str(self.dtype).removeprefix("torch.")
        return (
            f"{self.ranks} ranks, {settings.num_experts} experts, top-{settings.top_k}, hidden {settings.hidden_size}, "
            f"{settings.max_tokens} tokens a rank, {name}; {settings.wire} out, {settings.combine_wire} back"
            + ", invariant" * settings.invariant
            + f", gradients in {settings.grad_wire}" * self.gradients
            + f", int8 experts of {self.int8_experts}" * (self.int8_experts > 0)
            + ", collectives" * self.collectives
            + ", all-to-all-v" * self.all_to_all_v
        )

    def require(self, target: GPUTarget) -> None:
        """Raises the errors of ranks on such GPUs, before any compiling: TransportUnavailable, WireFormatError."""
        settings = self.settings
        why = settings.why_staged(self.ranks)
        if why is not None and settings.transport == "direct":
            raise TransportUnavailable(f"ExpertParallel cannot take the direct transport: {why}")
        if settings.transport == "two_level":
            raise TransportUnavailable(
                "which ranks share a host is not known here: two levels compile at their first call"
            )
        if target.backend == "cuda":
            for wire in (settings.wire, settings.combine_wire, settings.grad_wire):
                require_wire_support(wire, divmod(int(target.arch), 10))
        if self.int8_experts:
            columns = settings.wire.columns(settings.hidden_size)
            require_int8_sums(replace(settings.wire, rotated=False), columns)

    def launch(self) -> None:
        """Launches each of its kernels at least once; for `collect`."""
        settings, dtype = self.settings, self.dtype
        if settings.transport == "staged" or settings.why_staged(self.ranks) is not None:
            _launch_staged(settings, self.ranks, dtype, self.gradients)
        else:
            for room in (dtype, None):
                lanes = replace(settings, dtype=room)
                _launch_direct(lanes, self.ranks, dtype)
                if self.gradients:
                    _launch_direct(lanes.of_backward, self.ranks, dtype, backward=True)
        if self.int8_experts:
            _launch_int8_experts(settings, self.ranks, dtype, self.int8_experts)
        if self.collectives:
            _launch_collectives(self.ranks, settings.wire, dtype)
        if self.all_to_all_v:
            _launch_all_to_all_v(self.ranks, settings.hidden_size, settings.wire, dtype)


def _launch_direct(settings: ParallelSettings, ranks: int, dtype: torch.dtype, backward: bool = False) -> None:
    """Kernels of a round on the direct transport, whose lanes are those of forward or of backward."""
    layout = settings.lane_layout(ranks, weight_grads=backward)
    buffer = torch.empty(layout.NUM_BYTES, dtype=torch.uint8, device=_META)
    buffer_ptrs = torch.empty(ranks, dtype=torch.int64, device=_META)
    x = torch.empty(1, layout.HIDDEN, dtype=dtype, device=_META)
    for rank in _ranks_that_differ(settings, ranks):
        lane = Lane.of(layout, settings.wire, settings.combine_wire, rank, settings.align, buffer, buffer_ptrs)
        for id_dtype in _ID_DTYPES:
            ids = torch.empty(1, layout.TOP_K, dtype=id_dtype, device=_META)
            launch_each(RoundKernels(), lane, x, ids, ids.float(), settings.num_programs)
        if settings.combine_wire.quantized and not backward:
            records = _records(settings.combine_wire, layout.HIDDEN, dtype)
            for as_they_are in (False, True):
                combine.send_sums(lane, records, dtype, settings.num_programs, None, as_they_are)


def _ranks_that_differ(settings: ParallelSettings, ranks: int) -> list[int]:
    """One rank for each number of experts that ranks own: kernels know it."""
    owned = {len(expert_range(settings.num_experts, ranks, rank)): rank for rank in range(ranks)}
    return list(owned.values())


def _records(wire: WireFormat, hidden: int, dtype: torch.dtype, message_bytes: int | None = None) -> torch.Tensor:
    """One record, with what travels behind it."""
    length = wire.row_bytes(hidden, dtype)
    return torch.empty(1, message_bytes or length, dtype=torch.uint8, device=_META)[:, :length]


def _launch_staged(settings: ParallelSettings, ranks: int, dtype: torch.dtype, gradients: bool) -> None:
    """Kernels of a round through the process group, and of its backward."""
    hidden, top_k = settings.hidden_size, settings.top_k
    index = torch.empty(1, dtype=torch.int64, device=_META)
    row = torch.empty(1, hidden, dtype=dtype, device=_META)
    for legs in (settings, settings.of_backward)[: 1 + gradients]:
        wire, back = legs.wire, legs.combine_wire
        terms, slots = (1, top_k) if legs.invariant else (top_k, min(top_k, ranks))
        positions = torch.empty(1, terms, dtype=torch.int64, device=_META)
        weights = torch.empty(1, terms, device=_META, dtype=torch.float32)
        home = torch.empty(1, slots, dtype=torch.int64, device=_META)
        message, sent_back = _records(wire, hidden, dtype, settings.message_bytes(dtype)), _records(back, hidden, dtype)
        pack.pack_rows(row, wire, index, message)
        pack.unpack_rows(message, wire, index, index, row)
        for out_dtype in FLOAT_DTYPES:
            sums.pack_weighted_sums(row.to(out_dtype), positions, weights, back, dtype, sent_back, hidden)
        if back.quantized:
            sums.pack_weighted_sums(sent_back, positions, weights, back, dtype, sent_back, hidden)
        sums.sum_records(sent_back, home, back, row)


def _launch_int8_experts(settings: ParallelSettings, ranks: int, dtype: torch.dtype, ff_size: int) -> None:
    """Products of `tw.Int8Experts` with rows of `ff_size` between them, with a gate and without, of few rows and many.

    Raises:
        WireFormatError: a dispatch wire that is not int8.
    """
    hidden, wire = settings.hidden_size, replace(settings.wire, rotated=False)
    columns = settings.wire.columns(hidden)
    for rank in _ranks_that_differ(settings, ranks):
        num_experts = len(expert_range(settings.num_experts, ranks, rank))
        offsets = torch.empty(num_experts + 1, dtype=torch.int64, device=_META)
        for rows in (1, 1 << 20):
            index = torch.empty(rows, dtype=torch.int64, device=_META)
            inner = torch.empty(rows, INNER_WIRE.row_bytes(ff_size), dtype=torch.uint8, device=_META)
            out = torch.empty(rows, hidden, dtype=dtype, device=_META)
            for gated in (True, False):
                inward = _weights(num_experts, columns, ff_size, gated)
                expert_gemm(_records(wire, columns, dtype), wire, index, offsets, inward, inner, INNER_WIRE)
            expert_gemm(inner, INNER_WIRE, None, offsets, _weights(num_experts, ff_size, hidden), out)


def _weights(num_experts: int, inward: int, outward: int, gated: bool | None = None) -> Int8Weights:
    channels = outward * (1 + bool(gated))
    payload = torch.empty(num_experts, channels, -(-inward // 16) * 16, dtype=torch.int8, device=_META)
    scales = torch.empty(num_experts, channels, device=_META, dtype=torch.float32)
    return Int8Weights(payload, scales, inward, bool(gated), activate=gated is False)


def _memory(layout: LegLayout) -> SymmetricMemory:
    buffer = torch.empty(layout.NUM_BYTES, dtype=torch.uint8, device=_META)
    return SymmetricMemory("cuda", 0, buffer, [0] * layout.WORLD, [])


class _Collectives(DirectCollectives):
    """Prepares every call, whenever it is asked to."""

    def load_kernels(self, key: Hashable, launch: Callable[[], None], lane: int = 0) -> None:
        launch()

    def _require_backend(self, wires: Sequence[WireFormat]) -> None:
        """The GPU that takes them is not here."""

    def launch(self, op: int, row: int, wire: WireFormat, gather_wire: WireFormat, dtype: torch.dtype) -> None:
        """The kernels of a call whose tensors begin on a boundary of 16 bytes, large or small."""
        x = torch.empty(row, dtype=dtype, device=_META)
        job = self.job(op, dense_segments([row] * self.world), row, wire, gather_wire, dtype)
        for at_once in (0, 1) if collective_launches() == "one" and not torch.version.hip else (0,):
            self._load_kernels(job, x, x, at_once)


def _launch_collectives(ranks: int, wire: WireFormat, dtype: torch.dtype) -> None:
    """Kernels of all-reduce, reduce-scatter and all-gather in a wire format, and of sums that are gathered exactly."""
    layout = collective_layout(ranks, on_gpu=True)
    collectives = _Collectives(_memory(layout), layout, 0, _TIMEOUT)
    exact = WireFormat.parse("none")
    for row in (SHORT_ROW, LONG_ROW):
        collectives.launch(REDUCE_SCATTER, row, wire, wire, dtype)
        collectives.launch(ALL_GATHER, row, exact, wire, dtype)
        for gather_wire in (wire, exact):
            collectives.launch(ALL_REDUCE, row, wire, gather_wire, dtype)


class _Channel(DeviceChannel):
    """Prepares every call, whenever it is asked to."""

    def load_kernels(self, key: Hashable, launch: Callable[[], None], lane: int = 0) -> None:
        launch()

    def launch(self, x: torch.Tensor, wire: WireFormat) -> None:
        """The kernels of a call for rows of x."""
        form = self._new_row_format(x.shape[1:], x.dtype, wire)
        if form.layout is None:
            self._load_kernels(form, as_bytes(x), form.step)
        else:
            self._load_kernels(form, x, form.step // x.itemsize)


def _launch_all_to_all_v(ranks: int, hidden: int, wire: WireFormat, dtype: torch.dtype) -> None:
    """Kernels of all-to-all-v for rows of so many elements in a wire format, and as they are."""
    layout = channel_layout(ranks, on_gpu=True)
    channel = _Channel(_memory(layout), layout, 0, _TIMEOUT)
    for each in (wire, WireFormat.parse("none")):
        channel.launch(torch.empty(1, hidden, dtype=dtype, device=_META), each)
