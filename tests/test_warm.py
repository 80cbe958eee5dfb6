"""Kernels that the cache lacks are compiled in a process that threads of the parent's cannot keep waiting."""

from __future__ import annotations

import os
import signal
import time

import pytest

from thinwire.comm.communicator import Communicator
from thinwire.testing import run_ranks

IN_THREADS = "import torch; torch.set_num_threads(2); assert torch.ones(1 << 22).sum() == 1 << 22"


def _beside_threads(comm: Communicator, code: str) -> str:
    from tests.warm import run_in_new_process

    exec(IN_THREADS)  # torch keeps its threads for the next tensor
    try:
        run_in_new_process(code)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.exhaustive
def test_it_may_use_torchs_threads_where_the_parent_has_used_them() -> None:
    assert run_ranks(_beside_threads, 1, IN_THREADS) == [""]


def test_what_went_wrong_there_is_told() -> None:
    (told,) = run_ranks(
        _beside_threads, 1, "import sys; print('half way', file=sys.stderr); raise ValueError('so it is')"
    )
    assert "exit code 1" in told and "half way" in told and told.rstrip().endswith("ValueError: so it is")


def _compiled_in_a_child(comm: Communicator) -> int:
    from thinwire.warmup.cpu import call_every_kernel

    exec(IN_THREADS)
    child = os.fork()
    if child == 0:
        try:
            call_every_kernel()
            os._exit(0)
        finally:
            os._exit(1)
    until = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return ended[1]


def test_every_kernel_is_called_without_torchs_threads_which_stay_in_the_parent() -> None:
    pytest.importorskip("numba", reason="the CPU kernels need numba")
    assert run_ranks(_compiled_in_a_child, 1, timeout=60) == [0]
