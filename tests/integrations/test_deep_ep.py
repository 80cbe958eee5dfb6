"""DeepEP's API gives what DeepEP gives: layouts, sums, replays; errors on all ranks; and leaves a real DeepEP alone."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("numba", reason="CPU ranks need numba")

from thinwire.comm.communicator import Communicator
from thinwire.errors import ArgumentError, CapacityError, ConfigMismatch, CountsError, RoutingError, WireFormatError
from thinwire.integrations import deep_ep
from thinwire.integrations.deep_ep.elastic import ElasticBuffer
from thinwire.integrations.deep_ep.events import EventOverlap
from thinwire.integrations.deep_ep.legacy import Buffer
from thinwire.integrations.deep_ep.routes import VARIABLE, AnyBuffer
from thinwire.testing import run_ranks

HIDDEN, EXPERTS, TOP_K = 256, 8, 3


@pytest.fixture(autouse=True)
def _as_if_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnyBuffer, "installed", (None, None, None))
    monkeypatch.delenv(VARIABLE, raising=False)
    for name in ("deep_ep", "deep_ep.utils", "deep_ep.utils.event"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def tokens_of(rank: int) -> int:
    return [17, 5, 0, 9][rank]


def routed(rank: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, ids, one of them -1, and weights of a rank."""
    generator = torch.Generator().manual_seed(rank)
    count = tokens_of(rank)
    x = torch.randn(count, HIDDEN, generator=generator).to(dtype)
    weights, ids = torch.randn(count, EXPERTS, generator=generator).softmax(-1).topk(TOP_K, -1)
    if count > 3:
        ids[3, 1], ids[2] = -1, -1
    return x, ids, weights


