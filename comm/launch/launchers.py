"""Reads launchers' environment variables: a process's rank, the number of ranks, and where they meet."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.comm.launch.rank_table import DEFAULT_PORT, RankTable
from thinwire.comm.tensors import is_int, read_int
from thinwire.errors import RankTableError, ThinwireError

# (launcher, rank, size, local rank), the first whose rank or size is set wins
ALONE = "a world of one, as no launcher is known"
LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
# With a rank table, HCCL's own variables come first.
_TABLE_LAUNCHERS = (("HCCL", "RANK_ID", "RANK_SIZE", ""), *LAUNCHERS)
_FIRST_SLURM_PORT, _SLURM_PORTS = 20000, 10000


@dataclass(frozen=True)
class RankInfo:
    """A process's rank and place to meet, before it meets the others.

    Attributes:
        rank: its rank, 0 to size - 1.
        size: ranks in all.
        local_rank: its number among the ranks on its host; None if the launcher does not say.
        source: where rank and size were read, for messages.
        address: host and port where the ranks meet; None in a world of one, which meets nobody.
        device_id: its device in the rank table; None without a table.
    """

    rank: int
    size: int
    local_rank: int | None
    source: str
    address: tuple[str, int] | None
    device_id: int | None = None


def discover(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    rank_table: RankTable | Mapping[str, object] | str | os.PathLike[str] | None = None,
) -> RankInfo:
    """Reads rank, size and meeting point: from the arguments, else torchrun, Open MPI, Slurm, else a world of one.

    Args:
        environ: as `os.environ`. MASTER_ADDR and MASTER_PORT say where the ranks of a world of two or more meet. In a
            Slurm job that does not set them, they meet on the first host of its list of nodes, at port 20000 + (the
            job's id modulo 10000).
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
    launcher = ""
    if rank is not None and world_size is not None:
        source, local_name = "the arguments rank and world_size", "LOCAL_RANK"
    else:
        launched = next((entry for entry in LAUNCHERS if entry[1] in environ or entry[2] in environ), None)
        if launched is None:
            return RankInfo(0, 1, 0, ALONE, None)
        launcher, rank_name, size_name, local_name = launched
        source = f"{launcher} ({rank_name}, {size_name})"
        rank, world_size = _read_int(environ, rank_name), _read_int(environ, size_name)
    local_rank = _read_int(environ, local_name) if local_name in environ else None
    if world_size < 1 or not 0 <= rank < world_size:
        raise ThinwireError(f"rank {rank} of {world_size}, from {source}: expected 0 <= rank < world size")
    if world_size == 1:
        return RankInfo(rank, 1, local_rank, source, None)
    if launcher == "Slurm":
        environ = {**_slurm_meeting(environ), **{name: value for name, value in environ.items() if value}}
    return RankInfo(rank, world_size, local_rank, source, _read_address(environ, source, world_size))


def _from_table(environ: Mapping[str, str], table: RankTable, rank: int | None, world_size: int | None) -> RankInfo:
    size_source = "world_size"
    launched = next((entry for entry in _TABLE_LAUNCHERS if entry[1] in environ), None)
    if rank is not None:
        rank_source = "the argument rank"
    elif launched is not None:
        launcher, rank_name, size_name, _ = launched
        rank, rank_source = _read_int(environ, rank_name), f"{launcher} ({rank_name})"
        if world_size is None and size_name in environ:
            world_size, size_source = _read_int(environ, size_name), size_name
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
        address = environ.get("MASTER_ADDR") or table.entry(0).address, port
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
    return environ["MASTER_ADDR"], _read_port(environ)


def _slurm_meeting(environ: Mapping[str, str]) -> dict[str, str]:
    """What Slurm's own variables say of MASTER_ADDR and MASTER_PORT: all that can be told from them.

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
