"""Kernels that the cache lacks are compiled in a process that threads of the parent's cannot keep waiting."""

from __future__ import annotations

import pytest

from thinwire.comm.communicator import Communicator
from thinwire.testing import run_ranks

IN_THREADS = "import torch; torch.set_num_threads(2); assert torch.ones(1 << 22).sum() == 1 << 22"


def _beside_threads(comm: Communicator, code: str) -> str:
    from tests.helpers.warm import run_in_new_process

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
