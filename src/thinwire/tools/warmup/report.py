"""What was compiled, as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.tools.warmup.compile import Compiled
from thinwire.tools.warmup.configuration import Configuration
from thinwire.tools.warmup.cpu import CpuKernels


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


def describe_cpu(kernels: CpuKernels, seconds: float) -> str:
    """The same of numba's."""
    found, compiled = len(kernels.names), len(kernels.compiled)
    size = sum(path.stat().st_size for folder in kernels.folders for path in folder.iterdir() if path.is_file()) / 2**20
    where = ", ".join(map(str, kernels.folders)) or "no folder: none can be written, and every process compiles"
    return (
        f"kernels for CPU ranks, of any sizes: {compiled} compiled and {found - compiled} found there in {seconds:.1f} "
        f"s; {size:.1f} MiB in {where}"
    )
