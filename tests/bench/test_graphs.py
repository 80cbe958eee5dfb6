"""CUDA graphs of what is timed, with a stand-in for them: what is captured, replayed and checked, and said of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="the CPU kernels need numba")

from thinwire.comm import Communicator
from thinwire.testing import run_ranks
from thinwire.tools.bench import graphs
from thinwire.tools.bench.contender import Contender
from thinwire.tools.bench.graphs import GRAPH, how_called
from thinwire.tools.bench.launch import print_end
from thinwire.tools.bench.options import Settings
from thinwire.tools.bench.session import Results, run_session

FEW = Settings(
    operations=("all_gather", "moe"), sizes=(6000,), tokens=(5,), iterations=2, warmup=0, sample_seconds=0, hidden=96,
    experts=6, top_k=2,
)  # fmt: skip


class StandIn:
    """Of CUDA's graphs: a part is not called when it is captured, but in each replay.

    Attributes:
        captures: each one's stream, and its mode.
        replays: their number.
        idle: whether replays do nothing.
        refused: a thread in which nothing can be captured.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures: list[tuple[object, str]] = []
        self.replays, self.idle, self.refused = 0, False, ""
        capturing, stand_in = threading.Lock(), self

        class Graph(graphs._Graph):
            def __init__(self, part: Callable[..., Any], stream: Any) -> None:
                super().__init__(lambda *arguments: (None, None), stream)
                self._called = part

            def __call__(self, *arguments: Any) -> Any:
                if self._graph is not None and not stand_in.idle:
                    self._result = self._called(*arguments)
                return super().__call__(*arguments)

        class CudaGraph:
            def replay(self) -> None:
                stand_in.replays += 1

        @contextlib.contextmanager
        def graph(graph: object, stream: object, capture_error_mode: str) -> Iterator[None]:
            assert capturing.acquire(blocking=False), "two captures at once"
            try:
                if threading.current_thread().name == stand_in.refused:
                    raise RuntimeError("not permitted\nwhen stream is capturing")
                yield
                stand_in.captures.append((stream, capture_error_mode))
            finally:
                capturing.release()

        monkeypatch.setattr(graphs, "_DEVICES", ("cpu",))
        monkeypatch.setattr(graphs, "_Graph", Graph)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", CudaGraph)
        monkeypatch.setattr(torch.cuda, "Stream", type("Stream", (), {}))
        monkeypatch.setattr(torch.cuda, "graph", graph)


@pytest.fixture
def cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(monkeypatch)


def _called(results: Results) -> dict[tuple[str, str | None], set[str | None]]:
    called: dict[tuple[str, str | None], set[str | None]] = {}
    for figure in results.figures:
        called.setdefault((figure["implementation"], figure["transport"]), set()).add(figure["called"])
    return called


def _run(**changes: Any) -> Results:
    settings = Settings(**{**FEW.__dict__, **changes})
    return run_ranks(run_session, 2, settings, mode="thread", timeout=300)[0]


def test_what_can_be_captured_is_timed_as_graphs_and_each_figure_says_how(
    cuda_graphs: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    results = _run(wires=("none", "int8"))
    assert results.wrong == 0 and all(figure["seconds"] for figure in results.figures)
    by_host = {"Python, as the host takes part"}
    assert _called(results) == {
        ("copy", None): {GRAPH}, ("thinwire", "direct"): {GRAPH}, ("tw.empty", "direct"): {GRAPH},
        ("thinwire", "staged"): by_host,
    }  # fmt: skip
    # One for a collective, three for a round, on each of two ranks; each contender's on a stream of its own.
    contenders = {"all_gather": 2 + 1 + 1, "moe": 2 + 1}
    assert len(cuda_graphs.captures) == 2 * (contenders["all_gather"] + 3 * 2 + 1)
    assert {mode for _, mode in cuda_graphs.captures} == {"thread_local"}
    assert len({id(stream) for stream, _ in cuda_graphs.captures}) == 2 * sum(contenders.values())
    assert cuda_graphs.replays > len(cuda_graphs.captures)
    print_end(results)
    printed = capsys.readouterr().out
    assert "# called by CUDA graph: copy, thinwire none direct, thinwire int8 direct, tw.empty direct\n" in printed
    assert "# called by Python, as the host takes part: thinwire none staged, thinwire int8 staged\n" in printed


def test_what_graphs_leave_is_what_is_checked(cuda_graphs: StandIn) -> None:
    cuda_graphs.idle = True
    for figure in _run(operations=("all_gather",), transports=("direct",)).figures:
        assert figure["wrong"] > 0 and figure["seconds"] is None


def test_eager_times_calls_from_python(cuda_graphs: StandIn) -> None:
    called = _called(_run(eager=True))
    assert set.union(*called.values()) == {"Python, as --eager says"} and not cuda_graphs.captures


def test_where_capturing_fails_on_a_rank_all_call_from_python(cuda_graphs: StandIn) -> None:
    cuda_graphs.refused = "rank 1"
    results = _run(transports=("direct",))
    failed = "Python, as capturing failed on rank 1: RuntimeError('not permitted\\nwhen stream is capturing')"
    assert set.union(*_called(results).values()) == {failed} and cuda_graphs.captures
    assert results.wrong == cuda_graphs.replays == 0


def _beside_another(comm: Communicator) -> dict[str, str]:
    def contender(name: str, transport: str | None, *parts: Callable[..., Any]) -> Contender:
        return Contender(name, "none", transport, lambda: {}, lambda *_: pytest.fail(), {}, parts=list(parts))

    contenders = contender("nccl", None), contender("thinwire", "direct", print), contender("thinwire", "staged")
    return how_called(comm, contenders, eager=False)


def test_beside_another_librarys_calls_ours_are_made_alike(cuda_graphs: StandIn) -> None:
    (called,) = run_ranks(_beside_another, 1, mode="thread")
    assert called["thinwire/none/direct"] == "Python, as nccl is, beside it" and not cuda_graphs.captures
    assert called["nccl/none"] == "Python, as another library is called so"
    assert called["thinwire/none/staged"] == "Python, as the host takes part"


def test_nothing_is_said_of_it_on_a_cpu() -> None:
    assert set.union(*_called(_run(operations=("all_gather",))).values()) == {None}
