"""FlashInfer in rounds of experts: its all-to-all for throughput, over NVLink.

Written against `flashinfer.comm.MoeAlltoAll` of FlashInfer 0.6.18, and not run. It moves a row once for each rank that
owns one of a token's experts, into a place for each token of each rank, so rows are sorted by expert behind its
dispatch and weighted and summed before its combine, in torch operations (`libraries`). Rows of a rank arrive in any
order: each token's number travels with it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from thinwire.comm import Communicator
from thinwire.tools.bench.checks import Verdict
from thinwire.tools.bench.contender import Candidate, Contender, NotHere, label_of
from thinwire.tools.bench.expert_problem import Round
from thinwire.tools.bench.libraries import by_expert, on_all_ranks, summed
from thinwire.tools.bench.timing import Laps
from thinwire.wire import WireFormat

NAME, PACKAGE = "FlashInfer", "flashinfer"
_EXACT = WireFormat.parse("none")
#: Its kernels copy 16 bytes at once out of memory where ids and weights lie behind the rows.
_ROW_MULTIPLE = 16


def flashinfer_round(problem: Round, laps: Laps) -> Candidate:
    """A round over FlashInfer, with rows in the tokens' dtype."""
    return Candidate(NAME, "none", None, lambda: _contender(problem, laps))


class _Ranks:
    """A communicator as FlashInfer wants it, with mpi4py's names."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def Get_rank(self) -> int:
        return self._comm.rank

    def Get_size(self) -> int:
        return self._comm.size

    def allgather(self, data: object) -> tuple[Any, ...]:
        return tuple(self._comm.all_gather_object(data))

    def bcast(self, data: object, root: int) -> Any:
        return self._comm.all_gather_object(data)[root]

    def barrier(self) -> None:
        self._comm.barrier()

    def Split(self, color: int, key: int) -> _Ranks:
        """All ranks are of one colour, and in order."""
        return self


def _payload_bytes(problem: Round) -> int:
    """Of a token on its way to an expert: its row, ids, weights and number."""
    row_bytes = problem.hidden * problem.dtype.itemsize
    return row_bytes + problem.top_k * (torch.int32.itemsize + torch.float32.itemsize) + torch.int32.itemsize


def _refuse(problem: Round) -> None:
    """What would stop the ranks inside of it, where it cannot say so itself."""
    row_bytes = problem.hidden * problem.dtype.itemsize
    if row_bytes % _ROW_MULTIPLE:
        raise NotHere(f"compared with rows of multiples of {_ROW_MULTIPLE} bytes; these have {row_bytes}")
    if any((ids < 0).any() for ids in problem.all_ids):
        raise NotHere(f"every token must have all of its {problem.top_k} experts, and some have fewer here")


def _all_to_all(library: Any, problem: Round) -> Any:
    comm, row_bytes = problem.comm, problem.hidden * problem.dtype.itemsize
    config = importlib.import_module(f"{PACKAGE}.comm.mnnvl").MnnvlConfig(comm_backend=_Ranks(comm))
    # It keeps the workspace of each size until the process ends, and takes it again for the same size.
    workspace_bytes = library.moe_a2a_get_workspace_size_per_rank(
        comm.size, problem.tokens, _payload_bytes(problem), row_bytes
    )
    return library.MoeAlltoAll(
        library.Mapping(comm.size, comm.rank, tp_size=comm.size, moe_ep_size=comm.size),
        problem.tokens,
        problem.top_k,
        problem.experts,
        workspace_size_per_rank=workspace_bytes,
        mnnvl_config=config,
    )


def _contender(problem: Round, laps: Laps) -> Contender:
    comm, label, tokens_each = problem.comm, label_of(NAME, "none", None), problem.tokens
    _refuse(problem)
    library = on_all_ranks(comm, lambda: importlib.import_module(f"{PACKAGE}.comm"))
    exchange = on_all_ranks(comm, lambda: _all_to_all(library, problem))
    first, end = problem.first[comm.rank], problem.first[comm.rank + 1]
    ids = problem.topk_ids.to(torch.int32)
    numbers = torch.arange(tokens_each, device=ids.device, dtype=torch.int32)[:, None]
    before = torch.arange(comm.size, device=ids.device).repeat_interleave(tokens_each) * tokens_each

    def run() -> Mapping[str, torch.Tensor]:
        laps.start()
        payloads = [problem.x, ids, problem.topk_weights, numbers]
        arrived = exchange.dispatch(ids, payloads, tokens_each, invalid_token_expert_id=-1, expert_id_payload_index=1)
        rows, all_ids, weights, number = (part.flatten(0, 1) for part in arrived)
        own_ids = torch.where((all_ids >= first) & (all_ids < end), all_ids, -1)
        order = by_expert(own_ids, weights, before + number[:, 0], problem.expert_rows)
        tokens = rows.index_select(0, order.source)
        laps.end(f"{label} dispatch")
        expert_out = problem.experts_on(tokens)
        laps.skip()
        payload = exchange.get_combine_payload_tensor_in_workspace(tokens_each, problem.hidden, problem.dtype)
        payload.copy_(summed(expert_out, order, len(rows)).view_as(payload))
        y = exchange.combine(payload, tokens_each, payload_in_workspace=True)
        laps.end(f"{label} combine", f"{label} moe")
        return {"dispatch": tokens, "combine": y, "moe": y}

    def judge(operation: str, got: torch.Tensor) -> Verdict:
        return (problem.judge_dispatch if operation == "dispatch" else problem.judge_rank_sums)(got, _EXACT)

    on_all_ranks(comm, run)
    return Contender(NAME, "none", None, run, judge, _sent_bytes(problem))


def _sent_bytes(problem: Round) -> dict[str, float]:
    """That other ranks get from this one; on the way back they read them."""
    sent = {
        "dispatch": problem.leaving * _payload_bytes(problem),
        "combine": problem.arriving * problem.hidden * problem.dtype.itemsize,
    }
    return {**sent, "moe": sum(sent.values())}
