"""numba's kernels for CPU ranks into its cache. They do not depend on sizes: there is one set of them."""

from __future__ import annotations

import importlib
import pkgutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from thinwire import testing
from thinwire.comm.communicator import Communicator
from thinwire.errors import ConfigMismatch
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.codec import dequantize, quantize
from thinwire.fused.ops import all_reduce
from thinwire.moe.parallel import ExpertParallel
from thinwire.triton_kernels import cpu


def cpu_kernels() -> list[Any]:
    """The functions that numba keeps compiled on disk, each once."""
    from numba.core.registry import CPUDispatcher

    found = {}
    for module in pkgutil.iter_modules(cpu.__path__, f"{cpu.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, CPUDispatcher) and value._cache.cache_path is not None:
                found[value.py_func] = value
    return list(found.values())


def call_every_kernel() -> None:
    """Calls of the library, by two ranks that are threads, that between them call every kernel."""
    generator = torch.Generator().manual_seed(0)

    def rank_main(comm: Communicator) -> None:
        x = torch.randn(8, 64, generator=generator, dtype=torch.float32, device="cpu")
        dequantize(quantize(x, "int8"))
        apart = comm.split(groups=[range(comm.size)])
        apart.hosts = ((0,), (1,))  # as if each were on a host of its own
        for transport, group in (("direct", comm), ("staged", comm), ("two_level", apart)):
            if group is comm:
                all_reduce(x, wire="int8", comm=comm, transport=transport)
                all_to_all_v(x, [4, 4], [4, 4], wire="int8", comm=comm, transport=transport)
            with ExpertParallel(group, 4, 2, 64, 8, wire="int8", transport=transport) as experts:
                ids = torch.tensor([[0, 3]], device="cpu").expand(8, 2).contiguous()
                for used in (True, False):
                    dispatched = experts.dispatch(x, ids, torch.ones(8, 2, dtype=torch.float32, device="cpu"))
                    if used:
                        assert len(dispatched.rows)
                        experts.combine(dispatched.tokens, dispatched)
                    else:
                        dispatched.abandon()

        with suppress(ConfigMismatch):  # what ranks do that disagree has a kernel, too
            all_reduce(x[: 4 + comm.rank], wire="int8", comm=comm, transport="direct")

    testing.run_ranks(rank_main, 2, mode="thread", timeout=600)


def compile_for_cpu() -> str:
    """Compiles every kernel that numba's cache lacks, in this process, one after the other; says what that was."""
    began = time.monotonic()
    call_every_kernel()
    kernels = cpu_kernels()
    compiled = sum(bool(kernel.stats.cache_misses) for kernel in kernels)
    folders = sorted({Path(kernel.stats.cache_path) for kernel in kernels if kernel.stats.cache_path})
    size = sum(path.stat().st_size for folder in folders for path in folder.iterdir() if path.is_file()) / 2**20
    where = ", ".join(map(str, folders)) or "no folder: none can be written, and every process compiles"
    seconds = time.monotonic() - began
    return (
        f"kernels for CPU ranks, of any sizes: {compiled} compiled and {len(kernels) - compiled} found there in "
        f"{seconds:.1f} s; {size:.1f} MiB in {where}"
    )
