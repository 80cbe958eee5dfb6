"""Compiles kernels of a configuration into Triton's cache, in several processes."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from thinwire._rank_server import without_ctrl_c
from thinwire.errors import TransportUnavailable
from thinwire.tools.progress import Report
from thinwire.tools.warmup.configuration import Configuration
from thinwire.tools.warmup.target import collect, find_target


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
    import triton

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


def cache_folder() -> Path:
    """Triton's cache: TRITON_CACHE_DIR, or one in the user's home."""
    import triton

    return Path(triton.knobs.cache.dir)


def describe(
    configuration: Configuration, compiled: Sequence[Compiled], jobs: int, seconds: float, folder: Path
) -> str:
    """A line for each kernel, and what all of it took."""
    lines = [configuration.describe(), ""]
    groups: dict[tuple[str, str], list[Compiled]] = {}
    for each in compiled:
        groups.setdefault((each.arch, each.name), []).append(each)
    lines.append(f"{'':9}{'kernel':30}{'variants':>8}{'compiled':>10}{'seconds':>9}{'KiB':>8}")
    for (arch, name), group in sorted(groups.items()):
        made = sum(not each.cached for each in group)
        size = sum(each.num_bytes for each in group) / 1024
        spent = sum(each.seconds for each in group)
        lines.append(f"{arch:9}{name:30}{len(group):>8}{made:>10}{spent:>9.1f}{size:>8.0f}")
    made = sum(not each.cached for each in compiled)
    size = sum(each.num_bytes for each in compiled) / 2**20
    lines += [
        "",
        f"{made} compiled and {len(compiled) - made} found there in {seconds:.1f} s by {jobs} processes; "
        f"{size:.1f} MiB in {folder}",
    ]
    return "\n".join(lines)
