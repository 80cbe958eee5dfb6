"""Ranks that are threads of one GPU: what they need of CUDA, with a stand-in for it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.gpu.capture import capture
from thinwire._rank_thread import require_queues
from thinwire.errors import TransportUnavailable
from thinwire.testing import run_ranks
from thinwire.tools.bench.options import Settings
from thinwire.tools.bench.session import _placed

QUEUES, LOADING = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment says nothing of queues, and what is set is taken back."""
    for variable in (QUEUES, LOADING):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)


@pytest.fixture(params=[True, False], ids=["started", "not started"])
def started(request: pytest.FixtureRequest, unset: None, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether CUDA has started; the environment says nothing of queues."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: request.param)
    return bool(request.param)


def test_as_many_ranks_as_queues_run_side_by_side(started: bool) -> None:
    most = 6 if started else 30
    require_queues(most)
    with pytest.raises(TransportUnavailable, match=f"{most + 1} ranks .* need {most + 3} hardware queues") as caught:
        require_queues(most + 1)
    assert "at most 30 ranks, with CUDA_DEVICE_MAX_CONNECTIONS=32 set before CUDA starts" in str(caught.value)
    assert os.environ.get(QUEUES) == (None if started else "32")
    assert os.environ.get(LOADING) == (None if started else "EAGER")


def test_what_was_set_stays(started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUEUES, "1")
    monkeypatch.setenv(LOADING, "LAZY")
    with pytest.raises(TransportUnavailable, match="CUDA has 1 in this process"):
        require_queues(2)
    monkeypatch.setenv(QUEUES, "10")
    require_queues(8)
    assert (os.environ[QUEUES], os.environ[LOADING]) == ("10", "LAZY")


def test_graphs_are_captured_one_at_a_time_each_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing, streams = threading.Lock(), set()

    @contextlib.contextmanager
    def graph(graph: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        assert capturing.acquire(blocking=False), "two captures at once"
        streams.add(stream)
        time.sleep(0.01)
        yield
        capturing.release()

    for name, stand_in in {"CUDAGraph": object, "Stream": object, "graph": graph}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    results = run_ranks(lambda comm: capture(comm, lambda: comm.rank)[1], 4, mode="thread")
    assert results == [0, 1, 2, 3] and len(streams) == 4


@pytest.mark.parametrize(
    ("gpus", "options", "wanted"),
    [
        (1, {}, ("cuda", "thread")),
        (1, {"device": "cuda", "ranks": 2}, ("cuda", "thread")),
        (4, {}, ("cuda", "process")),
        (0, {}, ("cpu", "process")),
        (0, {"ranks": 64}, ("cpu", "process")),
    ],
)
def test_a_bench_sets_them_before_it_asks_cuda_anything_and_leaves_them_to_threads(
    gpus: int, options: dict[str, Any], wanted: tuple[str, str], unset: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def ask(answer: int) -> int:
        asked.append((os.environ.get(QUEUES), os.environ.get(LOADING)))
        return answer

    monkeypatch.setattr(torch.cuda, "is_available", lambda: ask(gpus) > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: ask(gpus))
    assert _placed(Settings(**options), None) == wanted
    assert asked and set(asked) == {("32", "EAGER")}
    assert (os.environ.get(QUEUES), os.environ.get(LOADING)) == (
        ("32", "EAGER") if "thread" in wanted else (None, None)
    )


def test_a_bench_sets_nothing_where_a_launcher_started_it_or_no_gpu_is_wanted(
    unset: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: QUEUES not in os.environ)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert _placed(Settings(), "torchrun") == ("cuda", "process") and QUEUES not in os.environ
    assert _placed(Settings(device="cpu"), None) == ("cpu", "process") and QUEUES not in os.environ
