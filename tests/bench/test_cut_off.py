"""A bench that is killed leaves a file of what it had measured; one that ends, a file that says nothing of that."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

from thinwire import files
from thinwire.tools.bench.results import read_results
from thinwire.tools.cli import main

ONE_RANK = ("bench", "all_gather", "--device", "cpu", "--ranks", "1", "--baselines", "copy", "--wire", "none")
FEW = ("-b", "600", "-e", "6000", "-f", "10", "-n", "1", "-w", "0", "--sample-seconds", "0")


def test_a_bench_that_is_killed_leaves_what_it_had_measured(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    slow = ("-b", "1K", "-e", "16K", "-f", "2", "-n", "50", "--sample-seconds", "0.05", "--json", str(file))
    command = [sys.executable, "-m", "thinwire", *ONE_RANK, *slow]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while not (file.exists() and file.stat().st_size):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    read = read_results(file)
    measured = {figure.size_bytes for figure in read.figures}
    left = [each.implementation for each in read.skipped if each.reason == "the run was cut off before"]
    assert 1024 in measured and "all_gather of 16384 bytes" in left
    assert len(measured) + len(left) == 5 and all(figure.seconds for figure in read.figures)


def test_what_was_written_between_sizes_is_whole_and_the_last_says_nothing_of_a_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*ONE_RANK, *FEW, "--json", "bench.json"]) == 0
    written = json.loads(Path("bench.json").read_text())
    assert {figure["size_bytes"] for figure in written["figures"]} == {600, 6000}
    assert not [entry for entry in written["skipped"] if "cut off" in entry["reason"]]
    assert os.listdir() == ["bench.json"]


def test_a_pipe_gets_everything_at_the_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    holding = os.open(pipe, os.O_WRONLY)  # the bench opens it once before it starts
    assert main([*ONE_RANK, *FEW, "--json", str(pipe)]) == 0
    os.close(holding)
    assert len(json.loads(reader.communicate()[0])["figures"]) > 2 and pipe.is_fifo()


def test_a_file_that_cannot_be_replaced_keeps_what_it_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    files.replace_file(file, b"old")

    def killed(*paths: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        files.replace_file(file, b"new")
    assert file.read_bytes() == b"old"
