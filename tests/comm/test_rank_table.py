"""Rank tables in HCCL's form give every process its rank, its device and the meeting point, or say what is wrong."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from thinwire.comm import RankTable, discover
from thinwire.comm.launch import bootstrap
from thinwire.errors import RankTableError, ThinwireError
from thinwire.fields import LONGEST_FILE
from thinwire.testing import run_ranks


def server(name, ranks, **more):
    """`ranks` are by device."""
    devices = [
        {"device_id": str(device), "device_ip": f"192.98.{device + 1}.8", "rank_id": str(rank)}
        for device, rank in enumerate(ranks)
    ]
    return {"server_id": name, "device": devices, **more}


# As MindSpore's hccl_tools write them; the second has a name for a server id, as CANN's documentation has.
ONE_SERVER = {
    "version": "1.0",
    "server_count": "1",
    "server_list": [server("10.155.111.140", range(4), host_nic_ip="reserve")],
    "status": "completed",
}
TWO_SERVERS = {
    "status": "completed",
    "version": "1.0",
    "server_count": "2",
    "server_list": [server("node_0", (2, 3)), server("node_1", (1, 0), host_ip="172.16.0.101", container_ip="x")],
}
SUPER_POD = {
    "status": "completed",
    "version": "1.2",
    "server_count": 1,
    "server_list": [{"server_id": "10.0.0.7", "device": [{"device_id": 5, "super_device_id": "9", "rank_id": 0}]}],
    "super_pod_list": [{"super_pod_id": "0", "server_list": [{"server_id": "10.0.0.7"}]}],
}


def test_a_table_of_one_server_gives_ranks_devices_and_the_meeting_point():
    for rank in range(4):
        info = discover({"RANK_ID": str(rank)}, rank_table=ONE_SERVER)
        assert (info.rank, info.size, info.local_rank, info.device_id) == (rank, 4, rank, rank)
        assert info.address == ("10.155.111.140", 29500)
        assert f"server 10.155.111.140, device {rank}; rank from HCCL (RANK_ID)" in info.source


def test_a_table_of_two_servers_meets_at_rank_zeros_and_counts_ranks_on_each():
    table = RankTable.load(TWO_SERVERS)
    assert table.servers == ("node_1", "node_0")
    found = [(entry.server, entry.device_id, entry.local_rank, entry.address) for entry in table.entries]
    assert found == [
        ("node_1", 1, 1, "172.16.0.101"),
        ("node_1", 0, 0, "172.16.0.101"),
        ("node_0", 0, 0, "node_0"),
        ("node_0", 1, 1, "node_0"),
    ]
    assert discover({}, rank=2, rank_table=table).address == ("172.16.0.101", 29500)
    assert table.entry(3).device_ip == "192.98.2.8"


def test_numbers_may_be_numbers_and_fields_that_are_not_known_are_ignored():
    info = discover({}, rank_table=SUPER_POD)  # one rank: nothing else need say which
    assert (info.rank, info.size, info.device_id, info.address) == (0, 1, 5, None)


@pytest.mark.parametrize(
    ("environ", "arguments", "rank", "told"),
    [
        ({"RANK_ID": "1", "RANK": "2"}, {"rank": 3}, 3, "the argument rank"),
        ({"RANK_ID": "1", "RANK": "2"}, {}, 1, "HCCL"),
        ({"RANK": "2", "WORLD_SIZE": "4", "SLURM_PROCID": "1"}, {}, 2, "torchrun"),
        ({"OMPI_COMM_WORLD_RANK": "3", "SLURM_PROCID": "1"}, {}, 3, "Open MPI"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, {"world_size": 4}, 1, "Slurm"),
    ],
)
def test_the_rank_comes_from_the_argument_or_the_launcher(environ, arguments, rank, told):
    info = discover(environ, rank_table=ONE_SERVER, **arguments)
    assert info.rank == rank and info.source.endswith(info.source[info.source.index("rank from ") :])
    assert f"rank from {told}" in info.source


def test_master_addr_and_master_port_say_otherwise_where_ranks_meet():
    environ = {"RANK_ID": "0", "MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "12345"}
    assert discover(environ, rank_table=ONE_SERVER).address == ("10.9.9.9", 12345)
    assert discover(environ | {"MASTER_ADDR": ""}, rank_table=ONE_SERVER).address == ("10.155.111.140", 12345)


def change(table, **changes):
    """A copy with `path=value`, the parts of the path joined by two underscores; `...` deletes."""
    table = copy.deepcopy(table)
    for path, value in changes.items():
        *parts, last = (int(part) if part.isdigit() else part for part in path.split("__"))
        place = table
        for part in parts:
            place = place[part]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return table


DEVICE = "server_list__0__device__1"


def test_files_are_read_and_named_when_they_cannot_be(tmp_path):
    path = tmp_path / "hccl.json"
    path.write_text(json.dumps(ONE_SERVER))
    for place in (path, str(path)):
        table = RankTable.load(place)
        assert table.size == 4 and table.source == f"rank table {path}" and RankTable.load(table) is table
    path.write_text("{'version': 1}")
    with pytest.raises(RankTableError, match=r"rank table .*hccl.json: not JSON: .Expecting property name"):
        RankTable.load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RankTableError, match="hccl.json: not JSON"):
        RankTable.load(path)
    with pytest.raises(RankTableError, match=r"missing.json: cannot be read: .*No such file"):
        RankTable.load(tmp_path / "missing.json")
    with path.open("wb") as file:
        file.truncate(LONGEST_FILE + 1)
    with pytest.raises(RankTableError, match=f"hccl.json: cannot be read: .*longer than {LONGEST_FILE} bytes"):
        RankTable.load(path)


def test_on_cuda_the_tables_device_is_taken(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    info = discover({"RANK_ID": "0"}, rank_table=TWO_SERVERS)
    device, reason = bootstrap._choose_device(None, info)
    assert device == torch.device("cuda", 1) == chosen[0] and "rank table" in reason
    assert bootstrap._choose_device("cuda", info)[0] == device
    assert bootstrap._choose_device("cuda:3", info)[0] == torch.device("cuda", 3)
    with pytest.raises(ThinwireError, match="device 5 of the rank table has no GPU of its own: 4 visible"):
        bootstrap._choose_device(None, discover({}, rank_table=SUPER_POD))


PROGRAM = """
import sys, torch
import thinwire as tw
comm = tw.init(rank_table=sys.argv[1], device="cpu", timeout=20.0)
x = torch.tensor([1.0 + comm.rank])
comm.all_reduce(x)
lines = comm.explain().splitlines()
print(comm.rank, comm.size, x.item(), lines[1].strip(), flush=True)
comm.barrier()
"""


@pytest.mark.exhaustive
def test_processes_that_know_only_the_table_and_their_rank_find_each_other(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    table = {"version": "1.0", "server_count": "1", "server_list": [server("127.0.0.1", (1, 0, 2))]}
    path = tmp_path / "rank_table.json"
    path.write_text(json.dumps(table))
    loopback = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "MASTER_ADDR", "WORLD_SIZE")}
    environ |= {"GLOO_SOCKET_IFNAME": loopback, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-c", PROGRAM, str(path)]
    ranks = [
        subprocess.Popen(command, env=environ | {"RANK_ID": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    told = [rank.communicate(timeout=90)[0].strip() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    for rank, device in ((0, 1), (1, 0), (2, 2)):
        where = f"rank and size: from rank table {path}, server 127.0.0.1, device {device}; rank from HCCL (RANK_ID)"
        assert told[rank] == f"{rank} 3 6.0 {where}"


def join_with_tables(comm, tables):
    import thinwire as tw

    joined = tw.init(rank_table=tables[0])
    assert (joined.rank, joined.size) == (comm.rank, 4)
    assert tw.init(rank_table=tables[0]) is joined
    for arguments in ({"rank_table": SUPER_POD}, {"rank": (comm.rank + 1) % 4, "rank_table": tables[0]}):
        with pytest.raises(ThinwireError, match="world_size=1|rank="):
            tw.init(**arguments)
    with pytest.raises(tw.ConfigMismatch, match=r"rank_table: .* on ranks 0, 1, 3; .* on rank 2"):
        tw.init(rank_table=tables[comm.rank == 2], domain="other")
    return tw.init(rank_table=tables[1], domain="one more").size


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_ranks_with_different_tables_are_told(mode):
    tables = [ONE_SERVER, change(ONE_SERVER, server_list__0__server_id="10.0.0.9")]
    assert run_ranks(join_with_tables, 4, tables, mode=mode) == [4] * 4
