"""`ElasticBuffer`, DeepEP's second API."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import ArgumentError, RoutingError
from thinwire.integrations.deep_ep.events import EventOverlap, done
from thinwire.integrations.deep_ep.routes import EXACT, AnyBuffer, MaybeTensor, Route, Rows, aligned


class EPHandle:
    """A dispatch's routing, and what clients read of it. `psum_...` are int32, inclusive running sums."""

    def __init__(self, route: Route, do_expand: bool, alignment: int, most: int, num_sms: int) -> None:
        self.route, self.topk_idx, self.num_experts = route, route.topk_idx, route.num_experts
        self.do_expand, self.expert_alignment, self.num_sms = do_expand, alignment, num_sms
        self.num_max_tokens_per_rank, counts, local = most, route.expert_counts, route.num_local
        rounded = aligned(counts, alignment)
        of_ranks = route.counts[:, route.plan.comm.rank]
        self.psum_num_recv_tokens_per_scaleup_rank = of_ranks.cumsum(0).int().to(counts.device)
        # Expanded, an expert's rows end before the next one's multiple of the alignment.
        self.psum_num_recv_tokens_per_expert = (rounded.cumsum(0) - (rounded - counts) * do_expand).int()
        self.num_unaligned_recv_tokens_per_expert = counts.int()
        self.num_recv_tokens = len(route.source)
        self.num_recv_tokens_per_expert_list: list[int] = [] if route.capacity else rounded.tolist()
        could_come = route.capacity * min(self.topk_idx.shape[1], local) + (alignment - 1) * local
        come = sum(self.num_recv_tokens_per_expert_list)
        self.num_expanded_tokens = aligned(could_come, alignment) if route.capacity else come
        if do_expand:
            route.lay_out(rounded.cumsum(0) - rounded)


class ElasticBuffer(AnyBuffer):
    """Rows come once to each rank, or with `do_expand` once to each expert, by expert. Calls are collective."""

    def __init__(
        self, group: dist.ProcessGroup | None, num_bytes: int | None = None, num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0, hidden: int = 0, num_topk: int = 0, use_fp8_dispatch: bool = False,
        deterministic: bool = False, allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True, sl_idx: int = 3, num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300, num_gpu_timeout_secs: int = 100, explicitly_destroy: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(group)
        self.num_bytes, self.num_max_tokens_per_rank = num_bytes or 0, num_max_tokens_per_rank
        self.rank_idx, self.num_ranks, self.num_allocated_qps = self.rank, self.group_size, num_allocated_qps

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup, num_max_tokens_per_rank: int, hidden: int, num_topk: int = 0,
        use_fp8_dispatch: bool = False, allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
    ) -> int:  # fmt: skip
        return 0

    def get_theoretical_num_sms(
        self, num_experts: int, num_topk: int, num_scaleout_topk: int = 0, rdma_gbs: float = 0, nvlink_gbs: float = 0,
        sm_read_gbs: float = 200, sm_write_gbs: float = 50,
    ) -> int:  # fmt: skip
        return 20

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        return 1

    def get_physical_domain_size(self) -> tuple[int, int]:
        return 1, self.group_size  # one domain of all ranks

    get_logical_domain_size = get_physical_domain_size

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Waits for all ranks."""
        self.comm.barrier()

    @torch.no_grad()
    def dispatch(
        self, x: Rows, topk_idx: MaybeTensor = None, topk_weights: MaybeTensor = None,
        cumulative_local_expert_recv_stats: MaybeTensor = None, num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None, expert_alignment: int | None = None, num_sms: int = 0,
        num_qps: int = 0, previous_event: Any = None, previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False, allocate_on_comm_stream: bool = False, handle: EPHandle | None = None,
        do_handle_copy: bool = True, do_cpu_sync: bool | None = None, do_expand: bool = False,
        do_zero_padding: bool = False, use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, MaybeTensor, MaybeTensor, EPHandle, EventOverlap]:  # fmt: skip
        """Rows that came; ids, None with `do_expand`; weights, if they were given; a handle; an event.

        With `do_cpu_sync=False` there are as many rows as could come; the host waits all the same. Slots of
        `do_expand` without a row are zero. Without a handle, all ranks raise RoutingError or CapacityError.
        """
        if use_tma_aligned_col_major_sf:
            raise NotImplementedError("use_tma_aligned_col_major_sf=True; scales are row-major here")
        event, wire, made = done(previous_event, previous_event_before_epilogue), self.grad_wire, handle is None
        if handle is None:
            most = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
            alignment, wire = 1 if expert_alignment is None else expert_alignment, self.wire
            route = Route(
                self.comm, x, 0 if num_experts is None else num_experts, topk_idx, topk_weights, None,
                self._room(most) if do_cpu_sync is False else None, once=do_expand, alignment=alignment,
            )  # fmt: skip
            route.topk_idx = route.topk_idx.clone()
            handle, weights = EPHandle(route, do_expand, alignment, most, num_sms), route.weights
        elif topk_idx is not None or (do_expand and not handle.do_expand):
            what = "topk_idx" if topk_idx is not None else "do_expand=True"
            raise ArgumentError(f"{what} was passed beside a handle that has its own, or was made without")
        elif topk_weights is not None:
            weights = handle.route.there(topk_weights.float(), EXACT).where(handle.route.ids >= 0, 0)
        route = handle.route
        recv, recv_weights = route.there(x, wire), None if topk_weights is None else weights
        if made and cumulative_local_expert_recv_stats is not None:  # after all that peers wait for
            cumulative_local_expert_recv_stats += handle.num_unaligned_recv_tokens_per_expert
        if not do_expand:
            return recv, route.ids.clone(), recv_weights, handle, event  # it is used again
        size = handle.num_expanded_tokens
        recv = tuple(route.spread(part, size) for part in recv) if isinstance(recv, tuple) else route.spread(recv, size)
        if recv_weights is not None:
            of_slots = recv_weights[route.row, route.k]
            recv_weights = of_slots.new_zeros(size).index_copy_(0, route.place, of_slots)
        return recv, None, recv_weights, handle, event

    @torch.no_grad()
    def combine(
        self, x: torch.Tensor, handle: EPHandle, topk_weights: MaybeTensor = None, bias: Any = None, num_sms: int = 0,
        num_qps: int = 0, previous_event: Any = None, previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, MaybeTensor, EventOverlap]:  # fmt: skip
        """Sums at home of rows, with bias; each token's topk_weights, from the ranks of their experts; an event."""
        event, route, weights = done(previous_event, previous_event_before_epilogue), handle.route, topk_weights
        if handle.do_expand:
            if len(x) != handle.num_expanded_tokens:
                raise RoutingError(f"combine got {len(x)} rows; accepted: {handle.num_expanded_tokens}")
            x = route.sums(x).to(x.dtype)
            if topk_weights is not None:
                weights = topk_weights.new_zeros(route.ids.shape)
                weights[route.row, route.k] = topk_weights[route.place]
        elif topk_weights is not None:
            weights = topk_weights.where(route.ids[: len(topk_weights)] >= 0, 0)
        return *self._home(route, x, weights, bias), event
