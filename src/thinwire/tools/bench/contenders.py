"""What is compared: thinwire's operations, the process group's own, Open MPI's, and a plain copy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from thinwire.comm import Communicator
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.ops import all_gather, all_reduce, reduce_scatter
from thinwire.moe.parallel import ExpertParallel
from thinwire.tools.bench.problems import Collective, Round, compare
from thinwire.tools.bench.timing import Candidate, Contender, Laps, NotHere
from thinwire.wire import WireFormat

THINWIRE, OPEN_MPI, COPY = "thinwire", "Open MPI", "copy"
#: Moves rows: tensor [rows, ...], counts to send to each rank, counts to receive from each.
Exchange = Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]
#: PyTorch 2.13 has new names for both, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def thinwire(problem: Collective | Round, wire: str, transport: str, laps: Laps) -> Candidate:
    """The operation over one wire and transport."""
    if isinstance(problem, Round):
        return Candidate(THINWIRE, wire, transport, partial(_round, problem, wire, transport, laps))
    operations: dict[str, Callable[..., object]] = {
        "all_to_all_v": all_to_all_v, "all_gather": all_gather, "reduce_scatter": reduce_scatter,
        "all_reduce": all_reduce,
    }  # fmt: skip
    settings = {"out": problem.out, "wire": wire, "comm": problem.comm, "transport": transport}
    counts = () if problem.counts is None else (problem.send_counts, problem.recv_counts)
    call = partial(operations[problem.operation], problem.x, *counts, **settings)
    return Candidate(THINWIRE, wire, transport, partial(_of_collective, problem, call, WireFormat.parse(wire)))


def process_group(problem: Collective | Round, name: str, laps: Laps) -> Candidate:
    """The process group's own collectives, "gloo" or "nccl", in the tensor's dtype."""
    x, out, group = problem.x, problem.out, problem.comm.group

    def reduce_all() -> None:
        out.copy_(x)  # it works in place, and sums of sums would overflow
        dist.all_reduce(out, group=group)

    if isinstance(problem, Round):
        return Candidate(name, "none", None, partial(_routed_rows, problem, name, partial(_exchange, group), laps))
    if problem.counts is not None:
        counts = problem.recv_counts, problem.send_counts
        call: Callable[[], object] = partial(dist.all_to_all_single, out, x, *counts, group=group)
    elif problem.operation == "all_reduce":
        call = reduce_all
    else:
        moved = _all_gather if problem.operation == "all_gather" else _reduce_scatter
        call = partial(moved, out, x, group=group)
    return Candidate(name, "none", None, partial(_of_collective, problem, call))


def _exchange(
    group: dist.ProcessGroup, rows: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
) -> torch.Tensor:
    received = rows.new_empty(sum(recv_counts), *rows.shape[1:])
    dist.all_to_all_single(received, rows, list(recv_counts), list(send_counts), group=group)
    return received


def copy(problem: Collective | Round) -> Candidate:
    """A plain copy of as many bytes, for what memory allows; no whole round is one."""
    source, operations = problem.x.new_ones(problem.copied), [each for each in problem.operations if each != "moe"]

    def make() -> Contender:
        target = torch.empty_like(source)
        run = lambda: dict.fromkeys(operations, target.copy_(source))  # noqa: E731
        return Contender(run, lambda _, got: compare(got, source, 0.0), dict.fromkeys(operations, 0.0), (target,))

    return Candidate(COPY, "none", None, make)


def _of_collective(
    problem: Collective,
    call: Callable[[], object],
    wire: WireFormat | None = None,
    x: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Contender:
    """One whose `call` reads x and fills `out`, the problem's own unless given; without a wire, another library's."""
    x, filled = problem.x if x is None else x, problem.out if out is None else out

    def run() -> Mapping[str, torch.Tensor]:
        call()
        return {problem.operation: filled}

    exact = problem.logical_bytes[problem.operation] * x.dtype.itemsize / problem.dtype.itemsize
    sent = {problem.operation: exact if wire is None else problem.wire_bytes(wire)}
    return Contender(run, partial(problem.judge, wire=wire), sent, (filled,), (x,))


def _round(problem: Round, wire: str, transport: str, laps: Laps) -> Contender:
    label = f"{THINWIRE}/{wire}/{transport}"
    sizes = problem.experts, problem.top_k, problem.hidden, problem.rows
    ep = ExpertParallel(problem.comm, *sizes, wire=wire, transport=transport, dtype=problem.dtype)
    routed = problem.x, problem.topk_ids, problem.topk_weights

    def run() -> Mapping[str, torch.Tensor]:
        laps.start()
        d = ep.dispatch(*routed)
        # Rows for experts, sorted, in one tensor; on a GPU without a wait for the host.
        tokens = d.gather(problem.expert_rows)[0] if problem.x.is_cuda else d.tokens
        laps.end(f"{label} dispatch")
        expert_out = problem.experts_on(tokens)
        laps.skip()
        y = ep.combine(expert_out, d, out=problem.out)
        laps.end(f"{label} combine", f"{label} moe")
        return {"dispatch": tokens, "combine": y, "moe": y}

    d = ep.dispatch(*routed)
    sent = {"dispatch": float(d.dispatch_traffic.wire_bytes), "combine": float(d.combine_traffic.wire_bytes)}
    ep.combine(d.tokens, d)
    judge = partial(problem.judge, wire=WireFormat.parse(wire))
    return Contender(run, judge, sent | {"moe": sum(sent.values())}, (problem.out,), (problem.x,), ep.close)


class OpenMPI:
    """Open MPI's world through mpi4py, whose ranks are the communicator's; of CPU tensors, which move as bytes.

    Raises:
        NotHere: mpirun did not start this process, mpi4py is missing, or tensors are not the CPU's.
    """

    def __init__(self, comm: Communicator) -> None:
        if "OMPI_COMM_WORLD_SIZE" not in os.environ:
            raise NotHere("mpirun did not start these ranks")
        if comm.device.type != "cpu":
            raise NotHere("compared on the CPU alone")
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise NotHere(f"mpi4py cannot be imported: {error}") from error
        self._mpi, self._world = MPI, MPI.COMM_WORLD
        if (self._world.rank, self._world.size) != (comm.rank, comm.size):
            places = f"{self._world.rank} of {self._world.size} is rank {comm.rank} of {comm.size}"
            raise NotHere(f"its rank {places} here")

    def barrier(self) -> None:
        """MPI's own."""
        self._world.Barrier()

    def _exchange(self, rows: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> torch.Tensor:
        out = rows.new_empty(sum(recv_counts), *rows.shape[1:])
        self._all_to_all_v(rows, send_counts, out, recv_counts)()
        return out

    def _all_to_all_v(
        self, x: torch.Tensor, send_counts: Sequence[int], out: torch.Tensor, recv_counts: Sequence[int]
    ) -> Callable[[], object]:
        def segments(rows: torch.Tensor, counts: Sequence[int]) -> list[Any]:
            sizes = [count * (x[:1].nbytes or out[:1].nbytes) for count in counts]
            return [_bytes(rows), (sizes, [sum(sizes[:rank]) for rank in range(len(sizes))]), self._mpi.BYTE]

        return partial(self._world.Alltoallv, segments(x, send_counts), segments(out, recv_counts))

    def candidate(self, problem: Collective | Round, laps: Laps) -> Candidate:
        """Open MPI's operation. It has no 16-bit floats: those are summed as float32, which the wire's name says."""
        if isinstance(problem, Round):
            return Candidate(OPEN_MPI, "none", None, partial(_routed_rows, problem, OPEN_MPI, self._exchange, laps))
        x, out, itemsize = problem.x, problem.out, problem.dtype.itemsize
        if problem.counts is not None:
            call = self._all_to_all_v(x, problem.send_counts, out, problem.recv_counts)
        elif problem.operation == "all_gather":
            call = partial(self._world.Allgather, [_bytes(x), self._mpi.BYTE], [_bytes(out), self._mpi.BYTE])
        else:
            return Candidate(OPEN_MPI, "none" if itemsize > 2 else "float32", None, partial(self._sum, problem))
        return Candidate(OPEN_MPI, "none", None, partial(_of_collective, problem, call))

    def _sum(self, problem: Collective) -> Contender:
        x, out = (t if t.dtype.itemsize > 2 else t.float() for t in (problem.x, problem.out))
        if problem.operation == "all_reduce":
            call = partial(self._world.Allreduce, x.numpy(), out.numpy(), self._mpi.SUM)
        else:
            counts = [out.numel()] * self._world.size
            call = partial(self._world.Reduce_scatter, x.numpy(), out.numpy(), counts, self._mpi.SUM)

        return _of_collective(problem, call, None, x, out)


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _routed_rows(problem: Round, name: str, exchange: Exchange, laps: Laps) -> Contender:
    """A round as it is written with a plain all-to-all: a row for each expert of a token, there and back.

    Rows are permuted by expert, counts are exchanged, then rows; received ones are permuted by expert again. Back it
    goes the same way, and the token's home makes the weighted sum.
    """
    label = f"{name}/none"
    x, ids, weights, rank = problem.x, problem.topk_ids, problem.topk_weights, problem.comm.rank
    local = [end - begin for begin, end in zip(problem.first, problem.first[1:], strict=False)]
    own = local[rank]

    def run() -> Mapping[str, torch.Tensor]:
        laps.start()
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=problem.experts)
        # [ranks, own experts]: rows that each rank has for each expert here
        arriving = exchange(counts, local, [own] * len(local)).view(len(local), own)
        send_counts, recv_counts = [int(part.sum()) for part in counts.split(local)], arriving.sum(1).tolist()
        received = exchange(x.index_select(0, order // problem.top_k), send_counts, recv_counts)
        experts = torch.arange(own, device=x.device).repeat(len(local))
        by_expert = experts.repeat_interleave(arriving.flatten()).argsort(stable=True)
        tokens = received.index_select(0, by_expert)
        laps.end(f"{label} dispatch")
        expert_out = problem.experts_on(tokens)
        laps.skip()
        home = exchange(expert_out.index_select(0, by_expert.argsort()), recv_counts, send_counts)
        # Choice by choice: on the CPU several times as fast as index_add_, or a product over all choices.
        by_choice = home.index_select(0, order.argsort()).view(*ids.shape, problem.hidden)
        total = torch.zeros_like(x, dtype=torch.float32)
        for choice in range(problem.top_k):
            total.addcmul_(by_choice[:, choice].float(), weights[:, choice, None])
        problem.out.copy_(total)
        laps.end(f"{label} combine", f"{label} moe")
        return {"dispatch": tokens, "combine": problem.out, "moe": problem.out}

    row_bytes = float(problem.hidden * problem.dtype.itemsize)
    mine = int(((ids >= problem.first[rank]) & (ids < problem.first[rank + 1])).sum())
    sent = {
        "dispatch": (ids.numel() - mine) * row_bytes + (problem.experts - own) * torch.int64.itemsize,
        "combine": (problem.expert_rows - mine) * row_bytes,
    }
    judge = partial(problem.judge, wire=None)
    return Contender(run, judge, sent | {"moe": sum(sent.values())}, (problem.out,), (x,))
