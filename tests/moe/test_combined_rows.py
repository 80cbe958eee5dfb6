"""Experts that give back quantised rows: what combine makes of them is what it makes of what they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import thinwire as tw
from thinwire.comm.communicator import Communicator
from thinwire.moe import compiled_round
from thinwire.moe.routing import expert_range
from thinwire.testing import run_ranks

NUM_EXPERTS, TOP_K, HIDDEN, TOKENS = 5, 3, 200, 9
QUANTIZED = ("int8", "int8:row", "int8:32", "int4", "fp8", "int8+h64", "int10")
TRANSPORTS = ("direct", "staged")


def _inputs(rank: int, hidden: int = HIDDEN) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    count = 0 if rank == 1 else TOKENS - rank
    ids = torch.randint(-1, NUM_EXPERTS, (count, TOP_K), generator=generator)
    return torch.randn(count, hidden, generator=generator), ids, torch.rand(count, TOP_K, generator=generator)


def _odd_rows(count: int, wire: str, seed: int, hidden: int = HIDDEN) -> tw.WireRows:
    """Rows that no quantiser makes: a largest element below 127, -128, pad bytes, scales that overflow, and NaN."""
    generator = torch.Generator().manual_seed(seed)
    rows = tw.quantize(torch.randn(count, hidden, generator=generator) * 10, wire)
    if count > 4:
        size = rows.wire.payload_bytes(hidden)
        rows.records[0, :size] = torch.randint(0, 3, (size,), generator=generator, dtype=torch.uint8)
        rows.records[1, :size] = 128
        rows.records[2] = 85  # pads, too
        start = rows.wire.scales_offset(hidden)
        for row, value in ((3, torch.finfo(torch.bfloat16).max), (4, torch.nan)):
            scale = torch.tensor([value], dtype=torch.float32 if rows.wire.row_scale else torch.bfloat16)
            rows.records[row, start : start + rows.wire.scale_bytes] = scale.view(torch.uint8)
    return rows


def _same(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{name}: {text}")


def _halves(ep: tw.ExpertParallel, rows: tw.WireRows, d: tw.Dispatched) -> torch.Tensor:
    out = torch.full((d._num_sent, HIDDEN), 7.0)
    assert ep.combine_finish(ep.combine_start(rows, d, out=out)) is out
    return out


def _summed(comm: Communicator, transport: str, wires: list[str]) -> None:
    inputs = _inputs(comm.rank)
    for number, wire in enumerate(wires):
        sizes = {"num_experts": NUM_EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "max_tokens": TOKENS, "align": 2}
        with tw.ExpertParallel(comm, **sizes, wire="none", combine_wire=wire, transport=transport) as ep:
            rows = _odd_rows(len(ep.dispatch(*inputs).tokens), wire, 10 * comm.rank + number)
            expected = ep.combine(tw.dequantize(rows, torch.float32), ep.dispatch(*inputs))
            _same(wire, ep.combine(rows, ep.dispatch(*inputs)), expected)
            _same(wire, _halves(ep, rows, ep.dispatch(*inputs)), expected)
            if number:
                continue
            # Other strides, dropped rows, in compiled code, beside floats, and in bfloat16.
            wide = torch.zeros(len(rows.records), rows.records.shape[1] + 7, dtype=torch.uint8)[:, 7:]
            _same(wire, ep.combine(replace(rows, records=wide.copy_(rows.records)), ep.dispatch(*inputs)), expected)
            in_graph = compiled_round.dispatch(ep, *inputs)
            _same(wire, ep.combine(rows, in_graph), expected)
            mixed = rows if comm.rank else tw.dequantize(rows, torch.float32)  # ranks need not agree
            _same(wire, ep.combine(mixed, ep.dispatch(*inputs)), expected)
            capacity = len(rows.records) // 2
            few = replace(rows, records=rows.records[:capacity], shape=torch.Size((capacity, HIDDEN)))
            results = []
            for given in (few, tw.dequantize(few, torch.float32)):
                d = ep.dispatch(inputs[0].bfloat16(), *inputs[1:])
                d.gather(capacity)
                results.append(ep.combine(given, d))
            _same(wire, *results)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sums_of_quantised_rows_are_those_of_the_floats_that_they_stand_for(transport: str) -> None:
    run_ranks(_summed, 2, transport, ["int8", "int8:row"], mode="thread", timeout=120)


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_so_are_those_of_every_format_between_processes(transport: str) -> None:
    run_ranks(_summed, 3, transport, QUANTIZED, timeout=120)


@pytest.mark.exhaustive
@pytest.mark.parametrize("environment", [
    {"THINWIRE_BACKEND": "torch"}, {"THINWIRE_BACKEND": "triton", "TRITON_INTERPRET": "1"}
])  # fmt: skip
def test_so_are_those_of_other_backends(environment: dict[str, str]) -> None:
    run_ranks(_summed, 2, "staged", ["int8", "int8:row", "int4", "int6+h64"], env=environment, timeout=280)
    if "TRITON_INTERPRET" in environment:
        run_ranks(_summed, 2, "direct", ["int8", "int8:row"], env=environment, timeout=280)


def _as_they_are(comm: Communicator, transport: str, wires: list[str], hidden: int = HIDDEN) -> None:
    """Every token goes to one rank, so that what comes home is one record, dequantised."""
    x, _, weights = _inputs(comm.rank, hidden)
    count = len(x)
    ids = torch.full((count, TOP_K), -1)
    for token in range(count):
        local = expert_range(NUM_EXPERTS, comm.size, token % comm.size)[:2]
        ids[token, : len(local)] = torch.tensor(local)
    sizes = {"num_experts": NUM_EXPERTS, "top_k": TOP_K, "hidden_size": hidden, "max_tokens": TOKENS}
    for number, wire in enumerate(wires):
        with tw.ExpertParallel(comm, **sizes, wire="none", combine_wire=wire, transport=transport) as ep:
            d = ep.dispatch(x, ids, weights)
            rows = _odd_rows(len(d.records), wire, comm.rank + number, hidden)
            sources, everyone = d.record_source, []
            y = ep.combine(rows, d, weighted=True)
            # All ranks' rows, as each stood at its source.
            for rank in range(comm.size):
                there = [torch.zeros(TOKENS * comm.size, hidden), torch.full((TOKENS * comm.size, 2), -1)]
                if rank == comm.rank:
                    there[0][: len(sources)] = tw.dequantize(rows, torch.float32)
                    there[1][: len(sources)] = sources
                for part in there:
                    comm.broadcast(part, rank)
                everyone.append(there)
            expected = torch.zeros(count, hidden)
            for values, of in everyone:
                mine = of[:, 0] == comm.rank
                expected[of[mine, 1]] = values[mine]
            _same(wire, y, expected)
            # What quantising gave once it gives again where the format has scales of bfloat16.
            d = ep.dispatch(x, ids, weights)
            rows = tw.quantize(torch.randn(len(d.records), hidden, generator=torch.Generator().manual_seed(5)), wire)
            kept = ep.combine(rows, d, weighted=True)
            floats = ep.combine(tw.dequantize(rows, torch.float32), ep.dispatch(x, ids, weights), weighted=True)
            if rows.wire.row_scale:
                torch.testing.assert_close(floats, kept, rtol=1e-6, atol=0)
            else:
                _same(wire, kept, floats)
            # Fewer than came.
            d = ep.dispatch(x, ids, weights)
            d.gather_records(0)
            assert not ep.combine(tw.WireRows.zeros((0, hidden), wire), d, weighted=True).any()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weighted_rows_come_home_as_they_are(transport: str) -> None:
    run_ranks(_as_they_are, 2, transport, ["int8", "int8:row"], mode="thread", timeout=120)


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_so_do_those_of_every_format_between_processes(transport: str) -> None:
    run_ranks(_as_they_are, 3, transport, QUANTIZED, timeout=120)


@pytest.mark.exhaustive
def test_so_do_those_that_tritons_kernels_send() -> None:
    pytest.importorskip("triton", reason="interpreting kernels needs Triton")
    env = {"THINWIRE_BACKEND": "triton", "TRITON_INTERPRET": "1"}
    run_ranks(_as_they_are, 2, "direct", ["int8", "int8:row", "int4", "int6+h64"], env=env, timeout=280)
    run_ranks(_as_they_are, 2, "direct", ["int8:row", "int8:512"], 9001, env=env, timeout=280)  # several tiles


def _compiled(comm: Communicator) -> None:
    inputs = _inputs(comm.rank)
    sizes = {"num_experts": NUM_EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "max_tokens": TOKENS}
    with tw.ExpertParallel(comm, **sizes, wire="int8") as ep:

        def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            d = ep.dispatch(x, ids, weights)
            return ep.combine(tw.quantize(d.gather(20)[0] * 2, "int8"), d) + 1

        _same("compiled", torch.compile(layer, backend="aot_eager")(*inputs), layer(*inputs))


def test_compiled_code_combines_them_between_two_graphs() -> None:
    run_ranks(_compiled, 1, mode="thread", timeout=120)


def _without_gradients(comm: Communicator, transport: str) -> None:
    sizes = {"num_experts": 2, "top_k": 1, "hidden_size": 64, "max_tokens": 4}
    x, ids, weights = torch.randn(4, 64), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    with tw.ExpertParallel(comm, **sizes, wire="int8", transport=transport) as ep:
        d = ep.dispatch(x, ids, weights)
        right = tw.quantize(torch.randn(4, 64), "int8")
        _same("weighted", ep.combine(right, d, weighted=True), tw.dequantize(right))
        for wants_x in (True, False):
            given = x.clone().requires_grad_(wants_x), ids, weights.clone().requires_grad_(not wants_x)
            d = ep.dispatch(*given)
            with pytest.raises(tw.RoutingError, match="have no gradient, and x or topk_weights wants one"):
                ep.combine(right, d)
            with torch.no_grad():
                _same("no_grad", ep.combine(right, d), ep.combine(tw.dequantize(right), ep.dispatch(x, ids, weights)))
            in_graph = compiled_round.dispatch(ep, *given)
            with pytest.raises(tw.RoutingError, match="have no gradient"):
                ep.combine(right, in_graph)
            in_graph.abandon()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_without_gradients_are_refused_where_some_are_wanted(transport: str) -> None:
    run_ranks(_without_gradients, 1, transport, mode="thread", timeout=120)


def test_rows_are_filled_in_place() -> None:
    x = torch.randn(3, 200)
    for wire in ("int8", "int8:row", "int8:16"):
        rows, filled = tw.quantize(x, wire), tw.WireRows.zeros((3, 200), wire)
        filled.payload.copy_(rows.payload)
        filled.scales.copy_(rows.scales)
        assert torch.equal(filled.records, rows.records) and filled.scales.dtype == rows.scales.dtype
        assert filled.shape == x.shape and filled.dtype == torch.float32
