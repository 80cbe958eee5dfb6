"""How a process finds its rank: arguments, an initialised torch.distributed, or what its launcher left behind."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from thinwire.comm.communicator import DEFAULT_TIMEOUT, Communicator, Origin
from thinwire.errors import PeerTimeout, ThinwireError

__all__ = ["RankInfo", "default_communicator", "discover", "init", "rank_thread", "thread_communicator"]

# (launcher, rank, size, local rank), the first whose rank or size is set wins
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)

_default: Communicator | None = None
_of_thread = threading.local()  # .communicator, in threads that are ranks; there it stands for _default


@dataclass(frozen=True)
class RankInfo:
    """What a process knows before it meets the others.

    Attributes:
        rank: its rank, 0 to size - 1.
        size: ranks in all.
        local_rank: its number among the ranks on its host; None where the launcher does not say.
        source: where rank and size were read, for people.
        address: host and port where the ranks meet; None in a world of one, which meets nobody.
    """

    rank: int
    size: int
    local_rank: int | None
    source: str
    address: tuple[str, int] | None


def discover(environ: Mapping[str, str], *, rank: int | None = None, world_size: int | None = None) -> RankInfo:
    """Reads rank, size and meeting point: from the arguments, else torchrun, Open MPI, Slurm, else a world of one.

    Args:
        environ: as `os.environ`. MASTER_ADDR and MASTER_PORT say where the ranks of a world of two or more meet.
        rank, world_size: both or neither.

    Raises:
        ThinwireError: naming the argument or the variable that is missing or unusable.

    >>> discover({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).source
    'Slurm (SLURM_PROCID, SLURM_NTASKS)'
    >>> discover({})
    RankInfo(rank=0, size=1, local_rank=0, source='a world of one, as no launcher is known', address=None)
    """
    if (rank is None) != (world_size is None):
        given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise ThinwireError(f"{given} was passed without {missing}; pass both or neither")
    if rank is not None and world_size is not None:
        source, local_name = "the arguments rank and world_size", "LOCAL_RANK"
    else:
        launched = [entry for entry in _LAUNCHERS if entry[1] in environ or entry[2] in environ]
        if not launched:
            return RankInfo(0, 1, 0, "a world of one, as no launcher is known", None)
        launcher, rank_name, size_name, local_name = launched[0]
        source = f"{launcher} ({rank_name}, {size_name})"
        rank, world_size = _read_int(environ, rank_name), _read_int(environ, size_name)
    local_rank = _read_int(environ, local_name) if local_name in environ else None
    if world_size < 1 or not 0 <= rank < world_size:
        raise ThinwireError(f"rank {rank} of {world_size}, from {source}: expected 0 <= rank < world size")
    if world_size == 1:
        return RankInfo(rank, 1, local_rank, source, None)
    return RankInfo(rank, world_size, local_rank, source, _read_address(environ, source, world_size))


def _read_int(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None:
        raise ThinwireError(f"{name} is not set in the environment, though its companions are; expected an integer")
    if not text.strip().isdigit():
        raise ThinwireError(f"{name} is {text!r} in the environment, expected an integer of at least 0")
    return int(text)


def _read_address(environ: Mapping[str, str], source: str, size: int) -> tuple[str, int]:
    for name, meaning in (("MASTER_ADDR", "the host of rank 0"), ("MASTER_PORT", "a free port on the host of rank 0")):
        if not environ.get(name):
            raise ThinwireError(
                f"{name} is not set in the environment, but rank and size come from {source}, and {size} ranks need a "
                f"place to meet: set it on every rank to {meaning}, or pass rank=0, world_size=1 to stay alone"
            )
    port = _read_int(environ, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise ThinwireError(f"MASTER_PORT is {port} in the environment, expected 1 to 65535")
    return environ["MASTER_ADDR"], port


def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    device: torch.device | str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Communicator:
    """Joins the other ranks and returns the default communicator. Collective.

    Rank and size come from the arguments, else from a `torch.distributed` that is initialised already (whose process
    group is then used, and left alone by `close()`), else from :func:`discover`. The backend is Gloo for the CPU and
    NCCL for CUDA. A world of one meets nobody and needs no address. A group made here is destroyed by `close()`, or at
    the end of the process.

    A second call returns the same communicator, unless it asks for something else: then close the first one before.
    In a thread that is a rank, of `run_ranks(mode="thread")`, it returns that rank's communicator.

    Args:
        rank, world_size: both or neither; they need MASTER_ADDR and MASTER_PORT in the environment.
        device: None means `cuda:LOCAL_RANK` when CUDA is available, else the CPU. It becomes CUDA's current device.
        timeout: seconds to wait for the other ranks, here and later. On CUDA, PyTorch ends a process whose stream has
            been waiting for a peer for twice as long.

    Raises:
        ThinwireError: naming the argument or the environment variable that is missing or unusable.
        PeerTimeout: the other ranks did not come in time.
    """
    global _default
    own = thread_communicator()
    if own is not None:
        if own.closed:
            raise ThinwireError("this rank is a thread, and its communicator is closed; it cannot get another one")
        _require_compatible(own, rank, world_size, device, timeout)
        return own
    if _default is not None and not _default.closed:
        _require_compatible(_default, rank, world_size, device, timeout)
        return _default
    if dist.is_initialized():
        _require_agreement(rank, world_size)
        chosen = _choose_device(device, None) if device is not None else (None, "")
        _default = Communicator(device=chosen[0], timeout=timeout)
        return _default
    info = discover(os.environ, rank=rank, world_size=world_size)
    chosen_device, reason = _choose_device(device, info)
    _make_group(info, chosen_device, timeout)
    try:
        origin = Origin(info.source, reason, owns_group=True)
        _default = Communicator(device=chosen_device, timeout=timeout, _origin=origin)
    except BaseException:
        dist.destroy_process_group()
        raise
    # A process that exits with Gloo's threads running may be aborted by their destructors.
    atexit.register(_default.close)
    return _default


def default_communicator() -> Communicator:
    """The communicator that :func:`init` made last; in a thread that is a rank, that rank's.

    Raises:
        ThinwireError: there is none, or it was closed.
    """
    own = thread_communicator()
    found = _default if own is None else own
    if found is None or found.closed:
        raise ThinwireError("there is no default communicator: call thinwire.init() first, or pass comm=")
    return found


@contextlib.contextmanager
def rank_thread(comm: Communicator) -> Iterator[None]:
    """Makes `comm` what `init` and `default_communicator` return in this thread."""
    before = thread_communicator()
    _of_thread.communicator = comm
    try:
        yield
    finally:
        _of_thread.communicator = before


def thread_communicator() -> Communicator | None:
    """This thread's own communicator, if the thread is a rank."""
    found: Communicator | None = getattr(_of_thread, "communicator", None)
    return found


def _require_compatible(
    comm: Communicator, rank: int | None, world_size: int | None, device: torch.device | str | None, timeout: float
) -> None:
    wanted: dict[str, object] = {
        "rank": rank,
        "world_size": world_size,
        "device": None if device is None else torch.device(device).type,
    }
    present: dict[str, object] = {"rank": comm.rank, "world_size": comm.size, "device": comm.device.type}
    if device is not None and torch.device(device).index is not None:
        wanted["device"], present["device"] = str(torch.device(device)), str(comm.device)
    if timeout != DEFAULT_TIMEOUT:
        wanted["timeout"], present["timeout"] = timeout, comm.timeout
    differing = [f"{name}={value!r}" for name, value in wanted.items() if value not in (None, present[name])]
    if differing:
        raise ThinwireError(
            f"init was called before and gave {comm!r}; close() that one before asking for {', '.join(differing)}"
        )


def _require_agreement(rank: int | None, world_size: int | None) -> None:
    for name, wanted, present in (
        ("rank", rank, dist.get_rank()),
        ("world_size", world_size, dist.get_world_size()),
    ):
        if wanted not in (None, present):
            raise ThinwireError(
                f"{name}={wanted} was passed, but torch.distributed is initialised already with {name} {present}"
            )


def _choose_device(device: torch.device | str | None, info: RankInfo | None) -> tuple[torch.device, str]:
    reason = "as passed"
    if device is not None:
        chosen = torch.device(device)
    elif not torch.cuda.is_available():
        chosen, reason = torch.device("cpu"), "as CUDA is not available"
    else:
        chosen, reason = torch.device("cuda"), "as CUDA is available"
    if chosen.type != "cuda":
        return chosen, reason
    if chosen.index is None and info is not None:
        chosen = torch.device("cuda", _local_index(info))
    if chosen.index is not None:
        torch.cuda.set_device(chosen)
    return chosen, reason


def _local_index(info: RankInfo) -> int:
    count = torch.cuda.device_count()
    if info.local_rank is None and count > 1 and info.size > 1:
        raise ThinwireError(
            f"rank and size come from {info.source}, which does not say which of the {count} GPUs is this rank's: "
            "set LOCAL_RANK, or pass device="
        )
    index = info.local_rank or 0
    if count == 1 and info.size > 1:
        return 0  # launchers that show each rank its own GPU alone
    if index >= count:
        raise ThinwireError(f"local rank {index} has no GPU of its own: {count} visible; pass device=")
    return index


def _make_group(info: RankInfo, device: torch.device, timeout: float) -> None:
    on_cuda = device.type == "cuda"
    # NCCL's own watchdog ends the process; it must not fire before a host call has raised PeerTimeout.
    limit = timedelta(seconds=timeout * (2 if on_cuda else 1))
    store = dist.HashStore() if info.address is None else None
    try:
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            init_method=None if store is not None else "env://",
            store=store,
            rank=info.rank,
            world_size=info.size,
            timeout=limit,
            device_id=device if on_cuda else None,
        )
    except RuntimeError as error:  # stores raise DistError, Gloo's first connections a plain RuntimeError
        place = "alone" if info.address is None else f"at {info.address[0]}:{info.address[1]}"
        raise PeerTimeout(
            f"rank {info.rank} of {info.size}, from {info.source}, could not meet the others {place} "
            f"(limit {limit.total_seconds():g} s): {error}"
        ) from error
