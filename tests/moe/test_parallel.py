"""Dispatch and combine against a float64 oracle and against themselves on other group sizes."""

from __future__ import annotations

import time

import pytest
import torch

from tests.helpers.wires import assert_same_bits
from thinwire.comm.communicator import Communicator
from thinwire.errors import (
    ConfigMismatch,
    LaneError,
    PeerTimeout,
    RoutingError,
    ThinwireError,
)
from thinwire.fused import staged
from thinwire.fused.codec import dequantize, quantize
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.parallel import ExpertParallel
from thinwire.moe.plan import SendPlan, merge_repeated_experts
from thinwire.moe.routing import expert_range
from thinwire.testing import run_ranks
from thinwire.wire import WireFormat

TOP_K, HIDDEN = 3, 200
NUM_EXPERTS = 7  # divides by no group size that is tested but 1


def _tokens(rank: int, kind: str, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rank's tokens: x, ids, weights. Some ranks have none; ids repeat and are missing."""
    generator = torch.Generator().manual_seed(97 * seed + rank)
    count = {"ragged": (5 * rank + 3) % 11, "empty_first": 0 if rank == 0 else 6, "one_expert": 8}[kind]
    x = torch.randn(count, HIDDEN, generator=generator).to(dtype)
    ids = torch.randint(-1, NUM_EXPERTS, (count, TOP_K), generator=generator, dtype=torch.int32)
    if kind == "one_expert":
        ids = torch.full_like(ids, NUM_EXPERTS - 1)
    if count > 2:
        ids[1] = -1  # a token without experts
        ids[2, 1] = ids[2, 0]  # an expert named twice
    return x, ids, torch.rand(count, TOP_K, generator=generator)


def _expert_matrices(dtype: torch.dtype) -> torch.Tensor:
    """Random experts: with identity experts a second quantisation would go unseen."""
    return torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype) / HIDDEN**0.5


