"""`ElasticBuffer`, DeepEP's second API."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import ArgumentError
from thinwire.integrations.deep_ep.events import EventOverlap, done
from thinwire.integrations.deep_ep.legacy import Buffer
from thinwire.integrations.deep_ep.routes import EXACT, GroupOfBuffer, Route, Rows, Slots, aligned

_Tensor = torch.Tensor | None


class EPHandle:
    """A dispatch's routing, and of it what clients read. Sums over experts and ranks are int32, running, inclusive."""

    def __init__(
        self, route: Route, do_expand: bool, alignment: int, most: int, num_sms: int, counts: torch.Tensor, exact: bool
    ) -> None:
        self.route, self.topk_idx, self.num_experts = route, route.topk_idx, route.num_experts
        self.do_expand, self.expert_alignment, self.num_sms = do_expand, alignment, num_sms
        self.num_max_tokens_per_rank, size = most, route.plan.comm.size
        rounded = aligned(counts, alignment)
        of_ranks = route.counts[:, route.plan.comm.rank]
        self.psum_num_recv_tokens_per_scaleup_rank = of_ranks.cumsum(0).int().to(counts.device)
        # Expanded, an expert's rows end before the next one's multiple of the alignment.
        self.psum_num_recv_tokens_per_expert = (rounded.cumsum(0) - (rounded - counts) * do_expand).int()
        self.num_unaligned_recv_tokens_per_expert = counts.int()
        self.num_recv_tokens_per_expert_list: list[int] = rounded.tolist() if exact else []
        self.capacity = 0 if exact else most * size
        self.num_recv_tokens = self.capacity or route.num_rows
        here = min(0 if self.topk_idx is None else self.topk_idx.shape[1], route.num_local)
        worst = torch.tensor(most * size * here + (alignment - 1) * route.num_local)
        self.num_expanded_tokens = int(rounded.sum() if exact else aligned(worst, alignment))
        self.slots = Slots(route, lambda _: rounded.cumsum(0) - rounded) if do_expand else None


class ElasticBuffer(GroupOfBuffer):
    """Rows come once to each rank, or with `do_expand` once to each expert, by expert.

    Calls are collective over the group. A handle can be used any number of times, in any order.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, num_bytes: int | None = None, num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0, hidden: int = 0, num_topk: int = 0, use_fp8_dispatch: bool = False,
        deterministic: bool = False, allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True, sl_idx: int = 3, num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300, num_gpu_timeout_secs: int = 100, explicitly_destroy: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(group)
        self.num_bytes, self.num_max_tokens_per_rank = num_bytes or 0, num_max_tokens_per_rank

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup, num_max_tokens_per_rank: int, hidden: int, num_topk: int = 0,
        use_fp8_dispatch: bool = False, allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
    ) -> int:  # fmt: skip
        """0: the memory is the communicator's."""
        return 0

    capture = Buffer.capture

    def get_theoretical_num_sms(
        self, num_experts: int, num_topk: int, num_scaleout_topk: int = 0, rdma_gbs: float = 0, nvlink_gbs: float = 0,
        sm_read_gbs: float = 200, sm_write_gbs: float = 50,
    ) -> int:  # fmt: skip
        """A number that clients pass back."""
        return Buffer.num_sms

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """A number that clients pass back."""
        return 1

    def get_physical_domain_size(self) -> tuple[int, int]:
        """One domain of all ranks."""
        return 1, self.group_size

    get_logical_domain_size = get_physical_domain_size

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Waits for all ranks."""
        self.comm.barrier()

    @torch.no_grad()
    def dispatch(
        self, x: Rows, topk_idx: _Tensor = None, topk_weights: _Tensor = None,
        cumulative_local_expert_recv_stats: _Tensor = None, num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None, expert_alignment: int | None = None, num_sms: int = 0,
        num_qps: int = 0, previous_event: Any = None, previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False, allocate_on_comm_stream: bool = False, handle: EPHandle | None = None,
        do_handle_copy: bool = True, do_cpu_sync: bool | None = None, do_expand: bool = False,
        do_zero_padding: bool = False, use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, _Tensor, _Tensor, EPHandle, EventOverlap]:  # fmt: skip
        """Rows that came, ids or None, weights if they were given, a handle, an event.

        With `do_cpu_sync=False` there are as many rows as could come; the host waits all the same. Slots of
        `do_expand` without a row are zero. With a handle, there are weights only of `do_expand`.

        Raises:
            RoutingError: arguments do not fit; on all ranks.
        ArgumentError: ids beside a handle.
        """
        event, wire, given = done(previous_event), self.grad_wire, handle
        if handle is None:
            most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
            ids = topk_idx.clone() if do_handle_copy and topk_idx is not None else topk_idx
            exact, wire = do_cpu_sync is not False, self.wire
            route = Route(self.comm, x, None, num_experts or 0, ids, topk_weights, None if exact else most)
            assert route.ids is not None
            counts = torch.bincount(route.ids[route.ids >= 0], minlength=route.num_local)
            handle = EPHandle(route, do_expand, expert_alignment or 1, most, num_sms, counts, exact)
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats += counts
        elif topk_idx is not None:
            raise ArgumentError("topk_idx and a handle were passed; a handle has the ids of its dispatch")
        route, slots = handle.route, handle.slots
        if slots is None:
            recv = route.there(x, wire, handle.capacity)
            ids, weights = route.padded(handle.capacity) if given is None else (None, None)
            return recv, ids, None if topk_weights is None else weights, handle, event
        rows = route.there(x, wire)
        recv = tuple(_expand(part, handle) for part in rows) if isinstance(rows, tuple) else _expand(rows, handle)
        if topk_weights is None:
            return recv, None, None, handle, event
        weights = route.weights if given is None else route.there(topk_weights.float(), EXACT)
        assert weights is not None
        of_slots = weights.new_zeros(handle.num_expanded_tokens)
        return recv, None, of_slots.index_copy_(0, slots.place, weights[slots.row, slots.k]), handle, event

    @torch.no_grad()
    def combine(
        self, x: torch.Tensor, handle: EPHandle, topk_weights: _Tensor = None, bias: Any = None, num_sms: int = 0,
        num_qps: int = 0, previous_event: Any = None, previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, _Tensor, EventOverlap]:  # fmt: skip
        """Sums at home of rows, with bias, and of topk_weights, which are 1-D with `do_expand`; an event."""
        event, route, slots = done(previous_event), handle.route, handle.slots
        wire = self.combine_wire if topk_weights is None else self.grad_wire
        if slots is not None:
            x = slots.sums(x).to(x.dtype)
            if topk_weights is not None and route.weights is not None:
                of_rows = torch.zeros_like(route.weights)
                of_rows[slots.row, slots.k] = topk_weights[slots.place].float()
                topk_weights = of_rows
        return route.home(x, wire, bias), route.weights_home(topk_weights), event


def _expand(rows: torch.Tensor, handle: EPHandle) -> torch.Tensor:
    assert handle.slots is not None
    return handle.slots.spread(rows, torch.zeros_like(rows[:0]).new_zeros(handle.num_expanded_tokens, *rows.shape[1:]))
