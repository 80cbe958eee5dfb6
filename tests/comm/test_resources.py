"""How many threads a CPU rank uses: by the variable, else by its share of the cores; and which control groups count."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from thinwire.comm import resources as module
from thinwire.comm.communicator import Communicator
from thinwire.comm.resources import THREADS_VARIABLE, CpuShare, control_groups, cpu_share, usable_cores
from thinwire.comm.threads import ThreadWorld
from thinwire.errors import ThinwireError
from thinwire.tools.doctor.looks import processors


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """16 cores and no launcher."""
    module._quotas.cache_clear()
    for name in (THREADS_VARIABLE, *(name for names in module._SIZES for name in names)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr(module, "control_groups", lambda controller: [])
    yield
    module._quotas.cache_clear()


@pytest.mark.parametrize(
    ("ranks", "environment", "expected"),
    [
        (None, {}, CpuShare(16, "16 cores")),
        (3, {}, CpuShare(5, "16 cores, 3 ranks")),
        (40, {}, CpuShare(1, "16 cores, 40 ranks")),
        (40, {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "40"}, CpuShare(4, "16 cores, 4 ranks on this host")),
        (
            40,
            {"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_SIZE": "40", "LOCAL_WORLD_SIZE": "1"},
            CpuShare(2, "16 cores, 8 ranks on this host"),
        ),
        (2, {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}, CpuShare(16, "16 cores, 1 rank on this host")),
        (None, {"LOCAL_WORLD_SIZE": "4"}, CpuShare(4, "16 cores, 4 ranks on this host")),
        # of other launches
        (2, {"LOCAL_WORLD_SIZE": "1"}, CpuShare(8, "16 cores, 2 ranks")),
        (2, {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}, CpuShare(8, "16 cores, 2 ranks")),
        (2, {"LOCAL_WORLD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "2"}, CpuShare(8, "16 cores, 2 ranks")),
        (2, {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"}, CpuShare(8, "16 cores, 2 ranks")),
        # no numbers
        (None, {"LOCAL_WORLD_SIZE": "x"}, CpuShare(16, "16 cores")),
        (None, {"LOCAL_WORLD_SIZE": "\u0664"}, CpuShare(16, "16 cores")),
        (None, {"LOCAL_WORLD_SIZE": "12345678 (x)"}, CpuShare(16, "16 cores")),
        (None, {"LOCAL_WORLD_SIZE": "1" * 5000}, CpuShare(16, "16 cores")),
        (2, {THREADS_VARIABLE: "7"}, CpuShare(7, "by THINWIRE_CPU_THREADS")),
        (2, {THREADS_VARIABLE: ""}, CpuShare(8, "16 cores, 2 ranks")),
    ],
)
def test_threads_are_the_share_of_the_cores_unless_told(ranks, environment, expected, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cpu_share(ranks) == expected


@pytest.mark.parametrize("text", ["0", "-1", "two", "1025", "1e2", "9" * 50, " 2", "\u0664"])
def test_a_number_that_is_none_is_refused(text, monkeypatch):
    monkeypatch.setenv(THREADS_VARIABLE, text)
    with pytest.raises(ThinwireError, match=f"{THREADS_VARIABLE} is .* in the environment, expected 1 to 1024"):
        cpu_share(2)
    with pytest.raises(ThinwireError, match=THREADS_VARIABLE):
        Communicator.of_threads(ThreadWorld(2))


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("max 100000", 16),
        ("", 16),
        ("max", 16),
        ("100000 max", 16),
        ("100000 0", 16),
    ],
)
def test_a_quota_allows_fewer_cores(quota, cores, monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(module, "control_groups", lambda controller: [(tmp_path / "none", True), (tmp_path, True)])
    assert usable_cores() == cores


@pytest.mark.parametrize(
    ("quota", "period", "cores"), [("300000", "100000", 3), ("-1", "100000", 16), ("300000", "", 16)]
)
def test_a_quota_of_version_1_allows_fewer_cores(quota, period, cores, monkeypatch, tmp_path):
    (tmp_path / "cpu.cfs_quota_us").write_text(quota + "\n")
    (tmp_path / "cpu.cfs_period_us").write_text(period + "\n")
    monkeypatch.setattr(module, "control_groups", lambda controller: [(tmp_path, False)])
    assert usable_cores() == cores


def test_ranks_that_are_threads_share_with_each_other_whatever_a_launcher_says(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    comm = Communicator.of_threads(ThreadWorld(8))[0]
    assert "threads for rows of a large call: 2 (16 cores, 8 ranks)" in comm.explain()


def test_doctor_says_how_many_and_what_is_wrong_with_the_variable(monkeypatch):
    assert found_by_doctor() == ("ok", "16 for the rows of a large call, were this process a rank: 16 cores", "")
    monkeypatch.setenv(THREADS_VARIABLE, "two")
    mark, text, advice = found_by_doctor()
    assert mark == "problem" and text.startswith(f"{THREADS_VARIABLE} is 'two'") and THREADS_VARIABLE in advice


def found_by_doctor():
    (finding,) = [finding for finding in processors() if finding.name == "threads"]
    return finding.mark, finding.text, finding.advice


def test_an_affinity_that_changes_counts_at_once(monkeypatch):
    assert cpu_share(2).threads == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert cpu_share(2).threads == 1


def test_explain_tells_threads_only_where_there_may_be_some(monkeypatch):
    comm = Communicator.of_threads(ThreadWorld(2))[0]
    for backend, told in (("", True), ("numba", True), ("torch", False), ("triton", False)):
        monkeypatch.setenv("THINWIRE_BACKEND", backend)
        assert ("threads for rows of a large call: 8" in comm.explain()) == told, backend


ROOT = Path("/sys/fs/cgroup")


@pytest.fixture
def memberships(monkeypatch):
    """A function that sets what /proc/self/cgroup says, or raises."""

    def say(text):
        def read_text(path, encoding=None, errors=None):
            assert path == Path("/proc/self/cgroup")
            if isinstance(text, OSError):
                raise text
            return text

        monkeypatch.setattr(Path, "read_text", read_text)

    return say


def test_groups_are_those_of_the_controller_and_all_above_them(memberships):
    memberships("5:cpu,cpuacct:/d\n4:memory:/m\n1:name=systemd:/x\n0::/a/b\n")
    assert list(control_groups("cpu")) == [
        (ROOT / "cpu/d", False),
        (ROOT / "cpu", False),
        (ROOT / "a/b", True),
        (ROOT / "a", True),
        (ROOT, True),
    ]


def test_lines_that_name_no_group_are_left_out(memberships):
    memberships("\ngarbage\n5:cpu\n0::/\n")
    assert list(control_groups("cpu")) == [(ROOT, True)]


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), FileNotFoundError(2, "no such file")])
def test_where_it_cannot_be_read_there_are_none(error, memberships):
    memberships(error)
    assert list(control_groups("cpu")) == []
