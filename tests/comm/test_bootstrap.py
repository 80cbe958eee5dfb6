"""Where a process takes its rank from, and what it says when something is missing."""

from __future__ import annotations

import ast
import os
import random
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from thinwire.comm import Communicator, RankInfo, default_communicator, discover, init
from thinwire.comm.groups import COMPILE_SECONDS, limit_of_group
from thinwire.comm.launch import bootstrap, launchers
from thinwire.errors import PeerTimeout, ThinwireError
from thinwire.testing import run_ranks
from thinwire.triton_kernels.signal import grace_of

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "2"}
JOB = {"SLURM_JOB_ID": "1234567", "SLURM_STEP_NODELIST": "node[07-09,11],other", "SLURM_JOB_NODELIST": "x"}
ADDRESS = ("10.0.0.1", 29501)


@pytest.fixture
def alone(monkeypatch):
    """An environment without a launcher, and no process group left behind."""
    named = [name for launcher in launchers.LAUNCHERS for name in launcher[1:5] if name]
    for name in (*named, *launchers._RANKS_ALONE, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(bootstrap, "_of_process", bootstrap.Domains())
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, 0, "a world of one, as no launcher is known", None)),
        (MEETING, (0, 1, 0, "a world of one, as no launcher is known", None)),
        (TORCHRUN | MEETING, (3, 8, 1, "torchrun (RANK, WORLD_SIZE)", ADDRESS)),
        (OPEN_MPI | MEETING, (2, 4, 0, "Open MPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)", ADDRESS)),
        (SLURM | MEETING, (5, 6, 2, "Slurm (SLURM_PROCID, SLURM_NTASKS)", ADDRESS)),
        (SLURM | OPEN_MPI | TORCHRUN | MEETING, (3, 8, 1, "torchrun (RANK, WORLD_SIZE)", ADDRESS)),
        (SLURM | OPEN_MPI | MEETING, (2, 4, 0, "Open MPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)", ADDRESS)),
        (MPICH | MEETING, (1, 2, 1, "MPICH (PMI_RANK, PMI_SIZE)", ADDRESS)),
        (SLURM | MPICH | MEETING, (1, 2, 1, "MPICH (PMI_RANK, PMI_SIZE)", ADDRESS)),
        (
            SLURM | JOB | {"PMI_RANK": "5", "PMI_SIZE": "6"},
            (5, 6, 2, "Slurm (SLURM_PROCID, SLURM_NTASKS)", ("node07", 24567)),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, None, "torchrun (RANK, WORLD_SIZE)", None)),
        (SLURM | JOB, (5, 6, 2, "Slurm (SLURM_PROCID, SLURM_NTASKS)", ("node07", 24567))),
        (
            SLURM | JOB | {"MASTER_ADDR": "10.0.0.1"},
            (5, 6, 2, "Slurm (SLURM_PROCID, SLURM_NTASKS)", ("10.0.0.1", 24567)),
        ),
        (SLURM | JOB | {"MASTER_PORT": "29501"}, (5, 6, 2, "Slurm (SLURM_PROCID, SLURM_NTASKS)", ("node07", 29501))),
    ],
    ids=[
        "nothing",
        "address-only",
        "torchrun",
        "open-mpi",
        "slurm",
        "all",
        "mpi-in-slurm",
        "mpich",
        "mpich-in-slurm",
        "pmi-of-slurm",
        "one-without-address",
        "slurm-alone",
        "slurm-with-address",
        "slurm-with-port",
    ],
)
def test_launchers_are_found_in_their_order(environ, expected):
    assert discover(environ) == RankInfo(*expected)


@pytest.mark.parametrize("launcher", launchers.LAUNCHERS, ids=lambda launcher: launcher.name)
def test_every_launcher_says_rank_and_size(launcher):
    environ = {launcher.rank: "3", launcher.size: "4"} | ({launcher.local_rank: "1"} if launcher.local_rank else {})
    info = discover(environ | MEETING)
    assert (info.rank, info.size) == (3, 4)
    assert info.local_rank == (1 if launcher.local_rank else None) and launcher.name in info.source


ON_ONE_HOST = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}


@pytest.mark.parametrize(
    ("environ", "address", "job"),
    [
        (ON_ONE_HOST | {"PMIX_NAMESPACE": "7", "OMPI_MCA_orte_hnp_uri": "x"}, None,
         "Open MPI PMIX_NAMESPACE=7 OMPI_MCA_orte_hnp_uri=x"),
        (ON_ONE_HOST | {"PMI_FD": "x"}, None, f"Open MPI started by process {os.getppid()}"),
        (ON_ONE_HOST | {"MASTER_PORT": "29501"}, ("127.0.0.1", 29501), ""),
        (ON_ONE_HOST | MEETING, ADDRESS, ""),
        (MPICH | {"MPI_LOCALNRANKS": "2", "PMI_PORT": "h:1"}, None, "MPICH PMI_PORT=h:1"),
        (SLURM | JOB | {"SLURM_NNODES": "1"}, None, "Slurm SLURM_JOB_ID=1234567"),
        (SLURM | JOB | {"SLURM_NNODES": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_ID": "3"}, None,
         "Slurm SLURM_JOB_ID=1234567 SLURM_STEP_ID=3"),
        (SLURM | JOB | {"SLURM_NNODES": "1", "SLURM_STEP_NUM_NODES": "2"}, ("node07", 24567), ""),
    ],
)  # fmt: skip
def test_ranks_of_one_host_need_no_address(environ, address, job):
    info = discover(environ)
    assert (info.address, info.job) == (address, job)


@pytest.mark.parametrize(
    ("told", "host"),
    [
        (" 10.0.0.1\n", "10.0.0.1"),
        ("[::1]", "::1"),
        ("node_7.rack-1", "node_7.rack-1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
    ],
)
def test_a_host_is_a_name_or_an_address_alone(told, host):
    environ = TORCHRUN | MEETING | {"MASTER_ADDR": told, "MASTER_PORT": " 29501 "}
    assert discover(environ).address == (host, 29501)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("localhost", "localhost"),
        ("gpu-a1,gpu-b1", "gpu-a1"),
        ("gpu[012-020]-ib,z[1-2]", "gpu012-ib"),
        ("gpu[3,5]", "gpu3"),
    ],
)
def test_ranks_of_slurm_meet_on_the_first_node(nodes, first):
    environ = SLURM | {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes}
    assert discover(environ).address == (first, 20007)


