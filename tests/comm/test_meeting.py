"""Ranks that meet at a loopback address listen nowhere else; a place that is taken is told as such."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import thinwire as tw
from tests.comm.test_bootstrap import alone as alone
from thinwire import testing
from thinwire.comm import Communicator
from thinwire.comm.agreement import meeting
from thinwire.comm.agreement.meeting import INTERFACE_VARIABLE, start_store, store_at
from thinwire.comm.hosts import is_loopback
from thinwire.errors import PeerTimeout, ThinwireError
from thinwire.testing import run_ranks

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's /proc/net/tcp")

_LISTEN = "0A"


def _address(text: str) -> str:
    """As /proc/net has it: words of 32 bits in the order of this machine."""
    octets = b"".join(bytes.fromhex(text[place : place + 8])[::-1] for place in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(octets) == 4 else socket.AF_INET6, octets)


def listening() -> set[str]:
    """Addresses that this process listens on."""
    own = {
        found[1]
        for number in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{number}")
        and (found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{number}")))
    }
    addresses = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if Path(table).exists():
            for fields in map(str.split, Path(table).read_text().splitlines()[1:]):
                if fields[3] == _LISTEN and fields[9] in own:
                    addresses.add(_address(fields[1].partition(":")[0]))
    return addresses


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return int(probe.getsockname()[1])


def leave(comm: Communicator, host: str, port: int, **variables: str) -> None:
    """Ends a rank's world, for another one to be made out of the same processes."""
    comm.close()
    dist.destroy_process_group()
    os.environ.pop(INTERFACE_VARIABLE, None)  # which run_ranks sets
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), RANK=str(comm.rank), WORLD_SIZE=str(comm.size))
    os.environ.update(variables)


def join(comm: Communicator, host: str, port: int, **variables: str) -> Communicator:
    """Another world of the same processes."""
    leave(comm, host, port, **variables)
    return tw.init(device="cpu", timeout=20.0)


def _has(host: str) -> bool:
    try:
        free_port(host)
    except OSError:
        return False
    return True


def meet(comm: Communicator, host: str, port: int) -> tuple[set[str], str | None]:
    world = join(comm, host, port)
    world.barrier()
    domain = tw.init(domain="a")
    domain.split(groups=[[rank] for rank in range(domain.size)]).barrier()
    found = listening()
    domain.barrier()
    return found, os.environ.get(INTERFACE_VARIABLE)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_nothing_listens_outside_of_loopback_where_the_master_is_there(host: str) -> None:
    if not _has(host if host != "localhost" else "127.0.0.1"):
        pytest.skip(f"this machine has no {host}")
    for found, interface in run_ranks(meet, 2, host, free_port(host if ":" in host else "127.0.0.1")):
        assert found and found <= {"127.0.0.1", "127.0.0.2", "::1"}, found
        assert interface is None, "the environment is the caller's"


def meet_again(comm: Communicator, port: int) -> int:
    world = join(comm, "127.0.0.1", port)
    for number in range(6):
        world.close()
        if number % comm.size == comm.rank:  # the other one comes before this one has left
            time.sleep(0.05)
        world = tw.init(device="cpu", timeout=20.0)
        total = sum(world.exchange_counts([1] * world.size))
    return total


def test_a_place_can_be_met_at_again() -> None:
    assert run_ranks(meet_again, 2, free_port()) == [2, 2]


def meet_where_told(comm: Communicator, port: int, interface: str) -> str | None:
    join(comm, "127.0.0.1", port, **{INTERFACE_VARIABLE: interface}).barrier()
    return os.environ.get(INTERFACE_VARIABLE)


def test_an_interface_that_the_caller_chose_is_kept() -> None:
    assert run_ranks(meet_where_told, 2, free_port(), "lo") == ["lo"] * 2


def test_a_world_of_one_listens_on_loopback(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERFACE_VARIABLE, raising=False)
    before = listening()
    with tw.init(device="cpu"):
        assert listening() - before <= {"127.0.0.1", "::1"}
    assert INTERFACE_VARIABLE not in os.environ


