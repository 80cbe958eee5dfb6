"""What experts see of a round, against plain torch on all ranks' tokens; weighted rows come home as others do."""

from __future__ import annotations

import shutil
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.speeds import exhaustive_but
from tests.helpers.wires import assert_same_bits
from tests.moe.test_rounds_direct import HIDDEN, INTERPRETED, KINDS, MAX_TOKENS, NUM_EXPERTS, TOP_K, poison, tokens
from thinwire.comm.communicator import Communicator
from thinwire.errors import LaneError
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.parallel import ExpertParallel
from thinwire.moe.plan import merge_repeated_experts
from thinwire.moe.routing import expert_range
from thinwire.testing import run_ranks

pytest.importorskip("numba", reason="CPU ranks need numba")

TRANSPORTS = ("direct", "staged")
Seen = tuple[tuple[int, int], list[int], list[float], torch.Tensor]  # source, local experts, weights, token


def _came(comm: Communicator, kind: str, dtype: torch.dtype, seed: int) -> list[Seen]:
    """The records for this rank, by source rank, then token."""
    local, found = expert_range(NUM_EXPERTS, comm.size, comm.rank), []
    for rank in range(comm.size):
        x, ids, weights = tokens(rank, kind, dtype, seed)
        merged, summed = merge_repeated_experts(ids, weights)
        for token in range(len(x)):
            here = sorted((int(e), float(w)) for e, w in zip(merged[token], summed[token], strict=True) if e in local)
            if here:
                found.append(((rank, token), [e - local.start for e, _ in here], [w for _, w in here], x[token]))
    return found


def _check_records(d: Dispatched, came: list[Seen], exact: bool) -> None:
    ids = [ids + [-1] * (TOP_K - len(ids)) for _, ids, _, _ in came]
    weights = [weights + [0.0] * (TOP_K - len(weights)) for _, _, weights, _ in came]
    expected_ids = torch.tensor(ids, dtype=torch.int64).view(-1, TOP_K)
    expected_weights = torch.tensor(weights).view(-1, TOP_K)
    expected_source = torch.tensor([source for source, *_ in came], dtype=torch.int64).view(-1, 2)
    assert torch.equal(d.record_ids, expected_ids) and d.record_ids.dtype == torch.int64
    assert_same_bits("weights", expected_weights, d.record_weights)
    assert torch.equal(d.record_source, expected_source)
    if exact:
        assert_same_bits("records", torch.stack([x for *_, x in came]) if came else d.records[:0], d.records)
    for capacity in (0, 1, len(came), len(came) + 3, 3 * len(d.rows) + 1):
        fixed = d.gather_records(capacity)
        assert bool(fixed.overflow) == (capacity < len(came))
        compact = (d.records, expected_ids, expected_weights, expected_source)
        for got, want, nothing in zip(fixed, compact, (0, -1, 0, -1), strict=False):
            assert len(got) == capacity
            assert_same_bits("fixed", want[:capacity].float(), got[: len(came)].float())
            assert (got[len(came) :] == nothing).all()


def _check_rows(d: Dispatched, came: list[Seen], align: int) -> None:
    place = {source: number for number, (source, *_) in enumerate(came)}
    for fixed in (None, 0, 2, len(d.tokens) + 5):
        if fixed is None:
            rows, weights, experts, source = d.tokens, d.weights, d.expert_ids, d.source
        else:
            rows, (weights, experts, source) = d.gather(fixed)[0], d.gather_routing(fixed)
        assert len(rows) == len(weights) == len(experts) == len(source)
        expected = [
            (expert, *source, number, weight)
            for expert in range(len(d.expert_counts))
            for number, (source, ids, factors, _) in enumerate(came)
            for own, weight in zip(ids, factors, strict=True)
            if own == expert
        ]
        got = []
        for row in range(len(rows)):
            if experts[row] < 0:
                assert weights[row] == 0 and source[row].tolist() == [-1, -1]
                assert row >= len(d.tokens) or not rows[row].any()
                continue
            number = place[tuple(source[row].tolist())]
            assert_same_bits("row", d.records[number], rows[row])
            got.append((int(experts[row]), *source[row].tolist(), number, float(weights[row])))
        assert got == expected[: len(got)]
        if fixed is None or fixed >= len(d.tokens):
            assert len(got) == len(expected)
    begins = d.expert_offsets.tolist()
    for expert, (start, count) in enumerate(zip(begins, d.expert_counts.tolist(), strict=False)):
        assert start % align == 0 and (d.expert_ids[start : start + count] == expert).all()


