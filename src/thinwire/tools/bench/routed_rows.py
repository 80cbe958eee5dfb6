"""Expert parallelism as it is written with a plain all-to-all: a row for each expert of a token, there and back.

Rows are permuted by expert, counts are exchanged, then rows; received ones are permuted by expert again. Back it goes
the same way, and the token's home makes the weighted sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from thinwire.comm import Communicator
from thinwire.tools.bench.baselines import SeparateInt8
from thinwire.tools.bench.checks import Verdict
from thinwire.tools.bench.contender import Candidate, Contender, label_of
from thinwire.tools.bench.expert_problem import Round
from thinwire.tools.bench.timing import Laps
from thinwire.wire import WireFormat

#: Moves rows: tensor [rows, ...], counts to send to each rank, counts to receive from each.
Exchange = Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]


def group_exchange(comm: Communicator) -> Exchange:
    """The process group's all-to-all."""

    def exchange(rows: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> torch.Tensor:
        received = rows.new_empty(sum(recv_counts), *rows.shape[1:])
        dist.all_to_all_single(received, rows, list(recv_counts), list(send_counts), group=comm.group)
        return received

    return exchange


def routed_rows(problem: Round, name: str, wire: str, exchange: Exchange, laps: Laps) -> Candidate:
    """A round over `exchange`; if `wire` says so, rows are quantised by hand before it, and dequantised behind it."""
    return Candidate(name, wire, None, lambda: _routed_rows(problem, name, wire, exchange, laps))


def _routed_rows(problem: Round, name: str, wire: str, exchange: Exchange, laps: Laps) -> Contender:
    label, parsed = label_of(name, wire, None), WireFormat.parse(wire)
    codec = SeparateInt8(parsed) if parsed.quantized else None
    x, hidden, ids = problem.x, problem.hidden, problem.topk_ids
    local = [end - begin for begin, end in zip(problem.first, problem.first[1:], strict=False)]
    own = local[problem.comm.rank]
    weights = problem.topk_weights * (ids >= 0)

    def encode(rows: torch.Tensor) -> torch.Tensor:
        return rows if codec is None else codec.encode(rows)

    def decode(rows: torch.Tensor) -> torch.Tensor:
        return rows if codec is None else codec.decode(rows, hidden, problem.dtype)

    def run() -> Mapping[str, torch.Tensor]:
        laps.start()
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        order = order[int((flat < 0).sum()) :]
        source = order // problem.top_k
        counts = flat[order].bincount(minlength=problem.experts)
        # [ranks, own experts]: rows that each rank has for each expert here
        arriving = exchange(counts, local, [own] * len(local)).view(len(local), own)
        send_counts = [int(part.sum()) for part in counts.split(local)]
        recv_counts = arriving.sum(1).tolist()
        received = exchange(encode(x).index_select(0, source), send_counts, recv_counts)
        experts = torch.arange(own, device=x.device).repeat(len(local))
        by_expert = experts.repeat_interleave(arriving.flatten()).argsort(stable=True)
        tokens = decode(received.index_select(0, by_expert))
        laps.end(f"{label} dispatch")
        expert_out = problem.experts_on(tokens)
        laps.skip()
        back = encode(expert_out)
        home = decode(exchange(back.index_select(0, by_expert.argsort()), recv_counts, send_counts))
        place = torch.zeros_like(flat)
        place[order] = torch.arange(len(order), device=x.device)
        total = torch.zeros_like(x, dtype=torch.float32)
        if len(home):
            # Choice by choice: on the CPU several times as fast as index_add_, or a product over all choices.
            by_choice = home.index_select(0, place).view(*ids.shape, hidden)
            for choice in range(problem.top_k):
                total.addcmul_(by_choice[:, choice].float(), weights[:, choice, None])
        problem.out.copy_(total)
        laps.end(f"{label} combine", f"{label} moe")
        return {"dispatch": tokens, "combine": problem.out, "moe": problem.out}

    def judge(operation: str, got: torch.Tensor) -> Verdict:
        if operation == "dispatch":
            return problem.judge_dispatch(got, parsed)
        return problem.judge_rounded(got) if codec is None else problem.judge_quantized(got, parsed)

    row_bytes = hidden * problem.dtype.itemsize if codec is None else codec.row_bytes(hidden)
    begin, end = problem.first[problem.comm.rank], problem.first[problem.comm.rank + 1]
    mine = (ids >= begin) & (ids < end)
    leaving = int((ids >= 0).sum()) - int(mine.sum())
    arriving_rows = problem.expert_rows - int(mine.sum())
    sent = {
        "dispatch": leaving * row_bytes + (problem.experts - own) * torch.int64.itemsize,
        "combine": arriving_rows * row_bytes,
    }
    return Contender(name, wire, None, run, judge, sent | {"moe": sum(sent.values())}, (problem.out,), (x,))
