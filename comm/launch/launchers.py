"""Reads launchers' environment variables: a process's rank, the number of ranks, and where they meet."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.comm.hosts import LOOPBACK
from thinwire.comm.launch.rank_table import DEFAULT_PORT, RankTable
from thinwire.comm.tensors import is_int, read_int
from thinwire.errors import RankTableError, ThinwireError

ALONE = "a world of one, as no launcher is known"


class Launcher(NamedTuple):
    """The variables by which a launcher says which rank a process is; empty where it has none.

    `job`: those that tell its jobs on one host from each other; None: it says itself where ranks meet.
    """

    name: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    job: tuple[str, ...] | None = ()


def _of_prefix(name: str, prefix: str, *job: str) -> Launcher:
    rank, size, local_rank, local_size = (f"{prefix}_{end}" for end in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return Launcher(name, rank, size, local_rank, local_size, job)


_HCCL = Launcher("HCCL", "RANK_ID", "RANK_SIZE", job=None)
# The first whose rank or size is set wins.
LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", None),
    _of_prefix("Open MPI", "OMPI_COMM_WORLD", "PMIX_NAMESPACE", "PMIX_SERVER_URI2", "OMPI_MCA_orte_hnp_uri"),
    _of_prefix("MVAPICH", "MV2_COMM_WORLD"),
    Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_PORT",)),  # and Intel MPI
    Launcher("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    _of_prefix("jsrun", "JSM_NAMESPACE"),
    _of_prefix("Horovod", "HOROVOD", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    Launcher("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", job=("SLURM_JOB_ID", "SLURM_STEP_ID")),
    _HCCL,
)
# With a rank table, HCCL's own variables come first.
_TABLE_LAUNCHERS = (_HCCL, *LAUNCHERS)
#: By which launchers say that there are several processes, and not how many.
_RANKS_ALONE = ("PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE", "MPIRUN_RANK", "MP_CHILD")
_FIRST_SLURM_PORT, _SLURM_PORTS = 20000, 10000
_NAME = re.compile(r"(?=.{1,253}\Z)[\w-]{1,63}(\.[\w-]{1,63})*\.?")


@dataclass(frozen=True)
class RankInfo:
    """A process's rank and place to meet, before it meets the others.

    Attributes:
        rank: its rank, 0 to size - 1.
        size: ranks in all.
        local_rank: its number among the ranks on its host; None if the launcher does not say.
        source: where rank and size were read, for messages.
        address: host and port where the ranks meet; None in a world of one, which meets nobody, and with a `job`.
        device_id: its device in the rank table; None without a table.
        job: what no other job on this host has, where all ranks are on it and need no address to meet; else empty.
    """

    rank: int
    size: int
    local_rank: int | None
    source: str
    address: tuple[str, int] | None
    device_id: int | None = None
    job: str = ""


def discover(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    rank_table: RankTable | Mapping[str, object] | str | os.PathLike[str] | None = None,
) -> RankInfo:
    """Reads rank, size and meeting point: from the arguments, else the first of LAUNCHERS, else a world of one.

    Args:
        environ: as `os.environ`. MASTER_ADDR and MASTER_PORT say where the ranks of a world of two or more meet.
            Without them, ranks whose launcher says that all are on one host meet there; else those of a Slurm job meet
            on the first host of its list of nodes, at port 20000 + (the job's id modulo 10000).
        rank, world_size: both or neither; with a rank table `rank` alone is enough.
        rank_table: says how many ranks there are, and which device is whose: a path, or the content. The rank is the
            one passed, else RANK_ID, else the launcher's; a table of one rank needs none. The ranks meet at MASTER_ADDR
            if it is set, else at rank 0's server, at MASTER_PORT if it is set, else 29500.

    Raises:
        ThinwireError: an argument or variable is missing or unusable, and is named.
        RankTableError: the table, or its entry for this rank, is unusable.

    >>> discover({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).source
    'Slurm (SLURM_PROCID, SLURM_NTASKS)'
    >>> discover({}).source
    'a world of one, as no launcher is known'
    """
    if rank_table is not None:
        return _from_table(environ, RankTable.load(rank_table), rank, world_size)
    if (rank is None) != (world_size is None):
        given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise ThinwireError(f"{given} was passed without {missing}; pass both or neither")
    launcher = None
    if rank is not None and world_size is not None:
        source, local_name = "the arguments rank and world_size", "LOCAL_RANK"
    else:
        launcher = _launcher_of(environ)
        if launcher is None:
            return RankInfo(0, 1, 0, ALONE, None)
        source, local_name = f"{launcher.name} ({launcher.rank}, {launcher.size})", launcher.local_rank
        rank, world_size = _read_int(environ, launcher.rank), _read_int(environ, launcher.size)
    local_rank = _read_int(environ, local_name) if local_name in environ else None
    if world_size < 1 or not 0 <= rank < world_size:
        raise ThinwireError(f"rank {rank} of {world_size}, from {source}: expected 0 <= rank < world size")
    if world_size == 1:
        return RankInfo(rank, 1, local_rank, source, None)
    if launcher is not None and _is_on_one_host(launcher, environ, world_size) and not environ.get("MASTER_ADDR"):
        if not environ.get("MASTER_PORT"):
            return RankInfo(rank, world_size, local_rank, source, None, job=_job_of(launcher, environ))
        environ = {**environ, "MASTER_ADDR": LOOPBACK}
    if launcher is not None and launcher.name == "Slurm":
        environ = {**_slurm_meeting(environ), **{name: value for name, value in environ.items() if value}}
    return RankInfo(rank, world_size, local_rank, source, _read_address(environ, source, world_size))


def _launcher_of(environ: Mapping[str, str]) -> Launcher | None:
    """The one that started this process; ThinwireError where one did that does not say how many there are."""
    of_srun = all(
        environ.get(pmi) == environ.get(name)
        for pmi, name in (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_NTASKS"))
    )  # it sets both, and hydra within a job of Slurm's other ones
    for launcher in LAUNCHERS:
        if not (of_srun and launcher.name == "MPICH") and (launcher.rank in environ or launcher.size in environ):
            return launcher
    alone = next((name for name in _RANKS_ALONE if name in environ), None)
    if alone is not None:
        raise ThinwireError(
            f"{alone} is {environ[alone][:40]!r} in the environment, so this process is one of several, and nothing "
            "says of how many: set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT on every rank, or pass rank=0, "
            "world_size=1 to stay alone"
        )
    return None


def _is_on_one_host(launcher: Launcher, environ: Mapping[str, str], size: int) -> bool:
    if launcher.job is None:
        return False
    if launcher.name == "Slurm":
        return "1" in (environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES"),)
    return read_int(environ.get(launcher.local_size, "")) == size


def _job_of(launcher: Launcher, environ: Mapping[str, str]) -> str:
    """Identifies the ranks of this host that this launcher started at once."""
    told = [f"{name}={environ[name]}" for name in launcher.job or () if name in environ]
    if not told:
        told = [f"started by process {_parent(environ)}"]
    return " ".join((launcher.name, *told))


def _parent(environ: Mapping[str, str]) -> int:
    """The process of the launcher that started this one: who made the socket that it gave it, if it did."""
    descriptor = read_int(environ.get("PMI_FD", ""))
    try:
        with socket.socket(fileno=os.dup(-1 if descriptor is None else descriptor)) as given:
            process: int = struct.unpack("3i", given.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    except (OSError, AttributeError):  # it was closed on the way, or this is not Linux
        return os.getppid()
    return process or os.getppid()


def _from_table(environ: Mapping[str, str], table: RankTable, rank: int | None, world_size: int | None) -> RankInfo:
    size_source = "world_size"
    launched = next((entry for entry in _TABLE_LAUNCHERS if entry.rank in environ), None)
    if rank is not None:
        rank_source = "the argument rank"
    elif launched is not None:
        rank, rank_source = _read_int(environ, launched.rank), f"{launched.name} ({launched.rank})"
        if world_size is None and launched.size in environ:
            world_size, size_source = _read_int(environ, launched.size), launched.size
    elif table.size == 1:
        rank, rank_source = 0, "the only one there is"
    else:
        raise RankTableError(
            f"{table.source} has {table.size} ranks, and nothing says which of them this process is: pass rank=, "
            f"or set RANK_ID, or start it with torchrun, mpirun or srun"
        )
    if world_size is not None and world_size != table.size:
        raise RankTableError(f"{size_source} is {world_size}, but {table.source} has {table.size} ranks")
    entry = table.entry(rank)
    source = f"{table.source}, server {entry.server}, device {entry.device_id}; rank from {rank_source}"
    address = None
    if table.size > 1:
        port = _read_port(environ) if environ.get("MASTER_PORT") else DEFAULT_PORT
        host, where = table.entry(0).address, f"the address of rank 0 in {table.source}"
        if environ.get("MASTER_ADDR"):
            host, where = environ["MASTER_ADDR"], "MASTER_ADDR"
        address = _as_host(host, where), port
    return RankInfo(rank, table.size, entry.local_rank, source, address, entry.device_id)


def _read_int(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None:
        raise ThinwireError(
            f"{name} is not set in the environment, but other variables of its launcher are; expected an integer"
        )
    number = read_int(text)
    if number is None or not is_int(number, 0):
        raise ThinwireError(
            f"{name} is {text[:40]!r} in the environment, expected an integer of at least 0, below 2**31"
        )
    return number


def _read_port(environ: Mapping[str, str]) -> int:
    port = _read_int(environ, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise ThinwireError(f"MASTER_PORT is {port} in the environment, expected 1 to 65535")
    return port


def _read_address(environ: Mapping[str, str], source: str, size: int) -> tuple[str, int]:
    for name, meaning in (("MASTER_ADDR", "the host of rank 0"), ("MASTER_PORT", "a free port on the host of rank 0")):
        if not environ.get(name):
            raise ThinwireError(
                f"{name} is not set in the environment, but rank and size come from {source}, and {size} ranks need a "
                f"place to meet: set it on every rank to {meaning}, or pass rank=0, world_size=1 to stay alone"
            )
    return _as_host(environ["MASTER_ADDR"], "MASTER_ADDR"), _read_port(environ)


def _as_host(text: str, name: str) -> str:
    """A host's name or address, without white space and brackets around it."""
    host = text.strip()
    host = host[1:-1] if host[:1] + host[-1:] == "[]" else host
    try:
        ipaddress.ip_address(host)
        return host
    except ValueError:
        numeric = not re.search("[^0-9.]", host)
    if _NAME.fullmatch(host) and not numeric:
        return host
    raise ThinwireError(
        f"{name} is {text[:60]!r}, expected a host's name or address alone, such as node7, 10.0.0.1 or fd00::1; a port "
        "goes into MASTER_PORT"
    )


def _slurm_meeting(environ: Mapping[str, str]) -> dict[str, str]:
    """Derives MASTER_ADDR and MASTER_PORT from Slurm's own variables, as far as they say.

    Task 0 runs on the first node of the step. (SLURM_LAUNCH_NODE_IPADDR is where srun runs, which may be elsewhere.)
    """
    found = {}
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    # node7,node9 or node[007-010,12]-ib,other: only the first one is wanted
    first = re.fullmatch(r"([^\[\],]+)(?:\[(\d+)[^\]]*\]([^\[\],]*))?(?:,.*)?", nodes)
    if first:
        found["MASTER_ADDR"] = "".join(part or "" for part in first.groups())
    job = read_int(environ.get("SLURM_JOB_ID", ""))
    if job is not None:
        found["MASTER_PORT"] = str(_FIRST_SLURM_PORT + job % _SLURM_PORTS)
    return found