def test_a_port_that_is_taken_is_told(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for host in ("127.0.0.1", "localhost"):
            monkeypatch.setenv("MASTER_ADDR", host)
            monkeypatch.setenv("MASTER_PORT", str(port))
            with pytest.raises(ThinwireError, match=f"rank 0 cannot listen at {host}:{port}: .*in use.*MASTER_PORT"):
                tw.init(rank=0, world_size=2, device="cpu", meeting_timeout=5.0)
            assert not dist.is_initialized()


def test_ranks_that_do_not_come_are_waited_for_no_longer_than_the_timeout(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    for _ in range(2):
        with pytest.raises(PeerTimeout, match=rf"rank 0 of 2, .* could not meet the others at 127.0.0.1:{port} "):
            tw.init(rank=0, world_size=2, device="cpu", meeting_timeout=0.5)


def test_a_store_of_any_free_port_listens_on_its_address_alone() -> None:
    before = listening()
    store = start_store("127.0.0.1", 0)
    assert store.port > 0 and listening() - before == {"127.0.0.1"} - before
    with pytest.raises(ThinwireError, match=r"cannot listen at 192\.0\.2\.1:0: .*assign"):
        start_store("192.0.2.1", 0)


def look(comm: Communicator) -> set[str]:
    comm.barrier()
    return listening()


def test_run_ranks_listens_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    before = listening()  # what other tests of this process have left

    def look_around(*arguments: object) -> None:
        seen.append(listening() - before | {"127.0.0.1"})
        start(*arguments)

    start = testing._start  # once the store is there
    monkeypatch.setattr(testing, "_start", look_around)
    seen += run_ranks(look, 2)
    assert len(seen) == 3 and all(found and found <= {"127.0.0.1", "::1"} for found in seen), seen


_ONE_OF_THREE = """
import os, sys, thinwire as tw
try:
    tw.init(rank=int(sys.argv[1]), world_size=3, meeting_timeout=float(sys.argv[2]), device="cpu")
except tw.PeerTimeout as error:
    print(sys.argv[1], list(error.ranks), error)
"""


def _start_one_of_three(rank: int, host: str, port: int, timeout: float, first: str = "") -> subprocess.Popen[str]:
    environment = os.environ | {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", first + _ONE_OF_THREE, str(rank), str(timeout)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def test_all_that_came_are_told_who_is_missing_in_one_line() -> None:
    port = free_port()
    imports = (
        "import thinwire\nprint('here', flush=True)\ninput()\n"  # which takes a busy machine longer than the limit
    )
    ranks = [_start_one_of_three(rank, "127.0.0.1", port, 12.0, imports) for rank in (0, 1)]
    for rank in ranks:
        assert rank.stdout is not None and rank.stdout.readline() == "here\n"
    for rank in ranks:
        assert rank.stdin is not None and rank.stdin.write("go\n")
        rank.stdin.flush()
    for number, rank in enumerate(ranks):
        assert rank.communicate(timeout=90)[0] == (
            f"{number} [2] rank {number} of 3, from the arguments rank and world_size, could not meet the others at "
            f"127.0.0.1:{port} (limit 12 s): rank 2 did not come\n"
        )


def come_late(comm: Communicator, port: int) -> float:
    leave(comm, "127.0.0.1", port)
    time.sleep(1.5 * comm.rank)
    with tw.init(device="cpu", timeout=0.5) as world:  # of calls, not of this meeting
        world.barrier()
        return world.timeout


def test_a_rank_may_come_later_than_calls_wait() -> None:
    assert run_ranks(come_late, 2, free_port()) == [0.5, 0.5]


_ENDS = {"before all had come": "dist.TCPStore.check", "meanwhile": "dist.init_process_group"}


@pytest.mark.parametrize("when", _ENDS)
def test_a_rank_that_ends_during_the_meeting_is_named_at_once(when: str) -> None:
    program = "import os\nimport torch.distributed as dist\nfrom thinwire.comm.agreement import meeting\n"
    program += f"if os.environ['ENDS'] == '1':\n    {_ENDS[when]} = lambda *_, **__: os._exit(0)\n{_ONE_OF_THREE}"
    port = free_port()
    environ = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ending = 1 if when.startswith("before") else 2  # rank 2 does not come, or comes
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), "600"], env=environ | {"ENDS": str(int(rank == ending))},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(3) if rank != 2 or ending == 2
    ]  # fmt: skip
    told = [process.communicate(timeout=90)[0] for process in started]
    for rank in {0, 1} - {ending}:
        assert told[rank].startswith(f"{rank} [{ending}] ") and f"rank {ending} ended {when}" in told[rank], told


def meet_by_job(comm: Communicator) -> list[int]:
    comm.close()
    dist.destroy_process_group()
    for name in (INTERFACE_VARIABLE, "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    job, rank = divmod(comm.rank, 2)
    size = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    os.environ |= size | {"OMPI_COMM_WORLD_RANK": str(rank), "PMIX_NAMESPACE": f"{os.getppid()} {job}"}
    found = []
    for _ in range(2):  # at the same place
        with tw.init(device="cpu") as world:
            found = world.all_gather_object((job, world.rank))
    return found


def test_jobs_of_one_host_meet_without_an_address_and_not_each_other() -> None:
    found = run_ranks(meet_by_job, 4)
    assert found == [[(job, 0), (job, 1)] for job in (0, 0, 1, 1)]


@pytest.mark.parametrize(
    ("rank", "host", "missing", "reason"),
    [
        (1, "127.0.0.1", [0], "nobody listens there (Connection refused)"),
        (1, "no.such.host.invalid", [0], "nobody listens there (the name cannot be looked up: "),
        (0, "no.such.host.invalid", [], "this host does not reach itself there ("),
    ],
)
def test_where_nobody_can_be_met_is_told_in_one_line_without_torchs_frames(
    rank: int, host: str, missing: list[int], reason: str
) -> None:
    port = free_port()
    told = _start_one_of_three(rank, host, port, 0.5).communicate(timeout=90)[0]
    assert told.startswith(f"{rank} {missing} rank {rank} of 3, ") and told.count("\n") == 1, told
    assert f"at {host}:{port} (limit 0.5 s): {reason}" in told and "frame #" not in told


@pytest.mark.exhaustive
@pytest.mark.parametrize("agent", ["False", "True"], ids=["", "torchrun's"])
def test_who_listens_and_does_not_answer_is_waited_for_no_longer_than_the_timeout(
    agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        told = _start_one_of_three(1, "127.0.0.1", port, 0.5).communicate(timeout=60)[0]
    assert told.startswith("1 [0] rank 1 of 3, ") and "listens there but does not answer" in told, told


def test_the_store_of_several_hosts_is_where_its_address_leads_and_takes_no_port_from_another() -> None:
    host, limit = socket.gethostbyname(socket.gethostname()), timedelta(seconds=20)
    if is_loopback(host):
        pytest.skip("this machine has no address but loopback's, or none by its name")
    port = free_port(host)
    store_at(host, port, 0, limit).set("key", "value")
    assert dist.TCPStore(host, port, is_master=False, timeout=limit).get("key") == b"value"
    meeting._started.clear()
    with pytest.raises(ThinwireError, match=f"rank 0 cannot listen at {host}:{port}: .*in use"):
        store_at(host, port, 0, limit)