def is_free(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.exhaustive
def test_slurms_variables_alone_are_enough_to_meet():
    job = next(job for job in random.sample(range(10_000), 100) if is_free(20_000 + job))  # its port follows from it
    loopback = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "localhost"}
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "OMPI_"))}
    environ |= slurm | {"GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, str(Path(__file__).with_name("launched.py"))]
    ranks = [
        subprocess.Popen(command, env=environ | {"SLURM_PROCID": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told, _ = (rank.communicate(timeout=90)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0]
    source = "rank and size: from Slurm (SLURM_PROCID, SLURM_NTASKS)"
    assert ast.literal_eval(told) == [(0, 2, source), (1, 2, source)]


def test_arguments_come_before_every_launcher():
    info = discover(SLURM | TORCHRUN | MEETING, rank=1, world_size=2)
    assert info == RankInfo(1, 2, 1, "the arguments rank and world_size", ADDRESS)


def test_init_alone_makes_the_default_communicator_and_close_takes_it_away(alone):
    with pytest.raises(ThinwireError, match=r"call thinwire.init\(\) first"):
        default_communicator()
    with init(device="cpu", timeout=5.0) as comm:
        assert default_communicator() is comm
        assert (comm.rank, comm.size, comm.timeout, comm.device) == (0, 1, 5.0, torch.device("cpu"))
        assert comm.exchange_counts([4]) == [4] and comm.all_gather_object("x") == ["x"]
        for fact in ("rank 0 of 1", "no launcher is known", "gloo", "made by init", "5 s"):
            assert fact in comm.explain()
    assert comm.closed and not dist.is_initialized()
    with pytest.raises(ThinwireError, match="no default communicator"):
        default_communicator()
    comm.close()
    assert init(device="cpu") is not comm


def test_a_second_init_returns_the_first_communicator_or_refuses_to_change_it(alone):
    comm = init(device="cpu", timeout=5.0)
    assert init() is init(device="cpu") is init(rank=0, world_size=1, timeout=5.0) is comm
    for arguments, told in (
        ({"timeout": 6.0}, "timeout=6.0"),
        ({"device": "cuda"}, "device='cuda'"),
        ({"rank": 1, "world_size": 2}, "rank=1, world_size=2"),
        ({"rank": 1, "world_size": 2, "domain": "another"}, "rank=1, world_size=2"),
    ):
        with pytest.raises(ThinwireError, match=rf"close\(\) that one before asking for {told}"):
            init(**arguments)
    comm.close()


def test_calls_wait_as_long_as_the_callers_group_does(alone, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")  # which wraps the backend
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    group = dist.new_group([0], timeout=timedelta(seconds=55))
    for comm, seconds in ((Communicator(group), 55), (Communicator(group, timeout=5), 5), (init(), 77)):
        assert comm.timeout == seconds and comm.split(groups=[[0]]).timeout == seconds
        comm.close()


@pytest.mark.parametrize(("seconds", "limit"), [(0.5, 600), (30, 600), (600, 1442)])
def test_nccls_watchdog_comes_after_every_wait(seconds, limit):
    assert limit_of_group("nccl", seconds).total_seconds() == limit
    kernels = seconds + COMPILE_SECONDS + grace_of(seconds)
    assert limit >= 2 * kernels and limit_of_group("gloo", seconds).total_seconds() == seconds


def test_init_takes_over_an_initialised_process_group_and_leaves_it_alone(alone):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ThinwireError, match="world_size=2 was passed, but .* already with world_size 1"):
        init(rank=0, world_size=2)
    with init() as comm:
        assert comm.group is dist.group.WORLD and "default group" in comm.explain()
    assert dist.is_initialized()
    again = init()
    dist.destroy_process_group()
    assert again.closed
    with pytest.raises(ThinwireError, match="no default communicator"):
        default_communicator()


def test_ranks_that_do_not_come_raise_peer_timeout(alone, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")  # nobody listens there
    begin = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"rank 1 of 2, from the arguments .* at 127.0.0.1:1 "):
        init(rank=1, world_size=2, device="cpu", meeting_timeout=0.2)
    assert time.monotonic() - begin < 30.0
    assert not dist.is_initialized()


def use_the_default(comm):
    with pytest.raises(ThinwireError):
        default_communicator()
    mine = init(timeout=9.0)
    assert default_communicator() is mine and mine.group is comm.group
    return mine.all_gather_object(mine.rank)


def test_init_inside_run_ranks_joins_its_ranks():
    assert run_ranks(use_the_default, 2) == [[0, 1]] * 2
