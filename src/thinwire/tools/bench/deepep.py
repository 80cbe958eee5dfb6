"""DeepEP in rounds of experts: its kernels for many tokens, between the GPUs of one host.

Written against `deep_ep.Buffer` of DeepEP 2.1.0, and not run. It moves a row once for each rank that owns one of a
token's experts, so the rows are sorted by expert behind its dispatch and weighted and summed before its combine, in
torch operations (`libraries`); so is quantising for its e4m3 dispatch.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Mapping
from typing import Any

import torch

from thinwire.tools.bench.checks import Verdict
from thinwire.tools.bench.contender import Candidate, Contender, NotHere, label_of
from thinwire.tools.bench.expert_problem import Round
from thinwire.tools.bench.libraries import by_expert, on_all_ranks, summed
from thinwire.tools.bench.timing import Laps
from thinwire.wire import WireFormat

NAME, PACKAGE = "DeepEP", "deep_ep"
#: What its dispatch takes; its combine is in bfloat16 after either.
WIRES = ("none", "fp8")
_MOST_RANKS = 8
#: Half a row and an 8-byte barrier are staged in 8 KiB; a kernel that finds anything else ends the CUDA context.
_ROW_MULTIPLE, _MOST_ROW_BYTES = 32, 16_352
_FLOAT8 = torch.float8_e4m3fn


def deepep_round(problem: Round, wire: str, laps: Laps) -> Candidate:
    """A round over DeepEP with rows in bfloat16 (`none`) or in e4m3 with a scale for 128 elements (`fp8`)."""
    return Candidate(NAME, wire, None, lambda: _contender(problem, wire, laps))


def _row_bytes(problem: Round, parsed: WireFormat) -> int:
    """Of the elements of a dispatched row."""
    return problem.hidden * (_FLOAT8.itemsize if parsed.quantized else problem.dtype.itemsize)


def _refuse(problem: Round, parsed: WireFormat) -> None:
    """What would stop the ranks inside of it, where it cannot say so itself. Collective."""
    comm, row_bytes = problem.comm, _row_bytes(problem, parsed)
    hosts = len(set(comm.all_gather_object(socket.gethostname())))
    if hosts > 1 or comm.size > _MOST_RANKS:
        raise NotHere(f"compared within one host, on up to {_MOST_RANKS} GPUs; here are {comm.size} on {hosts}")
    if problem.dtype != torch.bfloat16:
        raise NotHere(f"it takes bfloat16 alone, not {str(problem.dtype).removeprefix('torch.')}")
    if row_bytes % _ROW_MULTIPLE or row_bytes > _MOST_ROW_BYTES:
        raise NotHere(
            f"it takes rows of multiples of {_ROW_MULTIPLE} bytes up to {_MOST_ROW_BYTES}; these have {row_bytes}"
        )
    if parsed.quantized and problem.hidden % parsed.group:
        raise NotHere(f"its e4m3 takes multiples of {parsed.group} elements, not {problem.hidden}")


def _buffer(library: Any, problem: Round) -> Any:
    size, row_bytes = problem.comm.size, problem.hidden * problem.dtype.itemsize
    configs = library.Buffer.get_dispatch_config(size), library.Buffer.get_combine_config(size)
    buffer_bytes = max(config.get_nvl_buffer_size_hint(row_bytes, size) for config in configs)
    return library.Buffer(problem.comm.group, buffer_bytes, 0, explicitly_destroy=True)


def _contender(problem: Round, wire: str, laps: Laps) -> Contender:
    comm, label, parsed = problem.comm, label_of(NAME, wire, None), WireFormat.parse(wire)
    _refuse(problem, parsed)
    library = on_all_ranks(comm, lambda: importlib.import_module(PACKAGE))
    buffer = on_all_ranks(comm, lambda: _buffer(library, problem))
    # Versions before 2 have no name for it, and take int64.
    ids = problem.topk_ids.to(getattr(library, "topk_idx_t", torch.int64))

    def run() -> Mapping[str, torch.Tensor]:
        laps.start()
        rank_counts, _, expert_counts, is_in_rank, _ = buffer.get_dispatch_layout(ids, problem.experts)
        received, own_ids, weights, counts, handle, _ = buffer.dispatch(
            _encode(problem.x, parsed) if parsed.quantized else problem.x,
            topk_idx=ids,
            topk_weights=problem.topk_weights,
            num_tokens_per_rank=rank_counts,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=expert_counts,
        )
        rows = _decode(received, problem.dtype) if parsed.quantized else received
        # They lie by source rank, and then by token.
        order = by_expert(own_ids, weights, torch.arange(len(rows), device=rows.device), sum(counts))
        tokens = rows.index_select(0, order.source)
        laps.end(f"{label} dispatch")
        expert_out = problem.experts_on(tokens)
        laps.skip()
        y, _, _ = buffer.combine(summed(expert_out, order, len(rows)), handle)
        laps.end(f"{label} combine", f"{label} moe")
        return {"dispatch": tokens, "combine": y, "moe": y}

    def judge(operation: str, got: torch.Tensor) -> Verdict:
        return (problem.judge_dispatch if operation == "dispatch" else problem.judge_rank_sums)(got, parsed)

    on_all_ranks(comm, run, undo=buffer.destroy)
    sent = _sent_bytes(problem, parsed, ids.itemsize)
    return Contender(NAME, wire, None, run, judge, sent, close=buffer.destroy)


def _sent_bytes(problem: Round, parsed: WireFormat, id_bytes: int) -> dict[str, float]:
    """Rows with their numbers, and on the way there with ids, weights and scales."""
    number = torch.int32.itemsize
    routing = number + problem.top_k * (id_bytes + torch.float32.itemsize)
    scales = problem.hidden // parsed.group * torch.float32.itemsize if parsed.quantized else 0
    sent = {
        "dispatch": problem.leaving * (_row_bytes(problem, parsed) + routing + scales),
        "combine": problem.arriving * (problem.hidden * problem.dtype.itemsize + number),
    }
    return {**sent, "moe": sum(sent.values())}


def _encode(x: torch.Tensor, parsed: WireFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, hidden] to e4m3 and float32 [rows, groups], with the scales of thinwire's format: it is judged by them."""
    groups = x.float().view(len(x), -1, parsed.group)
    scales = (groups.abs().amax(-1) * (1 / parsed.qmax)).bfloat16().float()
    quantized = groups / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    return quantized.clamp(-parsed.qmax, parsed.qmax).to(_FLOAT8).view_as(x), scales


def _decode(received: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    quantized, scales = received
    groups = quantized.float().unflatten(1, (scales.shape[1], -1)) * scales[..., None]
    return groups.flatten(1).to(dtype)
