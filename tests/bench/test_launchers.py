"""Alone, under torchrun and under mpirun `thinwire bench` finds all baselines right, and one rank prints and writes."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from thinwire.tools.bench.options import COLLECTIVES, OPERATIONS

ROOT = Path(__file__).parents[2]
FEW = (
    *("-b", "1000", "-e", "40000", "-f", "40", "--tokens", "7", "--hidden", "200", "--experts", "5", "--top-k", "2"),
    *("-n", "2", "-w", "1", "--sample-seconds", "0"),
)


def _mpirun() -> str | None:
    return shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def _run(launcher: Sequence[str], arguments: Sequence[str], file: Path) -> tuple[dict[str, Any], list[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": "1",
    }
    command = [*launcher, "-m", "thinwire", "bench", *FEW, *arguments, "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text()), done.stdout.splitlines()


def _require_all_right(written: dict[str, Any], printed: Sequence[str], implementations: set[str]) -> None:
    assert [line for line in written["figures"] if line["wrong"] != 0 or line["seconds"] is None] == []
    for operation in OPERATIONS:
        lines = [line for line in written["figures"] if line["operation"] == operation]
        assert {line["implementation"] for line in lines} >= implementations
        assert all(line["speedup"] == 1 for line in lines if line["implementation"] == "gloo")
    assert sum(line.startswith(" ") for line in printed) == len(written["figures"])
    assert "# wrong: 0 elements" in printed


@pytest.mark.exhaustive
def test_processes_of_this_host_have_the_process_groups_baselines(tmp_path: Path) -> None:
    arguments = ["--ranks", "3", "--routing", "uniform,hot:0.6", "--device", "cpu", "--dtype", "float16"]
    written, printed = _run([sys.executable], arguments, tmp_path / "bench.json")
    assert written["ranks"] == 3 and written["launched"] == "processes of one host" and written["hosts"] == 1
    assert written["settings"]["routing"] == "uniform,hot:0.6" and written["machine"]["threads"] == 1
    assert written["command"].startswith("thinwire bench -b 1000 ")
    _require_all_right(written, printed, {"gloo", "thinwire"})


@pytest.mark.exhaustive
def test_torchruns_ranks_are_joined(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    written, printed = _run(launcher, ["all_gather", "moe", "--baselines", "none"], tmp_path / "bench.json")
    assert written["ranks"] == 2 and written["launched"] == "torchrun" and written["skipped"] == []
    assert sum(line.startswith(" ") for line in printed) == len(written["figures"]) == 18
    assert [line.split()[1] for line in printed if re.match(r"#    \d ", line)] == ["0", "1"]


@pytest.mark.exhaustive
@pytest.mark.skipif(_mpirun() is None, reason="mpirun is not installed")
def test_within_mpirun_open_mpi_is_compared_with(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="Open MPI is called through mpi4py")
    # Ranks outnumber cores: they must yield, share memory only, and run as root where the tests do.
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    launcher = [str(_mpirun()), *options, "-np", "2", sys.executable]
    written, printed = _run(launcher, ["--routing", "hot:0.9"], tmp_path / "bench.json")
    assert written["ranks"] == 2 and written["launched"] == "Open MPI"
    _require_all_right(written, printed, {"gloo", "thinwire", "Open MPI"})
    # MPI has no bfloat16: twice the bytes, and the wire says why.
    sums = {line["wire"] for line in written["figures"]
            if line["implementation"] == "Open MPI" and line["operation"] in COLLECTIVES[2:]}  # fmt: skip
    assert sums == {"float32"}
