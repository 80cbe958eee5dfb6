"""Compiles kernels of a configuration into Triton's cache, in several processes, for GPUs that need not be here.

Launchers are called as ever, with tensors that have no memory ("meta"), and Triton specialises, keys and compiles as it
would for a GPU's: nothing of that is done here a second time. Only its executor for compiling in the background is one
that keeps the work for later.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing import active_children, get_context
from typing import TYPE_CHECKING, Any

import torch

from thinwire._rank_process import without_ctrl_c
from thinwire.errors import ArgumentError, TransportUnavailable
from thinwire.tools.progress import Report
from thinwire.tools.warmup.configuration import Configuration
from thinwire.triton_kernels.compat import triton
from thinwire.triton_kernels.launch import settle_cache_keys

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture.

    Attributes:
        name: of the function; a configuration has several of one name.
        arch: that it was compiled for.
        cached: whether the cache had it.
        seconds: that it took.
        num_bytes: of its files in the cache.
    """

    name: str
    arch: str
    cached: bool
    seconds: float
    num_bytes: int


def compile_ahead(
    configurations: Sequence[Configuration], archs: Sequence[str], jobs: int, report: Report
) -> list[Compiled]:
    """Compiles the kernels that ranks of these configurations will launch, each once, unless the cache has it.

    Args:
        archs: see `find_target`.
        jobs: processes.
        report: gets the steps.

    Raises:
        ArgumentError, TransportUnavailable: an arch is unknown or does not support a kernel, or a process ended.
        Exception: a compiler's own error; pending work is finished first.
    """
    chosen, done = tuple(configurations), []
    for arch in archs:
        for configuration in chosen:
            configuration.require(find_target(arch))
    for arch in archs:
        # New ones for each arch: a process has one target. They import what they need, and share nothing with this one.
        with _processes(arch, jobs) as pool:
            report.stage(f"{arch}: what is launched ...")
            with without_ctrl_c():  # it ends this process, which then ends those
                listed = pool.submit(_keys, chosen, arch)
            keys = listed.result()
            report.stage(f"{arch}: {len(keys)} kernels", len(keys))
            with without_ctrl_c():
                futures = [pool.submit(_compile, chosen, arch, key) for key in keys]
            for future in as_completed(futures):
                done.append(future.result())
                report.step()
    return done


@contextmanager
def _processes(arch: str, jobs: int) -> Iterator[ProcessPoolExecutor]:
    pool = ProcessPoolExecutor(jobs, get_context("spawn"))
    try:
        yield pool
    except BrokenProcessPool as error:
        raise TransportUnavailable(
            f"{arch}: a compiling process ended: the compiler does not know this arch, or memory ran out; check the "
            "arch, or use fewer --jobs"
        ) from error
    except KeyboardInterrupt:
        for process in active_children():  # or it would wait until each has compiled its kernel
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@functools.lru_cache(maxsize=1)
def _collected(configurations: tuple[Configuration, ...], arch: str) -> dict[str, Callable[[], Any]]:
    def launch() -> None:
        for configuration in configurations:
            configuration.launch()

    return collect(launch, find_target(arch))


def _keys(configurations: tuple[Configuration, ...], arch: str) -> list[str]:
    return list(_collected(configurations, arch))


def _compile(configurations: tuple[Configuration, ...], arch: str, key: str) -> Compiled:
    hits: list[bool] = []

    def listen(*, cache_hit: bool, **rest: object) -> None:
        hits.append(cache_hit)

    work = _collected(configurations, arch)[key]
    triton.knobs.compilation.listener = listen
    began = time.monotonic()
    kernel = work()
    seconds = time.monotonic() - began
    num_bytes = sum(os.stat(path).st_size for path in kernel.metadata_group.values())
    return Compiled(kernel.name, arch, hits == [True], seconds, num_bytes)


