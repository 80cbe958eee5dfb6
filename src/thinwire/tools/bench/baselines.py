"""What collectives are compared with: the process group's own, Open MPI's, quantising by hand, and a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from thinwire.comm import Communicator
from thinwire.tools.bench import checks, mpi
from thinwire.tools.bench.checks import Verdict
from thinwire.tools.bench.contender import Candidate, Contender
from thinwire.tools.bench.mpi import OpenMPI
from thinwire.tools.bench.problems import AllGather, AllReduce, AllToAll, Problem, ReduceScatter, Sum
from thinwire.tools.bench.separate import SeparateInt8
from thinwire.wire import WireFormat

COPY = "copy"
EXACT = WireFormat.parse("none")
#: PyTorch 2.13 has new names for both, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_name(comm: Communicator) -> str | None:
    """What the process group's own collectives are called, "gloo" or "nccl"; None where ranks are threads."""
    return None if comm.in_process else str(dist.get_backend(comm.group))


def copy(source: torch.Tensor, target: torch.Tensor, operations: tuple[str, ...]) -> Candidate:
    """A plain copy of as many bytes, for what memory allows; measured as each of the operations."""

    def run() -> Mapping[str, torch.Tensor]:
        target.copy_(source)
        return dict.fromkeys(operations, target)

    def judge(operation: str, got: torch.Tensor) -> Verdict:
        return checks.compare(got, source, 0.0)

    sent = dict.fromkeys(operations, 0.0)
    return Candidate(COPY, "none", None, lambda: Contender(COPY, "none", None, run, judge, sent, (target,)))


def _contender(name: str, problem: Problem, call: Callable[[], object], wire: str = "none") -> Contender:
    """Of exact collectives: what is moved arrives to the last bit, sums are rounded in some order."""

    def run() -> Mapping[str, torch.Tensor]:
        call()
        return {problem.operation: problem.out}

    def judge(operation: str, got: torch.Tensor) -> Verdict:
        return problem.judge_rounded(got) if isinstance(problem, Sum) else problem.judge(got, EXACT)

    sent = {problem.operation: problem.logical_bytes}
    return Contender(name, wire, None, run, judge, sent, (problem.out,), (problem.x,))


def of_group(problem: Problem, name: str) -> Candidate:
    """The process group's own collective, in the tensor's dtype."""
    return Candidate(name, "none", None, lambda: _contender(name, problem, _group_call(problem)))


def _group_call(problem: Problem) -> Callable[[], object]:
    x, out, group = problem.x, problem.out, problem.comm.group
    if isinstance(problem, AllToAll):
        return partial(dist.all_to_all_single, out, x, problem.recv_counts, problem.send_counts, group=group)
    if isinstance(problem, AllGather):
        return partial(_all_gather, out, x, group=group)
    if isinstance(problem, ReduceScatter):
        return partial(_reduce_scatter, out, x, group=group)

    def all_reduce() -> None:
        out.copy_(x)  # it works in place, and sums of sums would overflow
        dist.all_reduce(out, group=group)

    return all_reduce


def of_mpi(problem: Problem, world: OpenMPI) -> Candidate:
    """Open MPI's collective; sums of 16-bit floats are sums of float32, which the wire's name then says."""
    x, out, dtype = problem.x, problem.out, problem.dtype
    if not isinstance(problem, Sum):
        if isinstance(problem, AllToAll):
            call = world.all_to_all_v(x, problem.send_counts, out, problem.recv_counts)
        else:
            call = world.all_gather(x, out)
        return Candidate(mpi.NAME, "none", None, lambda: _contender(mpi.NAME, problem, call))
    sum_dtype = world.sum_dtype(dtype)
    wire = "none" if sum_dtype == dtype else str(sum_dtype).removeprefix("torch.")

    def make() -> Contender:
        wide, wide_out = x.to(sum_dtype), out.to(sum_dtype)
        reduce = world.reduce_scatter if isinstance(problem, ReduceScatter) else world.all_reduce
        made = _contender(mpi.NAME, problem, reduce(wide, wide_out), wire)
        call = made.call

        def run() -> Mapping[str, torch.Tensor]:
            call()
            return {problem.operation: wide_out}

        made.call, made.poisoned, made.inputs = run, (wide_out,), (wide,)
        made.wire_bytes = {problem.operation: problem.logical_bytes * sum_dtype.itemsize / dtype.itemsize}
        return made

    return Candidate(mpi.NAME, wire, None, make)


def quantized_by_hand(problem: Problem, wire: str, group: str) -> Candidate:
    """Quantises, calls the process group's collective, dequantises; each in torch operations of its own."""
    name = f"quantize, {group}"
    return Candidate(name, wire, None, lambda: _quantized(problem, SeparateInt8(WireFormat.parse(wire)), wire, name))


def _quantized(problem: Problem, codec: SeparateInt8, wire: str, name: str) -> Contender:
    comm, x, out, parsed = problem.comm, problem.x, problem.out, WireFormat.parse(wire)
    size, group = comm.size, comm.group

    def exchange(rows: torch.Tensor, recv_counts: list[int] | None, send_counts: list[int] | None) -> torch.Tensor:
        received = rows.new_empty(sum(recv_counts) if recv_counts else len(rows), rows.shape[1])
        dist.all_to_all_single(received, rows, recv_counts, send_counts, group=group)
        return received

    def gather(row: torch.Tensor) -> torch.Tensor:
        received = row.new_empty(size, row.shape[1])
        _all_gather(received, row, group=group)
        return received

    if isinstance(problem, AllToAll):
        width, sent = problem.width, problem.leaving * codec.row_bytes(problem.width)

        def call() -> None:
            received = exchange(codec.encode(x), problem.recv_counts, problem.send_counts)
            out.copy_(codec.decode(received, width, x.dtype))

    elif isinstance(problem, AllGather):
        share, sent = problem.share, (size - 1) * codec.row_bytes(problem.share)

        def call() -> None:
            out.copy_(codec.decode(gather(codec.encode(x[None])), share, x.dtype).view(-1))

    elif isinstance(problem, ReduceScatter):
        share, sent = problem.share, (size - 1) * codec.row_bytes(problem.share)

        def call() -> None:
            received = exchange(codec.encode(x.view(size, share)), None, None)
            out.copy_(codec.decode(received, share, torch.float32).sum(0))

    else:
        assert isinstance(problem, AllReduce)
        # Whole groups for each rank, so that scales belong to the same elements everywhere.
        share = -(-problem.elements // (size * codec.group)) * codec.group
        sent, missing = 2 * (size - 1) * codec.row_bytes(share), size * share - problem.elements

        def call() -> None:
            received = exchange(codec.encode(torch.nn.functional.pad(x, (0, missing)).view(size, share)), None, None)
            total = codec.decode(received, share, torch.float32).sum(0, keepdim=True)
            out.copy_(codec.decode(gather(codec.encode(total)), share, x.dtype).view(-1)[: problem.elements])

    def run() -> Mapping[str, torch.Tensor]:
        call()
        return {problem.operation: out}

    def judge(operation: str, got: torch.Tensor) -> Verdict:
        if not isinstance(problem, Sum):
            return problem.judge(got, parsed)
        counts = [max(0, min(share, problem.elements - rank * share)) for rank in range(size)]
        return problem.judge_quantized(got, parsed, counts, -(-share // codec.group) * codec.group)

    return Contender(name, wire, None, run, judge, {problem.operation: sent}, (out,), (x,))
