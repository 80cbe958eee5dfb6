"""Open MPI through mpi4py: collectives of CPU tensors, where mpirun started the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thinwire.comm import Communicator
from thinwire.tools.bench.contender import NotHere

NAME = "Open MPI"


class OpenMPI:
    """MPI's world, whose ranks are the communicator's. Tensors are moved as bytes.

    MPI has no bfloat16 and no float16: sums of those are sums of float32, which is what `sum_dtype` says.

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
        world = MPI.COMM_WORLD
        if (world.rank, world.size) != (comm.rank, comm.size):
            raise NotHere(f"its rank {world.rank} of {world.size} is rank {comm.rank} of {comm.size} here")
        self._mpi, self._world = MPI, world

    def barrier(self) -> None:
        """MPI's own."""
        self._world.Barrier()

    def exchange(self, rows: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> torch.Tensor:
        """Alltoallv of rows [rows, ...] into a new tensor."""
        out = rows.new_empty(sum(recv_counts), *rows.shape[1:])
        self.all_to_all_v(rows, send_counts, out, recv_counts)()
        return out

    def all_to_all_v(
        self, x: torch.Tensor, send_counts: Sequence[int], out: torch.Tensor, recv_counts: Sequence[int]
    ) -> Callable[[], object]:
        """Alltoallv of rows of x into `out`."""
        row_bytes = x[:1].nbytes if len(x) else out[:1].nbytes
        send = self._segments(x, send_counts, row_bytes)
        recv = self._segments(out, recv_counts, row_bytes)
        return lambda: self._world.Alltoallv(send, recv)

    def _segments(self, rows: torch.Tensor, counts: Sequence[int], row_bytes: int) -> Any:
        sizes = [count * row_bytes for count in counts]
        return [_bytes(rows), (sizes, [sum(sizes[:rank]) for rank in range(len(sizes))]), self._mpi.BYTE]

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        """Allgather of x into `out`."""
        send, recv = [_bytes(x), self._mpi.BYTE], [_bytes(out), self._mpi.BYTE]
        return lambda: self._world.Allgather(send, recv)

    @staticmethod
    def sum_dtype(dtype: torch.dtype) -> torch.dtype:
        """In which tensors of a dtype can be summed."""
        return dtype if dtype == torch.float64 else torch.float32

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        """Reduce_scatter of equal shares, of tensors in `sum_dtype`."""
        counts, op = [out.numel()] * self._world.size, self._mpi.SUM
        return lambda: self._world.Reduce_scatter(x.numpy(), out.numpy(), counts, op)

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        """Allreduce, of tensors in `sum_dtype`."""
        op = self._mpi.SUM
        return lambda: self._world.Allreduce(x.numpy(), out.numpy(), op)


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()