def describe(compiled: Sequence[Compiled], took: str) -> str:
    """A line for each kernel, and what all of it took."""
    groups: dict[tuple[str, str], list[Compiled]] = {}
    for each in compiled:
        groups.setdefault((each.arch, each.name), []).append(each)
    lines = [f"{'':9}{'kernel':30}{'variants':>8}{'compiled':>10}{'seconds':>9}{'KiB':>8}"]
    for (arch, name), group in sorted(groups.items()):
        made, spent = sum(not each.cached for each in group), sum(each.seconds for each in group)
        size = sum(each.num_bytes for each in group) / 1024
        lines.append(f"{arch:9}{name:30}{len(group):>8}{made:>10}{spent:>9.1f}{size:>8.0f}")
    made = sum(not each.cached for each in compiled)
    size = sum(each.num_bytes for each in compiled) / 2**20
    known = f"{made} compiled and {len(compiled) - made} found there {took}"
    return "\n".join([*lines, "", f"{known}; {size:.1f} MiB in {triton.knobs.cache.dir}"])


# ---------------------------------------------------------------------------------------------------------------------
# What is launched on a GPU


def find_target(arch: str) -> GPUTarget:
    """Triton's target for a GPU of this architecture.

    Args:
        arch: "sm_90" and so on; with PyTorch for ROCm "gfx942" and so on.

    Raises:
        ArgumentError: the name is unknown, or this PyTorch is for another maker's GPUs.
    """
    from triton.backends.compiler import GPUTarget

    on_amd = torch.version.hip is not None
    if found := re.fullmatch(r"sm_(\d{2,3})a?", arch):
        if on_amd:
            raise ArgumentError(f"arch is {arch!r}, and this PyTorch is for ROCm: expected one such as gfx942")
        return GPUTarget("cuda", int(found[1]), 32)
    if re.fullmatch(r"gfx[0-9a-f]{3,4}", arch):
        if not on_amd:
            raise ArgumentError(f"arch is {arch!r}, and this PyTorch is not for ROCm: expected one such as sm_90")
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    raise ArgumentError(f"arch is {arch!r}, expected one such as {'gfx942' if on_amd else 'sm_90'}")


def archs_here() -> list[str]:
    """The architectures of this machine's GPUs, each once.

    Raises:
        ArgumentError: it has none.
    """
    if not torch.cuda.is_available():
        raise ArgumentError("this machine has no GPU to compile for: name an arch, such as sm_90 for an H100")
    devices = range(torch.cuda.device_count())
    if torch.version.hip is not None:
        found = [torch.cuda.get_device_properties(device).gcnArchName.split(":")[0] for device in devices]
    else:
        found = ["sm_{}{}".format(*torch.cuda.get_device_capability(device)) for device in devices]
    return list(dict.fromkeys(found))


class AbsentDriver:
    """Answers what Triton asks of a driver before it launches, for a GPU that need not be here."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """One that nothing is launched on."""
        return 0


class _NotLaunched:
    """A kernel that is not compiled yet, as whoever launches it sees it."""

    function = packed_metadata = None

    def launch_metadata(self, *arguments: Any) -> None:
        """There is nothing to tell of a launch that is none."""

    def run(self, *arguments: Any) -> None:
        """Launches nothing."""


class _Later(Executor):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.kept: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.kept.append(lambda: fn(*args, **kwargs))
        future: Future[Any] = Future()
        future.set_result(_NotLaunched())
        return future


def collect(launch: Callable[[], None], target: GPUTarget) -> dict[str, Callable[[], Any]]:
    """Finds what compiles each kernel that `launch()` launches, by Triton's key of it, the same in every process.

    The process can launch nothing any more: Triton takes the GPU to be the target, and the kernels to be loaded.
    """
    settle_cache_keys()
    triton.runtime.driver.set_active(AbsentDriver(target))
    later = _Later()
    with triton.AsyncCompileMode(later) as mode:
        launch()
    names = [sha256(key.encode()).hexdigest() for key in mode.future_kernels]
    return dict(zip(names, later.kept, strict=True))