def dense(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Expert e multiplies by e + 1."""
    return (torch.where(ids >= 0, weights * (ids + 1), 0).sum(1, keepdim=True) * x.float()).to(x.dtype)


def near(got: torch.Tensor, wanted: torch.Tensor, limit: float) -> bool:
    return got.shape == wanted.shape and float((got - wanted).float().norm()) <= limit * float(wanted.float().norm())


def records(rank: int, size: int) -> list[tuple[int, int]]:
    """(source rank, token) of each row that comes to a rank."""
    own = range(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
    return [(r, t) for r in range(size) for t, row in enumerate(routed(r)[1].tolist()) if any(e in own for e in row)]


def legacy(comm: Communicator, wire: str) -> None:
    deep_ep.install(wire=wire)
    buffer = Buffer(comm.group)
    first, rank, size = comm.rank * EXPERTS // comm.size, comm.rank, comm.size
    exact, limit = wire == "none", 0.003 if wire == "none" else 0.02  # sums are rounded to bfloat16
    x, ids, weights = routed(rank)
    per_rank, _, per_expert, in_rank, event = buffer.get_dispatch_layout(ids, EXPERTS)
    event.current_stream_wait()
    layout: Any = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
    recv, recv_ids, recv_weights, counts, handle, _ = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, expert_alignment=4, previous_event=buffer.capture(), **layout
    )
    came = records(rank, size)
    assert len(recv) == len(came) and handle[3].tolist() == [token for _, token in came]
    for row, (source, token) in enumerate(came):
        x_, ids_, weights_ = (part[token] for part in routed(source))
        local = torch.where((ids_ >= first) & (ids_ < first + EXPERTS // size), ids_ - first, -1)
        assert torch.equal(recv_ids[row], local)
        assert torch.equal(recv_weights[row], torch.where(local >= 0, weights_, 0))
        assert near(recv[row], x_, 0.0 if exact else 0.02)
    of_experts = torch.bincount(recv_ids[recv_ids >= 0], minlength=EXPERTS // size)
    assert counts == (-(-of_experts // 4) * 4).tolist()
    y = dense(recv, torch.where(recv_ids >= 0, recv_ids + first, -1), recv_weights)
    wanted, bias = dense(x, ids, weights), torch.ones_like(x)
    for _ in range(2):  # any number of times
        home, none, _ = buffer.combine(y, handle)
        assert none is None and near(home, wanted, limit)
    with_bias = buffer.combine(y, handle, bias=(bias, bias))[0]
    assert torch.equal(with_bias, (home.float() + 1 + 1).to(x.dtype))  # rounded once
    # As clients' backward does: replayed, then summed with weights; in `none`.
    again, *nothing, _ = buffer.dispatch(x, handle=handle)
    assert nothing == [None] * 4 and torch.equal(
        again, torch.stack([routed(r)[0][t] for r, t in came]) if came else again
    )
    summed, weights_home, _ = buffer.combine(again, handle, topk_weights=recv_weights)
    assert torch.equal(weights_home, torch.where(ids >= 0, weights, 0))
    assert torch.equal(summed, (x.float() * in_rank.sum(1, keepdim=True)).to(x.dtype))
    # Of a fixed shape.
    worst = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_worst_tokens=40, **layout)
    assert worst[0].shape == (40, HIDDEN) and worst[3] == [] and not worst[0][len(came) :].any()
    assert torch.equal(worst[0][: len(came)], recv) and torch.equal(worst[1][: len(came)], recv_ids)
    assert bool((worst[1][len(came) :] == -1).all()) and not worst[2][len(came) :].any()
    assert torch.equal(buffer.combine(torch.cat([y, y.new_ones(40 - len(y), HIDDEN)]), worst[4])[0], home)
    assert buffer.dispatch(x, handle=worst[4])[0].shape == (40, HIDDEN)  # replayed, too
    # FP8 rows and scales as they are, rows without ids, and the other name.
    pair = x.to(torch.float8_e4m3fn), torch.rand(len(x), HIDDEN // 128)
    rows, scales = buffer.internode_dispatch(pair, **layout)[0]
    assert rows.dtype == torch.float8_e4m3fn and len(rows) == len(scales) == len(came)
    sent = [routed(r)[0].to(torch.float8_e4m3fn).view(torch.uint8)[t] for r, t in came]
    assert not came or torch.equal(rows.view(torch.uint8), torch.stack(sent))
    _, no_ids, no_weights, counts, handle, _ = buffer.dispatch(x, **layout)
    assert no_ids is no_weights is None and counts == of_experts.tolist()
    assert near(buffer.internode_combine(recv, handle)[0], summed, 0.003 if exact else 0.02)


@pytest.mark.parametrize("wire", ["none", "int8"])
def test_rows_come_once_to_each_rank_and_go_home_in_sums(wire: str) -> None:
    run_ranks(legacy, 2, wire)


@pytest.mark.exhaustive
@pytest.mark.parametrize("wire", ["none", "int8", "int8+h64"])
def test_rows_come_once_to_each_rank_on_four(wire: str) -> None:
    run_ranks(legacy, 4, wire)


def low_latency(comm: Communicator, wire: str) -> None:
    deep_ep.install(wire=wire)
    buffer, rank, size = Buffer(comm.group, low_latency_mode=True), comm.rank, comm.size
    x, ids, weights = (torch.cat([part] * 3)[:24] for part in routed(rank))
    x = torch.cat([x, x], 1)  # 512 columns
    most, local = 24, EXPERTS // size
    stats = torch.zeros(local, dtype=torch.int32)
    pending = []
    for fp8, scale in ((False, False), (True, False), (True, True)):
        arguments: Any = {"use_fp8": fp8, "round_scale": scale, "use_ue8m0": scale, "return_recv_hook": True}
        recv, counts, handle, _, hook = buffer.low_latency_dispatch(x, ids, most, EXPERTS, stats, **arguments)
        pending.append((fp8, scale, recv, counts, handle, hook))
    for fp8, scale, recv, counts, handle, hook in reversed(pending):
        hook()
        if not fp8:
            came = recv[0, 0].clone()
            recv[0, 0] = 5
            hook()  # nothing is left to do
            assert bool((recv[0, 0] == 5).all())
            recv[0, 0] = came
        if fp8:
            raw, recv = recv[1], (recv[0], recv[1].clone(memory_format=torch.contiguous_format))
            scales = recv[1].view(torch.uint8).int().mul(2**23).view(torch.float32) if scale else recv[1]
            rows = recv[0].float().view(*scales.shape, 128) * scales[..., None]
            recv = rows.view(recv[0].shape).bfloat16()
            assert recv.shape == (local, most * size, 512) and scales.shape[2] == 4
            assert raw.stride(1) == 1  # column-major, as theirs
        sources, ranges = handle[0], handle[1]
        for expert in range(local):
            wanted = [
                (source, token)
                for source in range(size)
                for token, row in enumerate(torch.cat([routed(source)[1]] * 3)[:24].tolist())
                if expert + rank * local in row
            ]
            assert counts[expert] == len(wanted)
            assert sources[expert, : len(wanted)].tolist() == [token for _, token in wanted]
            for source in range(size):
                begin, count = int(ranges[expert, source]) >> 32, int(ranges[expert, source]) & (2**32 - 1)
                assert count == sum(s == source for s, _ in wanted) and begin == sum(s < source for s, _ in wanted)
            for slot, (source, token) in enumerate(wanted):
                x_ = torch.cat([routed(source)[0]] * 3)[:24]
                assert near(
                    recv[expert, slot], torch.cat([x_, x_], 1)[token], 0.05 if fp8 else 0 if wire == "none" else 0.02
                )
        scaled = recv * (torch.arange(local) + rank * local + 1).view(-1, 1, 1)
        scaled = torch.where(torch.arange(most * size)[None, :, None] < counts[:, None, None], scaled, float("nan"))
        limit = 0.06 if fp8 else 0.006 if wire == "none" else 0.02
        for zero_copy in (False, True):
            out = torch.empty_like(x)
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:] = scaled
            y, _, hook = buffer.low_latency_combine(
                scaled, ids, weights, handle, zero_copy=zero_copy, return_recv_hook=True, out=out
            )
            hook()
            assert y is out and near(out, dense(x, ids, weights), limit)
        masked = ids.clone()
        masked[:, 0] = -1
        y, _, _ = buffer.low_latency_combine(scaled, masked, weights, handle)
        assert near(y, dense(x, masked, weights), limit)
    assert torch.equal(stats, counts * 3)


@pytest.mark.parametrize("wire", ["none", "int8"])
def test_the_low_latency_pair_has_a_row_for_each_expert(wire: str) -> None:
    run_ranks(low_latency, 2, wire)


def elastic(comm: Communicator, wire: str) -> None:
    deep_ep.install(wire=wire)
    size, rank, local = comm.size, comm.rank, EXPERTS // comm.size
    first, limit = rank * local, 0.003 if wire == "none" else 0.02
    buffer = ElasticBuffer(comm.group, num_max_tokens_per_rank=20, hidden=HIDDEN, num_topk=TOP_K)
    x, ids, weights = routed(rank)
    wanted, kept = dense(x, ids, weights), torch.where(ids >= 0, weights, 0)
    for sync in (None, False):
        recv, recv_ids, recv_weights, handle, _ = buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, num_experts=EXPERTS, do_cpu_sync=sync
        )
        assert len(recv) == handle.num_recv_tokens == (len(records(rank, size)) if sync is None else 20 * size)
        y = dense(recv, torch.where(recv_ids >= 0, recv_ids + first, -1), recv_weights)
        home, weights_home, _ = buffer.combine(y, handle, topk_weights=recv_weights)
        assert near(home, wanted, limit) and torch.equal(weights_home, kept)
        ones = buffer.combine(y, handle, topk_weights=torch.ones_like(recv_weights))[1]
        assert torch.equal(ones, (ids >= 0).float())  # each from the rank of its expert
        assert near(buffer.combine(y, handle)[0], wanted, limit)
        assert int(handle.psum_num_recv_tokens_per_scaleup_rank[-1]) == len(records(rank, size))
        again = buffer.dispatch(x, handle=handle, num_sms=handle.num_sms, do_cpu_sync=False)
        assert (
            near(recv, again[0], 0.0 if wire == "none" else 0.02)
            and again[2] is None
            and torch.equal(again[1], recv_ids)
        )
        again[1].fill_(-1)  # clients may write into theirs
        replayed = buffer.dispatch(x, handle=handle, topk_weights=weights)[2]
        assert torch.equal(replayed, recv_weights)
    for alignment, sync in ((1, None), (8, None), (8, False), (1, False)):
        recv, no_ids, slot_weights, handle, _ = buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, num_experts=EXPERTS, do_expand=True, expert_alignment=alignment,
            do_cpu_sync=sync,
        )  # fmt: skip
        ends, exact = (
            handle.psum_num_recv_tokens_per_expert.tolist(),
            handle.num_unaligned_recv_tokens_per_expert.tolist(),
        )
        starts = [-(-end // alignment) * alignment for end in [0, *ends[:-1]]]
        assert no_ids is None and [end - start for start, end in zip(starts, ends, strict=True)] == exact
        room = size * 20 * min(TOP_K, local) + (alignment - 1) * local
        total = sum(handle.num_recv_tokens_per_expert_list) if sync is None else -(-room // alignment) * alignment
        assert recv.shape == (total, HIDDEN) and slot_weights.shape == (total,)
        y, used = torch.zeros_like(recv), torch.zeros(total, dtype=torch.bool)
        for expert, (start, end) in enumerate(zip(starts, ends, strict=True)):
            used[start:end] = True
            y[start:end] = (recv[start:end].float() * slot_weights[start:end, None] * (first + expert + 1)).to(x.dtype)
        assert not recv[~used].any() and not slot_weights[~used].any()
        y[~used] = float("nan")
        assert near(buffer.combine(y, handle)[0], wanted, max(limit, 0.006))
        weights_home = buffer.combine(torch.where(used[:, None], y, 0), handle, topk_weights=slot_weights)[1]
        assert torch.equal(weights_home, kept)
        again, _, weights_again, same, _ = buffer.dispatch(x, handle=handle, topk_weights=weights, do_expand=True)
        assert same is handle and near(recv, again, 0.0 if wire == "none" else 0.02)
        assert torch.equal(weights_again, slot_weights)


@pytest.mark.parametrize("wire", ["none", "int8"])
def test_the_second_api_has_compact_and_expanded_rows(wire: str) -> None:
    run_ranks(elastic, 2, wire)


@pytest.mark.exhaustive
def test_the_other_modes_on_four_ranks() -> None:
    run_ranks(elastic, 4, "none")
    run_ranks(low_latency, 4, "int8")


def trained(comm: Communicator) -> None:
    """Gradients through a dispatch and a combine, whose backward replays their handles, as clients write them."""
    module = deep_ep.install(wire="int8", combine_wire="none")
    buffer = module.Buffer(comm.group)

    class Dispatch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
            recv, recv_ids, recv_weights, _, ctx.handle, _ = buffer.dispatch(
                x, topk_idx=ids, topk_weights=weights, num_tokens_per_rank=per_rank,
                num_tokens_per_expert=per_expert, is_token_in_rank=in_rank,
            )  # fmt: skip
            ctx.mark_non_differentiable(recv_ids)
            return recv, recv_ids, recv_weights, ctx.handle

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            grad_x, grad_weights, _ = buffer.combine(grads[0].contiguous(), ctx.handle, topk_weights=grads[2])
            return grad_x, None, grad_weights

    class Combine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor, handle: Any) -> torch.Tensor:
            ctx.handle = handle
            home: torch.Tensor = buffer.combine(y, handle)[0]
            return home

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return buffer.dispatch(grads[0].contiguous(), handle=ctx.handle)[0], None

    x, ids, weights = routed(comm.rank, torch.float32)
    gradients = []
    for through_ranks in (True, False):
        leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
        if through_ranks:
            recv, recv_ids, recv_weights, handle = Dispatch.apply(leaves[0], ids, leaves[1])
            experts = torch.where(recv_ids >= 0, recv_ids + comm.rank * EXPERTS // comm.size, -1)
            y: torch.Tensor = Combine.apply(dense(recv, experts, recv_weights), handle)
        else:
            y = dense(leaves[0], ids, leaves[1])
        (y * torch.cos(torch.arange(y.numel()).view(y.shape))).sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for got, wanted, limit in zip(*gradients, (1e-6, 0.02), strict=True):
        assert got is not None and wanted is not None and near(got, wanted, limit)  # weights' are of int8 rows
    assert gradients[0][1] is not None and not torch.equal(gradients[0][1], gradients[1][1])  # type: ignore[arg-type]


def test_clients_train_through_replayed_handles() -> None:
    run_ranks(trained, 2)


def refused(comm: Communicator) -> None:
    buffer, rank = Buffer(comm.group), comm.rank
    x, ids, weights = routed(0)
    layout = dict(
        zip(("num_tokens_per_expert", "is_token_in_rank"), buffer.get_dispatch_layout(ids, EXPERTS)[2:4], strict=True)
    )
    good: Any = {"x": x, "topk_idx": ids, "topk_weights": weights, **layout}
    scales = torch.ones(17, 2)
    elastic = ElasticBuffer(comm.group, num_max_tokens_per_rank=32)
    for odd, said in (
        ({"topk_idx": torch.where(ids == 3, EXPERTS, ids)}, f"topk_idx has {EXPERTS}; accepted: -1 ... {EXPERTS - 1}"),
        ({"topk_idx": ids[:4]}, "topk_idx is torch.int64 [4, 3]; accepted: int64 [17, top_k]"),
        ({"topk_weights": weights[:, :1]}, "topk_weights is torch.float32 [17, 1]; accepted: floats [17, 3]"),
        (
            {"is_token_in_rank": torch.ones(17, 5, dtype=torch.bool)},
            "is_token_in_rank is torch.bool [17, 5]; accepted: ",
        ),
        ({"is_token_in_rank": layout["is_token_in_rank"].int()}, "is_token_in_rank is torch.int32 [17, 2]; accepted: "),
        ({"num_tokens_per_expert": torch.ones(3)}, "there are 3 experts; accepted: multiples of the group's 2 ranks"),
        (
            {"topk_idx": None, "is_token_in_rank": None},
            "a dispatch without a handle needs topk_idx or is_token_in_rank",
        ),
        ({"x": x.double()}, "x is torch.float64 [17, 256]; accepted: bfloat16"),
        ({"x": x.to(torch.float8_e4m3fn)}, "x is torch.float8_e4m3fn without scales"),
        (
            {"x": (x.to(torch.float8_e4m3fn), scales[:3])},
            "scales are torch.float32 [3, 2]; accepted: float32 or int32 [17, columns]",
        ),
    ):
        with pytest.raises(RoutingError) as raised:
            buffer.dispatch(**({**good, **odd} if rank == 1 else good))  # type: ignore[arg-type]
        assert str(raised.value).startswith(said if rank == 1 else "ranks [1] refused their arguments")
        recv, _, _, _, handle, _ = buffer.dispatch(**good)  # and works after it
        assert buffer.combine(recv, handle)[0].shape == x.shape
    # Whatever one rank passes, all are told; what is told of the rest is in the table above.
    pair, bare = (x.to(torch.float8_e4m3fn), scales), {"topk_idx": None, "topk_weights": None}
    odd_values: list[dict[str, Any]] = [
        *({"x": odd} for odd in (None, [1], (x,), (x, None), x.to_sparse(), x.to("meta"), x.to(torch.complex64))),
        *({"topk_idx": odd} for odd in ("ids", ids.bool(), ids.to_sparse(), ids.to("meta"), ids.to(torch.complex64))),
        *({"topk_weights": odd} for odd in ("weights", weights.to_sparse(), weights.to(torch.complex64))),
        *({"is_token_in_rank": odd} for odd in ("all", layout["is_token_in_rank"].to_sparse())),
        *({"num_tokens_per_expert": odd} | bare for odd in (5, [3, 5], layout["num_tokens_per_expert"].to_sparse())),
        {"x": (pair[0], scales.to_sparse())}, {"x": (pair[0], scales.to(torch.complex64))},
        *({"num_worst_tokens": odd} for odd in ("all", -1, 2**50, x)),
        *({"expert_alignment": odd} for odd in (0, "4", x)),
    ]  # fmt: skip
    for odd in odd_values:
        with pytest.raises(RoutingError, match=None if rank == 1 else re.escape("ranks [1] refused their arguments")):
            buffer.dispatch(**({**good, **odd} if rank == 1 else good))
    with pytest.raises(RoutingError, match="the dtype of scales: "):
        buffer.dispatch(**good | {"x": (pair[0], scales.int() if rank else scales)})
    for odd, said in (
        ({"num_tokens_per_expert": torch.ones(2 * EXPERTS)}, f"the experts: [{EXPERTS}, {2 * EXPERTS}]"),
        ({"topk_idx": ids[:, :2], "topk_weights": weights[:, :2]}, "the top_k: [3, 2]"),
        ({"topk_idx": None}, "the top_k: [3, 0]"),
        ({"x": x[:, :128]}, "the columns of x: [256, 128]"),
        ({"x": x.float()}, "the dtype of x: "),
        ({"x": (x.to(torch.float8_e4m3fn), scales)}, "the dtype of x: "),
        ({"num_worst_tokens": 40}, "the room for rows (-1: any): [-1, 40]"),
    ):
        with pytest.raises(RoutingError, match=re.escape(f"ranks disagree on {said}")):
            buffer.dispatch(**({**good, **odd} if rank == 1 else good))  # type: ignore[arg-type]
    # An id that is too large is left out of the layout, and refused with it.
    odd_ids = torch.where(ids == 3, EXPERTS + 1, ids) if rank == 1 else ids
    counts, in_rank = buffer.get_dispatch_layout(odd_ids, EXPERTS)[2:4]
    assert len(counts) == EXPERTS and len(buffer.get_dispatch_layout(ids, 1)[2]) == 1
    with pytest.raises(RoutingError, match=f"topk_idx has {EXPERTS + 1}" if rank == 1 else "refused"):
        buffer.dispatch(x, topk_idx=odd_ids, num_tokens_per_expert=counts, is_token_in_rank=in_rank)
    recv, _, _, _, handle, _ = buffer.dispatch(**good)
    for rows in (recv[1:], recv[:0], torch.cat([recv, recv[:1]])):
        with pytest.raises(CountsError, match=re.escape(f"[{len(rows)}, 256]; this plan is for [{len(recv)}, ...]")):
            buffer.combine(rows, handle)
    with pytest.raises(RoutingError, match=re.escape("bias is [1, 256]; accepted: [17, 256]")):
        buffer.combine(recv, handle, bias=x[:1])
    with pytest.raises(CapacityError, match="has room for 3"):
        buffer.dispatch(**good, num_worst_tokens=3)
    with pytest.raises(CapacityError, match="has room for 8; nothing was sent"):
        buffer.low_latency_dispatch(x[: 4 + 13 * rank], ids[: 4 + 13 * rank], 4, EXPERTS)
    with pytest.raises(RoutingError, match=re.escape("the room for rows (-1: any): [64, 66]")):
        buffer.low_latency_dispatch(x, ids, 32 + rank, EXPERTS)
    with pytest.raises(RoutingError, match=re.escape("ranks disagree on the dtype of x: ")):
        buffer.low_latency_dispatch(x, ids, 32, EXPERTS, use_fp8=rank == 0)
    with pytest.raises(RoutingError, match="FP8 takes multiples of 512"):
        buffer.low_latency_dispatch(x, ids, 32, EXPERTS, round_scale=True, use_ue8m0=True)
    twice = torch.where(ids < 0, -1, ids[:, :1])
    for call in (
        lambda x, ids: buffer.low_latency_dispatch(x, ids, 32, EXPERTS, use_fp8=False),
        lambda x, ids: elastic.dispatch(x, ids, num_experts=EXPERTS, do_cpu_sync=False, do_expand=True),
    ):
        for odd in ((x, twice), (None, ids), (x.to_sparse(), ids), (x, ids.bool()), (x, None)):
            with pytest.raises(RoutingError, match="names an expert twice|x |topk_idx" if rank == 1 else "refused"):
                call(*(odd if rank == 1 else (x, ids)))
    for odd in ({"num_experts": 2.0}, {"num_max_tokens_per_rank": "a"}, {"expert_alignment": 0}, {"do_expand": x}):
        with pytest.raises(RoutingError):
            elastic.dispatch(x, ids, **{"num_experts": EXPERTS, "do_cpu_sync": False} | (odd if rank == 1 else {}))
    with pytest.raises(NotImplementedError, match="flight recorder"):
        buffer.low_latency_dispatch(x, ids, 32, EXPERTS, dispatch_wait_recv_cost_stats=torch.zeros(2, 2))
    experts, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 32, EXPERTS, use_fp8=False)
    with pytest.raises(NotImplementedError, match="flight recorder"):
        buffer.low_latency_combine(experts, ids, weights, handle, combine_wait_recv_cost_stats=torch.zeros(2, 2))
    for arguments in ((experts[:, 1:], ids, weights), (experts, ids[1:], weights), (experts, ids, weights[:, 1:])):
        with pytest.raises(RoutingError, match=re.escape("accepted: [[4, 64], [17, 3], [17, 3]]")):
            buffer.low_latency_combine(*arguments, handle)
    elastic = ElasticBuffer(comm.group, num_max_tokens_per_rank=4)
    assert elastic.capture().event is not None and (elastic.rank_idx, elastic.num_ranks) == (rank, 2)
    with pytest.raises(CapacityError, match="has room for 8; nothing was sent"):
        elastic.dispatch(x, ids, weights, num_experts=EXPERTS, do_cpu_sync=False)
    made = elastic.dispatch(x, ids, weights, num_experts=EXPERTS)[3]
    with pytest.raises(ArgumentError, match="topk_idx was passed beside a handle"):
        elastic.dispatch(x, ids, handle=made)
    with pytest.raises(ArgumentError, match="do_expand=True was passed beside a handle"):
        elastic.dispatch(x, handle=made, do_expand=True)
    with pytest.raises(NotImplementedError, match="row-major"):
        elastic.dispatch(x, ids, num_experts=EXPERTS, use_tma_aligned_col_major_sf=True)
    recv, _, _, expanded, _ = elastic.dispatch(x, ids, weights, num_experts=EXPERTS, do_expand=True)
    with pytest.raises(RoutingError, match=f"combine got {len(recv) + 1} rows; accepted: {len(recv)}"):
        elastic.combine(torch.cat([recv, recv[:1]]), expanded)
    with pytest.raises(CountsError, match=r"this plan is for \[17"):
        elastic.dispatch(x[:3], handle=made)
    buffer.destroy()


def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    run_ranks(refused, 2)


class Waited:
    def __init__(self, waits: list[str], name: str) -> None:
        self.waits, self.name = waits, name

    def current_stream_wait(self) -> None:
        self.waits.append(self.name)


def awaited(comm: Communicator) -> None:
    """Calls wait for the events before them, and call no hooks of theirs."""
    waits: list[str] = []
    event = EventOverlap(Waited(waits, "event"))  # type: ignore[arg-type]
    event.register_hook_after_wait(lambda: waits.append("hook"))
    x, ids, weights = routed(0)
    buffer, elastic = Buffer(comm.group), ElasticBuffer(comm.group)
    buffer.get_dispatch_layout(ids, EXPERTS, previous_event=event)
    other: Any = Waited(waits, "before epilogue")
    before: Any = {"previous_event": event, "previous_event_before_epilogue": other}
    recv, _, _, handle, _ = elastic.dispatch(x, ids, weights, num_experts=EXPERTS, **before)
    elastic.combine(recv, handle, **before)
    assert waits == ["event"] + ["event", "before epilogue"] * 2


def test_calls_wait_for_events() -> None:
    run_ranks(awaited, 1)


def disagreeing(comm: Communicator) -> None:
    deep_ep.install(wire=("int8", "none")[comm.rank])
    with pytest.raises(ConfigMismatch, match="wire"):
        Buffer(comm.group)


def test_ranks_with_other_formats_are_told() -> None:
    run_ranks(disagreeing, 2)


def over_parts(comm: Communicator) -> None:
    """Each buffer has a group of its own."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    for group in (groups[comm.rank // 2], dist.group.WORLD):
        buffer = Buffer(group)
        assert (buffer.rank, buffer.group_size) == (dist.get_rank(group), dist.get_world_size(group))
        x, ids, weights = routed(comm.rank, torch.float32)
        layout = buffer.get_dispatch_layout(ids, EXPERTS)
        recv, _, _, _, handle, _ = buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, is_token_in_rank=layout[3], num_tokens_per_expert=layout[2]
        )
        assert near(buffer.combine(recv, handle)[0], x * layout[3].sum(1, keepdim=True), 0.02)