def _apply(tokens: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(tokens)
    for expert, (start, count) in enumerate(zip(offsets.tolist(), counts.tolist(), strict=False)):
        # Row by row: a matrix product's rounding depends on how many rows it has.
        for row in range(start, start + count):
            out[row] = tokens[row] @ experts[expert]
    return out


def _oracle(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            if expert >= 0:
                y[token] += weight * (x[token].double() @ experts[expert].double())
    return y


def _rounds(
    comm: Communicator, spec: str, combine_spec: str, dtype: torch.dtype, transport: str = "staged"
) -> list[tuple[float, float]]:
    """Runs rounds, checks their structure, and returns each one's squared error and norm."""
    experts = _expert_matrices(dtype)
    figures = []
    for align in (1, 4):
        ep = ExpertParallel(
            comm, NUM_EXPERTS, TOP_K, HIDDEN, 16, wire=spec, combine_wire=combine_spec, align=align, lanes=2,
            transport=transport,
        )  # fmt: skip
        mine = experts[ep.local_experts.start : ep.local_experts.stop]
        for seed, kind in enumerate(("ragged", "empty_first", "one_expert")):
            x, ids, weights = _tokens(comm.rank, kind, dtype, seed)
            d = ep.dispatch(x, ids, weights, lane=seed % 2)
            _check_arrivals(comm, ep, d, kind, dtype, seed, spec)
            expert_out = _apply(d.tokens, d.expert_counts, d.expert_offsets, mine)
            arrived = d.rows[d.index[d.index >= 0]]
            y = ep.combine(expert_out, d)
            again = ep.dispatch(x, ids.long(), weights.double())
            assert torch.equal(again.rows[again.index[again.index >= 0]], arrived)
            out = torch.full_like(y, 7.0)
            assert ep.combine(expert_out, again, out=out) is out
            assert_same_bits("a second run", y, out)
            expected = _oracle(x, ids, weights, experts)
            assert not y[(ids < 0).all(1)].any()
            figures.append((float((y.double() - expected).square().sum()), float(expected.square().sum())))
        ep.close()
    return figures


def _check_arrivals(
    comm: Communicator, ep: ExpertParallel, d: Dispatched, kind: str, dtype: torch.dtype, seed: int, spec: str
) -> None:
    """d.tokens are the quantised tokens, by expert, then source rank, then token."""
    rows, counts = [], []
    for expert in ep.local_experts:
        arrived = []
        for rank in range(comm.size):
            x, ids, _ = _tokens(rank, kind, dtype, seed)
            arrived.append(x[(ids == expert).any(1)])
        merged = torch.cat(arrived)
        counts.append(merged.shape[0])
        rows.append(torch.nn.functional.pad(merged, (0, 0, 0, -merged.shape[0] % ep.align)))
    whole = torch.cat([*rows, torch.zeros(0, HIDDEN, dtype=dtype)])
    expected = dequantize(quantize(whole, spec))
    expected[(whole == 0).all(1)] = 0.0  # padding; a row of zeros that travels rotated has some -0.0
    assert d.expert_counts.tolist() == counts
    assert d.expert_offsets.tolist() == [0, *torch.tensor([len(r) for r in rows]).cumsum(0).tolist()]
    assert_same_bits("tokens", expected, d.tokens)


def _total(results: list[list[tuple[float, float]]]) -> float:
    errors = [figure for rank in results for figure in rank]
    return (sum(e for e, _ in errors) / sum(n for _, n in errors)) ** 0.5


@pytest.mark.parametrize("transport", ["direct", "staged"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_exact_wires_give_the_oracle(size: int, transport: str) -> None:
    results = run_ranks(_rounds, size, "none", "none", torch.float32, transport, timeout=120)
    assert _total(results) < 1e-6


@pytest.mark.parametrize(
    ("spec", "combine_spec", "dtype", "theory", "gate"),
    [
        pytest.param("none", "int8", torch.bfloat16, 0.0065, 0.0070, marks=pytest.mark.exhaustive),
        ("none", "int8", torch.float32, 0.0065, 0.0070),
        ("int8", "none", torch.float32, 0.0065, 0.0068),
        ("int8", "int8", torch.float16, 0.0092, 0.0096),
        ("int8:row", "int4", torch.float32, 0.0970, 0.1020),
        ("none", "int8+h64", torch.float32, 0.0065, 0.0070),
        ("int8+h64", "int8+h64", torch.bfloat16, 0.0092, 0.0096),
        pytest.param("int6+h64", "none", torch.float32, 0.0266, 0.0280, marks=pytest.mark.exhaustive),
        pytest.param("none", "int10+h64", torch.float32, 0.0016, 0.0018, marks=pytest.mark.exhaustive),
    ],
)
def test_quantised_wires_stay_within_the_gates(
    spec: str, combine_spec: str, dtype: torch.dtype, theory: float, gate: float
) -> None:
    figures = [run_ranks(_rounds, 3, spec, combine_spec, dtype, name, timeout=120) for name in ("staged", "direct")]
    assert figures[0] == figures[1]
    error = _total(figures[0])
    print(f"{spec} out, {combine_spec} back, {dtype}: relative error {error:.5f}")
    if WireFormat.parse(combine_spec).rotated or WireFormat.parse(spec).rotated:
        error *= 0.0065 / 0.0071  # in 200 of 256 columns that travel, errors are larger
    assert 0.9 * theory <= error <= gate  # far below the theory would mean that nothing was quantised


def _in_small_pieces(comm: Communicator) -> list[tuple[float, float]]:
    staged.PIECE_BYTES = 1024, 2048
    return _rounds(comm, "int8", "int8", torch.float32)


def test_pieces_change_nothing() -> None:
    assert run_ranks(_in_small_pieces, 3) == run_ranks(_rounds, 3, "int8", "int8", torch.float32)


def _gather(comm: Communicator) -> None:
    with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, 16, wire="none") as ep:
        x, ids, weights = _tokens(comm.rank, "ragged", torch.float32, 0)
        d = ep.dispatch(x, ids, weights)
        full, rows = d.tokens, int(d.expert_offsets[-1])
        tokens, overflow = d.gather(rows + 5)
        assert not overflow and torch.equal(tokens[:rows], full)
        y = ep.combine(tokens, d)
        d = ep.dispatch(x, ids, weights)
        tokens, overflow = d.gather(rows // 2)
        assert bool(overflow) == (rows > rows // 2) and torch.equal(tokens, full[: rows // 2])
        dropped = ep.combine(tokens, d)
        # Rows that did not fit count as zeros.
        d = ep.dispatch(x, ids, weights)
        kept = torch.where(torch.arange(rows).unsqueeze(1) < rows // 2, d.tokens, 0.0)
        assert torch.equal(dropped, ep.combine(kept, d))
        d = ep.dispatch(x, ids, weights)
        d.gather(rows + 3)
        assert torch.equal(ep.combine(d.tokens, d), y)  # gathering does not take d.tokens away
        d = ep.dispatch(x, ids, weights)
        d.gather(2)
        d.abandon()
        with pytest.raises(LaneError):
            d.abandon()
        # Rank 0 abandons while the others combine: its experts add nothing, not even 0 times infinity.
        infinite = torch.full_like(weights, torch.inf)
        d = ep.dispatch(x.abs(), ids, infinite)
        if comm.rank == 0:
            d.abandon()
        else:
            y = ep.combine(torch.ones_like(d.tokens), d)
            elsewhere = ((ids >= 0) & ~torch.isin(ids, torch.tensor(list(expert_range(NUM_EXPERTS, 3, 0))))).any(1)
            assert torch.equal(y[:, 0].isinf(), elsewhere) and not y[~elsewhere].any()


def test_a_fixed_capacity_gives_the_same_rows_and_reports_overflow() -> None:
    run_ranks(_gather, 3)


def _rows_of_nobody(comm: Communicator, transport: str) -> None:
    """NaN, with which torch fills new memory here, stays in rows of nobody and nowhere else."""
    torch.use_deterministic_algorithms(True)
    for align in (1, 4):
        with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, 16, wire="none", transport=transport, align=align) as ep:
            x, ids, weights = _tokens(comm.rank, "ragged", torch.float32, 0)
            weight = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0)).requires_grad_()
            with torch.no_grad():
                d = ep.dispatch(x, ids, weights)
                full, rows = d.tokens, len(d.tokens)
                tokens, _ = d.gather(rows + 5)
                assert torch.equal(tokens[:rows], full) and tokens[rows:].isnan().all()
                assert not d.gather_records(len(d.records) + 5).tokens[len(d.records) :].any()
                y = ep.combine(tokens @ weight, d)
            # Where gradients are wanted they are zero, so that a product over all rows has finite gradients.
            d = ep.dispatch(x.requires_grad_(), ids, weights.requires_grad_())
            tokens, _ = d.gather(rows + 5)
            assert torch.equal(tokens[:rows], full) and not tokens[rows:].any()
            in_graph = ep.combine(tokens @ weight, d)
            in_graph.square().sum().backward()
            assert torch.equal(in_graph, y)
            for tensor in (x, weights, weight):
                assert tensor.grad is not None and tensor.grad.isfinite().all()


@pytest.mark.parametrize("backend", ["numba", pytest.param("triton", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_rows_of_nobody_reach_no_result_and_no_gradient(transport: str, backend: str) -> None:
    env = {"THINWIRE_BACKEND": backend, "TRITON_INTERPRET": str(int(backend == "triton"))}
    run_ranks(_rows_of_nobody, 2, transport, env=env, timeout=200)


def _rounds_after_the_communicator(comm: Communicator, transport: str) -> None:
    part = comm.split(groups=[range(comm.size)])
    ep, other = (ExpertParallel(group, NUM_EXPERTS, TOP_K, HIDDEN, 16, transport=transport) for group in (part, comm))
    arguments = _tokens(comm.rank, "ragged", torch.float32, 0)
    d = ep.dispatch(*arguments)
    tokens = d.tokens
    part.close()
    assert repr(ep).endswith("closed)") and tokens.isfinite().all()  # what was taken from it stays readable
    for call in (lambda: ep.dispatch(*arguments), lambda: ep.combine(tokens, d)):
        with pytest.raises(LaneError, match="closed"):
            call()
    with pytest.raises(LaneError, match="this ExpertParallel is closed, as this communicator is closed"):
        ep.dispatch(*arguments)
    d = other.dispatch(*arguments)  # that of another communicator goes on
    other.combine(d.tokens, d)
    ep.rebuild(comm)
    d = ep.dispatch(*arguments)
    ep.combine(d.tokens, d)


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_an_expert_parallel_is_closed_with_its_communicator(transport: str) -> None:
    run_ranks(_rounds_after_the_communicator, 2, transport)


def _mismatch(comm: Communicator) -> list[str]:
    messages = []
    for change in ({"hidden_size": 8 + comm.rank // 2}, {"wire": "int8" if comm.rank else "int4"}):
        sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 8, "max_tokens": 4} | change
        with pytest.raises(ConfigMismatch) as caught:
            ExpertParallel(comm, **sizes)
        messages.append(str(caught.value))
    return messages


def test_different_settings_are_a_mismatch_on_every_rank() -> None:
    results = run_ranks(_mismatch, 3)
    assert all(result == results[0] for result in results)
    assert "hidden_size" in results[0][0] and "8" in results[0][0] and "9" in results[0][0]
    assert "wire" in results[0][1] and "int4" in results[0][1]


def _absent_peer(comm: Communicator) -> float:
    ep = ExpertParallel(Communicator(comm.group, timeout=2.0), NUM_EXPERTS, TOP_K, HIDDEN, 16)
    x, ids, weights = _tokens(comm.rank, "ragged", torch.float32, 0)
    d = ep.dispatch(x, ids, weights)
    started = time.monotonic()
    if comm.rank == 1:
        time.sleep(4)
    else:
        with pytest.raises(PeerTimeout):
            ep.combine(d.tokens, d)
    return time.monotonic() - started


@pytest.mark.exhaustive
def test_a_peer_that_never_combines_is_a_timeout() -> None:
    waited = run_ranks(_absent_peer, 2, timeout=60)[0]
    assert 1.0 <= waited <= 10.0


def test_a_tokens_records_are_summed_in_ascending_rank() -> None:
    ids = torch.tensor([[6, 0, 3], [-1, -1, -1], [4, 5, -1], [2, 6, 6]])
    plan = SendPlan.of(ids, NUM_EXPERTS, 3)  # experts 0-2 on rank 0, 3-4 on rank 1, 5-6 on rank 2
    assert plan.counts == [2, 2, 3] and plan.tokens.tolist() == [0, 3, 0, 2, 0, 2, 3]
    assert plan.record_index.tolist() == [[0, 2, 4], [-1, -1, -1], [3, 5, -1], [1, 6, -1]]


def test_repeated_experts_keep_the_sum_of_their_weights_in_order() -> None:
    ids = torch.tensor([[5, 2, 5, 5], [-1, -1, 0, -1], [1, 2, 3, 4]])
    weights = torch.tensor([[1e8, 0.5, 1.0, -1e8], [9.0, 9.0, 0.25, 9.0], [0.1, 0.2, 0.3, 0.4]])
    merged_ids, merged_weights = merge_repeated_experts(ids, weights)
    assert merged_ids.tolist() == [[5, 2, -1, -1], [-1, -1, 0, -1], [1, 2, 3, 4]]
    # (1e8 + 1) - 1e8 is 0 in float32; in any other order of these three it would be 1 or stay so.
    assert merged_weights[0].tolist() == [0.0, 0.5, 0.0, 0.0]
    assert torch.equal(merged_weights[1:], torch.tensor([[0, 0, 0.25, 0], [0.1, 0.2, 0.3, 0.4]]))


def _lie(comm: Communicator) -> None:
    ep = ExpertParallel(comm, 4, 2, 64, 8, transport="staged")
    ids, weights = torch.zeros(8, 2, dtype=torch.int64), torch.ones(8, 2)
    honest = comm.exchange_counts
    if comm.rank == 1:
        comm.exchange_counts = lambda counts: honest([3 << 52] * 2)  # type: ignore[method-assign]
    says = r"rank 1 says that it sends \d{9,} tokens; accepted: at most 8"
    with torch.no_grad(), pytest.raises(RoutingError, match=says):
        ep.dispatch(torch.zeros(8, 64), ids, weights)
    if comm.rank == 1:
        comm.exchange_counts = honest  # type: ignore[method-assign]
        ep._assembly.generation = -3
    with pytest.raises(ThinwireError, match="rank 1 is at generation -3, expected 0 to"):
        ep.rebuild(comm)


def test_what_no_peer_can_have_is_refused() -> None:
    run_ranks(_lie, 2, mode="thread")


def _rebuilt_apart(comm: Communicator) -> None:
    with comm.split(groups=[[0], [1]]) as own:
        ep = ExpertParallel(own, NUM_EXPERTS, TOP_K, HIDDEN, 16 + comm.rank, wire="none")
        with pytest.raises(ConfigMismatch, match="max_tokens: 16 on rank 0; 17 on rank 1"):
            ep.rebuild(comm)
        with pytest.raises(LaneError, match="closed"):
            ep.dispatch(*_tokens(comm.rank, "ragged", torch.float32, 0))


def test_ranks_with_different_room_do_not_rebuild_together() -> None:
    run_ranks(_rebuilt_apart, 2, mode="thread")
