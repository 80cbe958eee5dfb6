"""numba's kernels for CPU ranks into its cache. They do not depend on sizes: there is one set of them."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinwire import testing
from thinwire.comm.communicator import Communicator
from thinwire.fused.all_reduce import all_reduce
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.codec import dequantize, quantize
from thinwire.moe.parallel import ExpertParallel
from thinwire.triton_kernels import cpu
from thinwire.triton_kernels.cpu.all_to_all_v import PEERS, SCALARS, move_in_team
from thinwire.triton_kernels.cpu.combine import store_sums_kernel, sum_tokens_kernel
from thinwire.triton_kernels.cpu.dispatch import store_tokens_kernel
from thinwire.triton_kernels.cpu.pack import pack_rows, unpack_rows
from thinwire.triton_kernels.cpu.permute import gather_rows_kernel
from thinwire.triton_kernels.cpu.team import BYTES_PER_THREAD
from thinwire.wire import WireFormat


@dataclass(frozen=True)
class CpuKernels:
    """What numba's cache has after `compile_for_cpu`.

    Attributes:
        names: of all kernels.
        compiled: those of them that it did not have before.
        folders: where it keeps them; none where no folder can be written.
    """

    names: tuple[str, ...]
    compiled: tuple[str, ...]
    folders: tuple[Path, ...]


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
                        experts.combine(dispatched.tokens, dispatched)
                    else:
                        dispatched.abandon()

    # Zeros of numpy's: torch fills so many in threads, for which a forked process, as the tests', would wait for ever.
    wire, rows = WireFormat.parse("int8"), torch.from_numpy(np.zeros((4, 2 * BYTES_PER_THREAD // 16), np.float32))
    records = torch.empty(4, wire.row_bytes(rows.shape[1]), dtype=torch.uint8, device="cpu")
    pack_rows(rows, wire, None, records, threads=2)
    unpack_rows(records, wire, None, None, rows, threads=2)
    teams = (store_tokens_kernel, 8), (gather_rows_kernel, 5), (store_sums_kernel, 10), (sum_tokens_kernel, 7)
    for kernel, arguments in teams:
        kernel(*[0] * arguments, np.zeros(64, np.int32), 0)  # a team without chunks looks at nothing
    move_in_team(1, np.zeros(len(SCALARS), np.int64), np.zeros((len(PEERS), 1), np.int64), 0)  # nor one without a call
    testing.run_ranks(rank_main, 2, mode="thread", timeout=600)


def compile_for_cpu() -> CpuKernels:
    """Compiles every kernel that numba's cache lacks; in this process, one after the other."""
    call_every_kernel()
    kernels = cpu_kernels()
    return CpuKernels(
        tuple(kernel.__name__ for kernel in kernels),
        tuple(kernel.__name__ for kernel in kernels if kernel.stats.cache_misses),
        tuple(sorted({Path(kernel.stats.cache_path) for kernel in kernels if kernel.stats.cache_path})),
    )


def describe_cpu(kernels: CpuKernels, seconds: float) -> str:
    """One line for people."""
    found, compiled = len(kernels.names), len(kernels.compiled)
    size = sum(path.stat().st_size for folder in kernels.folders for path in folder.iterdir() if path.is_file()) / 2**20
    where = ", ".join(map(str, kernels.folders)) or "no folder: none can be written, and every process compiles"
    return (
        f"kernels for CPU ranks, of any sizes: {compiled} compiled and {found - compiled} found there in {seconds:.1f} "
        f"s; {size:.1f} MiB in {where}"
    )
