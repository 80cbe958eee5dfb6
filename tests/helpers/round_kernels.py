"""Triton's kernels of a round, as `run_round` of `rounds.py` calls them; interpreted or not, as Triton was imported."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

from thinwire.fused.backend import Backend
from thinwire.moe import assembly
from thinwire.moe.config import ParallelConfig
from thinwire.triton_kernels import combine, dispatch, permute
from thinwire.triton_kernels.list_records import list_records

KERNELS = SimpleNamespace(
    send_tokens=dispatch.send_tokens,
    close_round=dispatch.close_round,
    wait=dispatch.wait,
    route=permute.route,
    gather=permute.gather,
    list_records=list_records,
    send_sums=combine.send_sums,
    sum_home=combine.sum_home,
)


_patching, _patched = threading.Lock(), contextlib.ExitStack()
_blocks = 0  # under way


@contextlib.contextmanager
def rounds_of_triton() -> Iterator[None]:
    """An ExpertParallel of CPU ranks that is made within has the rounds of a GPU, and no codec.

    Ranks that are threads may be within at the same time: what is patched stays so until the last of them leaves.
    """
    global _blocks
    with _patching:
        _blocks += 1
        if _blocks == 1:
            backend = Backend("triton", "", *[mock.Mock()] * 4)
            _patched.enter_context(mock.patch.object(ParallelConfig, "dispatch_backend", backend))
            _patched.enter_context(mock.patch.object(assembly, "uses_triton", lambda _: True))
    try:
        yield
    finally:
        with _patching:
            _blocks -= 1
            if not _blocks:
                _patched.close()
