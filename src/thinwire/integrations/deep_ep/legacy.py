"""`Buffer`, DeepEP's first API: its normal mode, and the low-latency pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from thinwire.comm.tensors import is_int
from thinwire.errors import ArgumentError, RoutingError
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.integrations.deep_ep.events import EventOverlap, done
from thinwire.integrations.deep_ep.routes import EXACT, AnyBuffer, MaybeTensor, Route, Rows, aligned, ranks_of


@dataclass
class Config:
    """Accepted; nothing here depends on it."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class LowLatencyHandle(tuple[Any, ...]):
    """A tuple as DeepEP's, for clients that look into it."""

    route: Route
    buffer: MaybeTensor = None


class Buffer(AnyBuffer):
    """Rows come once to each rank, with ids of its experts or -1; the low-latency pair has a row for each expert.

    Calls are collective over the group, but for `get_dispatch_layout`. They work on the current stream, after their
    previous event.
    """

    num_sms = 20

    def __init__(
        self, group: dist.ProcessGroup | None = None, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0,
        low_latency_mode: bool = False, num_qps_per_rank: int = 24, allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False, explicitly_destroy: bool = False, enable_shrink: bool = False, comm: object = None,
    ) -> None:  # fmt: skip
        super().__init__(group)
        self.num_nvl_bytes, self.num_rdma_bytes, self.low_latency_mode = num_nvl_bytes, num_rdma_bytes, low_latency_mode

    @staticmethod
    def is_sm90_compiled() -> bool:
        return True  # else clients refuse groups of more than 8 ranks

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return 0

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Does nothing: there is nothing to clean."""

    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, previous_event: EventOverlap | None = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:  # fmt: skip
        """int32 tokens for each rank, None, int32 tokens for each expert, bool [tokens, ranks], an event."""
        event, in_rank = done(previous_event), ranks_of(topk_idx, num_experts, self.group_size)
        known = topk_idx[(topk_idx >= 0) & (topk_idx < num_experts)]  # dispatch refuses the others, on all ranks
        per_expert = torch.bincount(known, minlength=num_experts)
        return in_rank.sum(0).int(), None, per_expert.int(), in_rank, event

    @torch.no_grad()
    def dispatch(
        self, x: Rows, handle: tuple[Any, ...] | None = None, num_tokens_per_rank: MaybeTensor = None,
        num_tokens_per_rdma_rank: MaybeTensor = None, is_token_in_rank: MaybeTensor = None,
        num_tokens_per_expert: MaybeTensor = None, topk_idx: MaybeTensor = None, topk_weights: MaybeTensor = None,
        expert_alignment: int = 1, num_worst_tokens: int = 0, config: Config | None = None,
        previous_event: EventOverlap | None = None, async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, MaybeTensor, MaybeTensor, list[int] | None, tuple[Any, ...] | None, EventOverlap]:  # fmt: skip
        """Rows that came, ids and weights, rows of each expert rounded up, a handle, an event.

        With num_worst_tokens there are as many rows, zero behind those that came; the host waits all the same. All
        ranks raise RoutingError or CapacityError if arguments do not fit or differ, or more rows come to one of them.
        """
        event = done(previous_event)
        if handle is not None:
            return handle[5].there(x, self.grad_wire), None, None, None, None, event
        per_expert, room = num_tokens_per_expert, None if is_int(num_worst_tokens, 0, 0) else num_worst_tokens
        route = Route(
            self.comm, x, per_expert.numel() if isinstance(per_expert, torch.Tensor) else 0, topk_idx, topk_weights,
            is_token_in_rank, room, alignment=expert_alignment, per_expert=per_expert,
        )  # fmt: skip
        recv, counts = route.there(x, self.wire), route.expert_counts
        if counts is None and per_expert is not None:
            of_experts: Any = per_expert.long().reshape(self.group_size, -1)
            counts = all_to_all_v(of_experts, wire=EXACT, comm=self.comm).sum(0)  # type: ignore[union-attr]
        listed = [] if num_worst_tokens else aligned(counts, expert_alignment).tolist()
        of_ranks = route.counts.cumsum(0).int().to(self.comm.device)
        handle = (of_ranks, None, None, route.source, route.in_rank, route)
        return recv, route.ids, route.weights, listed, handle, event

    internode_dispatch = dispatch

    @torch.no_grad()
    def combine(
        self, x: torch.Tensor, handle: tuple[Any, ...], topk_weights: MaybeTensor = None, bias: Any = None,
        config: Config | None = None, previous_event: EventOverlap | None = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, MaybeTensor, EventOverlap]:  # fmt: skip
        """Sums at home of rows, with bias, and of topk_weights; an event. This rank alone raises what does not fit."""
        event = done(previous_event)
        return *self._home(handle[5], x, topk_weights, bias), event

    internode_combine = combine

    @torch.no_grad()
    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int,
        cumulative_local_expert_recv_stats: MaybeTensor = None, dispatch_wait_recv_cost_stats: MaybeTensor = None,
        use_fp8: bool = True, round_scale: bool = False, use_ue8m0: bool = False, async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, torch.Tensor, LowLatencyHandle, EventOverlap, Callable[[], None]]:  # fmt: skip
        """Rows of each expert, [local experts, slots, hidden] or FP8 and scales; how many; a handle; an event; a hook.

        A token is rounded to FP8 at home, and travels once to each rank. Slots without a row are not written. The hook
        waits for rows; all ranks call their hooks at the same place among their calls. RoutingError comes out on all
        ranks, also where a token names an expert twice.
        """
        _refuse_times(dispatch_wait_recv_cost_stats)
        size, width = self.group_size, self._room(num_max_dispatch_tokens_per_rank)
        route = Route(
            self.comm, x, num_experts, topk_idx, None, None, width, padded=False, once=True,
            made=lambda: to_fp8(x, round_scale, use_ue8m0) if use_fp8 else x,
        )  # fmt: skip
        parts: Any = route.made if use_fp8 else (x,)
        experts, route.made = route.num_local, None
        route.lay_out(torch.arange(experts, device=x.device) * width)
        at = route.expert, route.place % width
        made = [part.new_empty(experts, width, part.shape[1]) for part in parts]
        if use_fp8:  # scales are column-major there
            made[1] = parts[1].new_empty(experts, parts[1].shape[1], width).transpose(1, 2)
        pending = [route.there(part, EXACT if use_fp8 else self.wire, async_op=True) for part in parts]

        @torch.no_grad()
        def hook() -> None:
            for out, work in zip(made, pending, strict=False):  # none are left in a second call
                out[at] = work.wait().index_select(0, route.row).view(out.dtype)
            pending.clear()

        if not return_recv_hook:
            hook()
        numbers = route.source.new_zeros(experts, width)
        numbers[at] = route.source[route.row]
        source_ranks = torch.repeat_interleave(route.counts[:, self.rank].to(x.device))
        pairs = route.expert * size + source_ranks[route.row]
        of_ranks = torch.bincount(pairs, minlength=experts * size).view(experts, size)
        layout = (of_ranks.cumsum(1) - of_ranks << 32) | of_ranks
        handle = LowLatencyHandle((numbers, layout, width // size, x.shape[1], num_experts))
        handle.route = route
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats += route.expert_counts
        return (tuple(made) if use_fp8 else made[0]), route.expert_counts.int(), handle, done(), hook

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """bfloat16 [local experts, slots, hidden], to be filled for a combine with zero_copy."""
        if handle.buffer is None:
            handle.buffer = torch.zeros(*handle[0].shape, handle[3], dtype=torch.bfloat16, device=self.comm.device)
        return handle.buffer

    @torch.no_grad()
    def low_latency_combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: LowLatencyHandle,
        use_logfmt: bool = False, zero_copy: bool = False, async_finish: bool = False, return_recv_hook: bool = False,
        out: MaybeTensor = None, combine_wait_recv_cost_stats: MaybeTensor = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None]]:  # fmt: skip
        """Weighted sums at home; an event; a hook, as dispatch's. An id of -1 leaves its expert out.

        Weights travel to the experts, so that one row comes home from each rank. This rank alone raises RoutingError if
        shapes are not the dispatch's.
        """
        _refuse_times(combine_wait_recv_cost_stats)
        route, x = handle.route, self.get_next_low_latency_combine_buffer(handle) if zero_copy else x
        given = [[*each.shape] for each in (x[..., 0], topk_idx, topk_weights)]
        if given != (wanted := [[*each.shape] for each in (handle[0], route.topk_idx, route.topk_idx)]):
            raise RoutingError(f"x[..., 0], topk_idx and topk_weights are {given}; accepted: {wanted}")
        weights = route.there(topk_weights.float().masked_fill(topk_idx < 0, 0), EXACT)
        pending: Any = route.plan.back(route.sums(x.flatten(0, 1), weights), wire=self.combine_wire, async_op=True)
        y = x.new_empty(len(topk_idx), x.shape[2]) if out is None else out

        @torch.no_grad()
        def hook() -> None:
            y.copy_(pending.wait())

        if not return_recv_hook:
            hook()
        return y, done(), hook


def _refuse_times(stats: MaybeTensor) -> None:
    if stats is not None:
        raise NotImplementedError("a tensor for the times that ranks wait; those are in the flight recorder")


def to_fp8(x: torch.Tensor, round_scale: bool, use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 rows, and scales of 128 columns each: float32, powers of two, or their exponents, four in an int32."""
    columns = 512 if use_ue8m0 else 128
    if x.shape[1] % columns or use_ue8m0 > round_scale:
        raise ArgumentError(f"{x.shape[1]} columns, round_scale={round_scale}; FP8 takes multiples of {columns}")
    grouped = x.float().view(len(x), x.shape[1] // 128, 128)
    scales = grouped.abs().amax(2).clamp_min(1e-4) / 448
    if round_scale:
        scales = scales.log2().ceil().exp2()
    rows = (grouped / scales[..., None]).to(torch.float8_e4m3fn).view(x.shape)
    if use_ue8m0:
        scales = (scales.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)
    return rows, scales
