"""Started by mpirun: thinwire's exact all-to-all-v and MPI's Alltoallv, on the same random problems."""

from __future__ import annotations

import os

import numpy as np
import torch

import thinwire as tw
from tests.fused.test_all_to_all import _random_problem
from thinwire.fused.codec import dequantize, quantize


def main() -> None:
    from mpi4py import MPI  # joins, and changes the environment of, whoever imports it: pytest imports this module

    world = MPI.COMM_WORLD
    comm = tw.init(timeout=30.0)
    assert (comm.rank, comm.size) == (world.rank, world.size), "the launcher's ranks were not taken over"
    problems = int(os.environ["THINWIRE_TEST_PROBLEMS"])
    for seed in range(problems):
        counts, send_displs, recv_displs, rows = _random_problem(comm.size, seed + 100 * comm.size)
        mine = counts[comm.rank], [counts[source][comm.rank] for source in range(comm.size)]
        where = send_displs[comm.rank], recv_displs[comm.rank]
        x = np.random.default_rng([seed, comm.rank]).standard_normal(rows[comm.rank]).astype(np.float32)
        expected = np.full(60 * comm.size, -1.0, np.float32)
        world.Alltoallv([x, (mine[0], where[0]), MPI.FLOAT], [expected, (mine[1], where[1]), MPI.FLOAT])
        got = torch.full((60 * comm.size,), -1.0)
        tw.all_to_all_v(
            torch.from_numpy(x), *mine, send_displs=where[0], recv_displs=where[1], out=got, wire="none", comm=comm
        )
        assert np.array_equal(got.numpy(), expected), f"problem {seed}"
        # Quantised rows: MPI moves the rows that quantising and dequantising gives.
        matrix = torch.from_numpy(np.repeat(x[:, None], 130, axis=1).copy()) * torch.arange(130)
        sent = dequantize(quantize(matrix, "int8")).numpy()
        row_type = MPI.FLOAT.Create_contiguous(130).Commit()
        expected = np.full((60 * comm.size, 130), -1.0, np.float32)
        world.Alltoallv([sent, (mine[0], where[0]), row_type], [expected, (mine[1], where[1]), row_type])
        got = torch.full((60 * comm.size, 130), -1.0)
        tw.all_to_all_v(matrix, *mine, send_displs=where[0], recv_displs=where[1], out=got, wire="int8", comm=comm)
        assert np.array_equal(got.numpy(), expected), f"quantised problem {seed}"
        row_type.Free()
    if comm.rank == 0:
        print(f"{problems} problems on {comm.size} ranks: equal to MPI_Alltoallv")
    comm.close()


if __name__ == "__main__":
    main()