def test_buffers_of_any_group() -> None:
    run_ranks(over_parts, 4)


def chosen(comm: Communicator) -> None:
    buffer = Buffer(comm.group)
    assert [str(each) for each in (buffer.wire, buffer.combine_wire, buffer.grad_wire)] == ["int4", "int6+h64", "none"]
    deep_ep.install(wire="none", grad_wire="int8")
    buffer = Buffer(comm.group)
    assert [str(each) for each in (buffer.wire, buffer.combine_wire, buffer.grad_wire)] == ["none", "int6+h64", "int8"]
    with pytest.raises(NotImplementedError, match=r"torch\.distributed"):
        Buffer(None, comm=object())


def test_formats_come_from_install_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(chosen, 1, env={VARIABLE: "int4, int6+h64,"})
    with pytest.raises(WireFormatError, match="int9"):
        deep_ep.install(wire="int9")


def too_many(comm: Communicator) -> None:
    with pytest.raises(ArgumentError, match="up to three formats"):
        Buffer(comm.group)


def test_too_many_formats_are_refused() -> None:
    run_ranks(too_many, 1, env={VARIABLE: "int8,int8,int8,int8"})


def test_install_registers_modules_that_importlib_finds() -> None:
    module = deep_ep.install()
    import deep_ep as found  # type: ignore[import-not-found]
    from deep_ep import topk_idx_t
    from deep_ep.utils import EventHandle  # type: ignore[import-not-found]

    assert found.Buffer is Buffer and found.ElasticBuffer is ElasticBuffer and found.utils.EventOverlap is EventOverlap
    assert found is module is deep_ep and topk_idx_t == torch.int64
    assert importlib.util.find_spec("deep_ep") is not None and importlib.util.find_spec("deep_ep.utils") is not None
    with pytest.raises(ImportError):
        from deep_ep import HybridEPBuffer  # noqa: F401
    assert {"topk_idx", "num_max_dispatch_tokens_per_rank", "use_fp8"} <= {
        *inspect.signature(Buffer.low_latency_dispatch).parameters
    }
    waited = []
    event = EventOverlap(EventHandle())
    event.register_hook_after_wait(lambda: waited.append(1))
    with event(release_handle=True):
        assert not waited
    event.current_stream_wait()
    assert waited == [1] and event.event is None
    assert deep_ep.install(wire="none") is module  # again
    assert importlib.util.find_spec("deep_ep.utils.event") is not None


def test_a_real_deep_ep_stays_unless_asked_otherwise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = types.ModuleType("deep_ep")
    real.__spec__ = importlib.machinery.ModuleSpec("deep_ep", None)
    monkeypatch.setitem(sys.modules, "deep_ep", real)
    assert deep_ep.install() is real and "stays in use" in caplog.text
    assert deep_ep.install(replace=True) is sys.modules["deep_ep"] is not real
