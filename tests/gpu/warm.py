"""What the tests here launch most, for which kernels are compiled by all cores before the first of them.

`python -m tests.gpu.warm` does so before several processes of pytest begin.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from tests.gpu.test_experts import FF
from tests.gpu.test_experts import HIDDEN as EXPERTS_HIDDEN
from tests.gpu.test_experts import MAX_TOKENS as EXPERTS_MAX_TOKENS
from tests.gpu.test_experts import NUM_EXPERTS as EXPERTS
from tests.gpu.test_experts import TOP_K as EXPERTS_TOP_K
from tests.moe.test_rounds_direct import DTYPES, HIDDEN, MAX_TOKENS, NUM_EXPERTS, TOP_K
from thinwire.moe.config import ParallelSettings
from thinwire.tools.progress import Report
from thinwire.tools.warmup.compile import archs_here, compile_ahead
from thinwire.tools.warmup.configuration import Configuration

WORLDS = (4, 8)  # of processes and of threads that share a GPU


def configurations() -> Iterator[Configuration]:
    """Of rounds, collectives and all-to-all-v, and of the layer with int8 experts."""
    for world in WORLDS:
        for dtype in DTYPES:
            settings = _settings(NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, dtype)
            yield Configuration(settings, world, dtype, collectives=True, all_to_all_v=True)
    settings = _settings(EXPERTS, EXPERTS_TOP_K, EXPERTS_HIDDEN, EXPERTS_MAX_TOKENS, torch.bfloat16)
    yield Configuration(settings, WORLDS[0], torch.bfloat16, int8_experts=FF)


def compile_all() -> None:
    """By several processes at once; a test that needs others compiles them by itself."""
    compile_ahead([*configurations()], archs_here(), len(os.sched_getaffinity(0)), Report(None))


def _settings(num_experts: int, top_k: int, hidden: int, max_tokens: int, dtype: torch.dtype) -> ParallelSettings:
    return ParallelSettings.of(
        num_experts, top_k, hidden, max_tokens, wire="int8", combine_wire=None, grad_wire=None, transport="direct",
        lanes=1, align=1, num_programs=None, timeout=None, dtype=dtype,
    )  # fmt: skip


if __name__ == "__main__":
    compile_all()