def _apply(rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Local experts of rows; another function for each."""
    return rows.float() * (experts + 2).unsqueeze(-1) + torch.arange(HIDDEN).roll(3) * (experts + 1).unsqueeze(-1)


def _by_record(records: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(records.shape, dtype=torch.float32)
    for k in range(ids.shape[1]):
        added = total + weights[:, k, None] * _apply(records, ids[:, k])
        total = torch.where(ids[:, k, None] >= 0, added, total)
    return total


def _views(comm: Communicator, transport: str, wires: tuple[str, ...]) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    for number, wire in enumerate(wires):
        align, dtype = 1 + 3 * (number % 2), (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        with ExpertParallel(
            comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, wire=wire, transport=transport, align=align, lanes=2
        ) as ep:
            assert ep.transport == transport
            for seed, kind in enumerate(KINDS):
                if transport == "direct":
                    poison(ep)
                lane, arguments = seed % 2, tokens(comm.rank, kind, dtype, seed)
                came = _came(comm, kind, dtype, seed)
                d = ep.dispatch(*arguments, lane=lane)
                _check_records(d, came, exact=wire == "none")
                _check_rows(d, came, align)
                y = ep.combine(_apply(d.tokens, d.expert_ids), d)
                results = []
                for capacity in (None, len(came) + 2, len(came) // 2):
                    d = ep.dispatch(*arguments, lane=lane)
                    if capacity is None:
                        out = _by_record(d.records, d.record_ids, d.record_weights)
                    else:
                        fixed = d.gather_records(capacity)
                        out = _by_record(fixed.tokens, fixed.expert_ids, fixed.weights)
                    results.append(ep.combine(out, d, weighted=True))
                assert_same_bits("weighted", y, results[0])
                assert_same_bits("weighted, fixed", y, results[1])
                # One of the ranks alone: the others take rows.
                d = ep.dispatch(*arguments, lane=lane)
                weighted = comm.rank == 0
                out = _by_record(d.records, d.record_ids, d.record_weights)
                out = out if weighted else _apply(d.tokens, d.expert_ids)
                assert_same_bits("on one rank", y, ep.combine(out, d, weighted=weighted))
                seen += [y, *results]
                with pytest.raises(LaneError):
                    _ = d.records
    return seen


def _compare(size: int, wires: tuple[str, ...], **options: Any) -> None:
    staged, direct = (run_ranks(_views, size, transport, wires, timeout=250, **options) for transport in TRANSPORTS)
    for left, right in zip(staged, direct, strict=True):
        for a, b in zip(left, right, strict=True):
            assert_same_bits("transports", a, b)


@pytest.mark.parametrize("size", exhaustive_but([3], [1, 2, 3, 4]))
def test_experts_see_what_was_sent_and_weighted_rows_come_home(size: int) -> None:
    _compare(size, ("none", "int8", "int4"), mode="thread")


@pytest.mark.exhaustive
def test_processes_see_the_same() -> None:
    _compare(3, ("none", "int8"))


@pytest.mark.exhaustive
def test_tritons_kernels_give_the_same() -> None:
    staged = run_ranks(_views, 2, "staged", ("none", "int8"), mode="thread")
    direct = run_ranks(_views, 2, "direct", ("none", "int8"), env=INTERPRETED, timeout=280)
    for left, right in zip(staged, direct, strict=True):
        for a, b in zip(left, right, strict=True):
            assert_same_bits("interpreted", a, b)


class _Operations(TorchDispatchMode):
    """Counts what torch does beside views and new memory: on a GPU each is a launch."""

    FREE = (
        "view", "select", "slice", "unsqueeze", "as_strided", "detach", "empty", "new_empty", "empty_like",
        "lift_fresh", "is_pinned",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ not in self.FREE:
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def _count_operations(comm: Communicator) -> tuple[list[str], list[str]]:
    with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, transport="direct") as ep:
        x, ids, weights = tokens(comm.rank, "ragged", torch.float32, 0)
        for _ in range(2):  # the second time nothing is made that lasts
            d = ep.dispatch(x, ids, weights)
            with _Operations() as gathering:
                records = d.gather_records(16)
            with _Operations() as combining:
                ep.combine(records.tokens, d, weighted=True)
    return gathering.names, combining.names


@torch.no_grad()
def _count_launches(comm: Communicator) -> tuple[list[str], list[str]]:
    """Torch's operations and the launches of a round by record, behind dispatch, with the kernels of a GPU."""
    from tests.helpers.round_kernels import rounds_of_triton  # they load Triton
    from tests.helpers.stub_driver import stub_driver

    with (
        stub_driver() as stub,
        rounds_of_triton(),
        ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, transport="direct") as ep,
    ):
        rounds = cast(Any, ep._assembly.rounds)
        rounds.on_gpu = True
        for _ in range(2):
            d = ep.dispatch(*tokens(comm.rank, "ragged", torch.float32, 0))
            first = stub.num_launches
            with _Operations() as operations:
                ep.combine(d.gather_records(16).tokens, d, weighted=True)
        rounds.on_gpu = False
        return operations.names, [launched.name for launched in stub.launched(first)]


@pytest.mark.skipif(
    shutil.which("cc") is None or torch.cuda.is_available(), reason="the stub needs a C compiler, and no CUDA driver"
)
def test_on_a_gpu_records_take_two_launches_and_no_operations() -> None:
    pytest.importorskip("triton", reason="the kernels of a GPU are Triton's")
    ((operations, launched),) = run_ranks(_count_launches, 1)
    kernels = ["list_records", "gather", "send_sums", "wait", "sum_home"]
    assert not operations and launched == [f"{name}_kernel" for name in kernels]


def test_records_take_few_operations() -> None:
    for gathering, combining in run_ranks(_count_operations, 2, mode="thread", timeout=60):
        assert len(gathering) <= 27 and not combining, " ".join([*gathering, "|", *combining])
