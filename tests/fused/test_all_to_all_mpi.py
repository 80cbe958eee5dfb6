"""Open MPI's Alltoallv as the oracle: random counts and displacements on 1 to 6 ranks, started by mpirun."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="the oracle is mpi4py")

ROOT = Path(__file__).parents[2]


def _mpirun() -> str | None:
    return shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


@pytest.mark.exhaustive
@pytest.mark.skipif(_mpirun() is None, reason="mpirun is not installed")
@pytest.mark.parametrize("ranks", range(1, 7))
def test_random_counts_and_displacements_equal_mpi(ranks: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": "1",
        "THINWIRE_TEST_PROBLEMS": "20",
        # What moves where is the question here: the reference needs no compiled kernels in each of the ranks.
        "THINWIRE_BACKEND": "torch",
    }
    # Ranks outnumber cores: they must yield, share memory only, and run as root where the tests do.
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    command = [str(_mpirun()), *options, "-np", str(ranks), sys.executable, "-m", "tests.fused.mpi_alltoallv"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"20 problems on {ranks} ranks: equal to MPI_Alltoallv" in done.stdout
