"""One rank of the doctor's own: shared memory, the transport that `auto` picks, and a round whose result is known.

    python -m thinwire.tools.doctor.one_rank DEVICE RANK SIZE

meets the others at MASTER_ADDR and MASTER_PORT; with `threads` for RANK it is SIZE ranks, threads of one process. Each
step prints a line of JSON as it ends, so a step that hangs is known.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time

import torch

import thinwire as tw
from thinwire.comm import Communicator
from thinwire.comm.memory.symmetric import allocate
from thinwire.errors import ThinwireError
from thinwire.testing import run_ranks

_HEAP_BYTES, _HIDDEN, _TOKENS, _EXPERTS_EACH = 1 << 20, 256, 48, 2
_told = threading.Lock()


def tell(rank: int, step: str, text: str, *, ok: bool = True, seconds: float = 0.0) -> None:
    """A line for the parent."""
    line = json.dumps({"rank": rank, "step": step, "ok": ok, "text": text, "seconds": seconds})
    with _told:
        print(line, flush=True)


def examine(comm: Communicator) -> None:
    """All steps but the first on one rank. A step's error is printed, and the next one runs if it still can."""
    tell(comm.rank, "meeting", comm.explain().splitlines()[3].strip())
    for step, action in (
        ("shared memory", share_memory), ("transport", pick_transport), ("round", run_round), ("all-reduce", reduce),
    ):  # fmt: skip
        start = time.perf_counter()
        try:
            text = action(comm)
        except Exception as error:
            tell(comm.rank, step, f"{type(error).__name__}: {error}", ok=False)
            if isinstance(error, tw.PeerTimeout):
                return
        else:
            tell(comm.rank, step, text, seconds=time.perf_counter() - start)


def share_memory(comm: Communicator) -> str:
    """Every rank writes a word of each peer's buffer, by address, and reads what peers wrote into its own."""
    with allocate(comm, _HEAP_BYTES) as memory:
        if comm.device.type != "cpu":  # kernels store, in the round
            return f"{memory.kind} heap: each of {comm.size} ranks has mapped all"
        for address in memory.buffer_ptrs.tolist():
            ctypes.c_int64.from_address(address + 8 * comm.rank).value = 1 + comm.rank
        comm.barrier()
        found = memory.local[: 8 * comm.size].view(torch.int64).tolist()
        comm.barrier()
        if found != list(range(1, comm.size + 1)):
            raise ThinwireError(f"rank {comm.rank} found {found} where its peers wrote 1 to {comm.size}")
        return f"{memory.kind} heap: each of {comm.size} ranks wrote into all"


def make_parallel(comm: Communicator) -> tw.ExpertParallel:
    """Makes the ExpertParallel that rounds are run on; `auto` picks its transport."""
    return tw.ExpertParallel(comm, _EXPERTS_EACH * comm.size, 2, _HIDDEN, _TOKENS, wire="int8", dtype=torch.float32)


def pick_transport(comm: Communicator) -> str:
    """The library's own choice, in its own words."""
    with make_parallel(comm) as parallel:
        return "; ".join(line.strip() for line in parallel.explain().splitlines()[:3]).removeprefix("transport: ")


def exact_tokens(rank: int) -> torch.Tensor:
    """float32 [tokens, hidden] of integers, which int8 holds exactly: the largest of each group is 127."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-127, 128, (_TOKENS, _HIDDEN), generator=generator, device="cpu").float()
    x[:, ::128] = 127.0
    return x


def factor(expert: torch.Tensor) -> torch.Tensor:
    """Returns the experts' factors: powers of two of either sign, which leave int8 exact."""
    return torch.where(expert % 2 == 0, 1.0, -1.0) * torch.exp2((expert % 3).float())


def run_round(comm: Communicator) -> str:
    """Two rounds of int8 both ways; every bit of the second's result, and of what experts saw, is known before."""
    x = exact_tokens(comm.rank).to(comm.device)
    experts = _EXPERTS_EACH * comm.size
    tokens = torch.arange(_TOKENS, device="cpu")
    ids = torch.stack((tokens % experts, (tokens * 3 + 1 + comm.rank) % experts), 1)
    ids[:, 1] = torch.where(ids[:, 0] == ids[:, 1], (ids[:, 1] + 1) % experts, ids[:, 1])
    ids = ids.to(comm.device)
    weights = torch.full(ids.shape, 0.5, device=comm.device)
    with make_parallel(comm) as parallel:
        for _ in range(2):  # the first one compiles
            start = time.perf_counter()
            d = parallel.dispatch(x, ids, weights)
            seen = d.tokens
            scales = factor(parallel.local_experts[0] + d.expert_ids)  # which are contiguous without a map
            y = parallel.combine(seen * scales.to(seen)[:, None], d)
            parallel.check()
            taken = time.perf_counter() - start
        wanted = x * (0.5 * factor(ids.cpu()).sum(1).to(x))[:, None]
        require_equal(y, wanted, f"result at rank {comm.rank}")
        return f"{_TOKENS} tokens a rank over {parallel.transport}, exact to the bit, in {1e6 * taken:.0f} us"


def require_equal(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """ThinwireError where a bit differs."""
    if wrong := int((found != wanted).sum()):
        raise ThinwireError(f"{wrong} of {found.numel()} elements differ from the exact {what}")


def reduce(comm: Communicator) -> str:
    """A sum that int8 holds exactly: all ranks have the same integers."""
    x = exact_tokens(0).to(comm.device)
    total = tw.all_reduce(x, wire="int8", comm=comm)
    assert isinstance(total, torch.Tensor)
    require_equal(total, comm.size * x, f"sum at rank {comm.rank}")
    return f"{x.numel()} elements, exact to the bit"


def main(device: str, rank: str, size: str) -> None:
    """The program."""
    if rank == "threads":
        run_ranks(examine, int(size), mode="thread", device=device, timeout=600)
        return
    try:
        device = f"cuda:{rank}" if device == "cuda" else device
        comm = tw.init(rank=int(rank), world_size=int(size), device=device, timeout=30)
    except Exception as error:
        tell(int(rank), "meeting", f"{type(error).__name__}: {error}", ok=False)
        return
    with comm:
        examine(comm)


if __name__ == "__main__":
    main(*sys.argv[1:])
