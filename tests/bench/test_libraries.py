"""DeepEP and FlashInfer, in the place of which fakes move rows: their rounds are right, and what they refuse is told.

The fakes have their calls and assertions, not their kernels: nothing here says that the libraries work.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench import fake_deep_ep, fake_flashinfer
from thinwire.comm import Communicator
from thinwire.testing import run_ranks
from thinwire.tools.bench import deepep, flashinfer, session
from thinwire.tools.bench.contender import NotHere
from thinwire.tools.bench.expert_problem import Round
from thinwire.tools.bench.libraries import on_all_ranks, why_absent
from thinwire.tools.bench.options import ROUND, Routing, Settings
from thinwire.tools.bench.session import Results, run_session
from thinwire.tools.bench.timing import Laps
from thinwire.tools.bench.traffic import expert_ids

RANKS, HIDDEN = 4, 256
FEW = Settings(
    operations=ROUND, tokens=(1, 37), iterations=1, warmup=0, sample_seconds=0, hidden=HIDDEN, experts=8, top_k=4,
    wires=("none",), transports=(), baselines=("deepep", "flashinfer"),
)  # fmt: skip
OURS = {("DeepEP", "none"), ("DeepEP", "fp8"), ("FlashInfer", "none")}


@pytest.fixture(autouse=True)
def _libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in ({"deep_ep": fake_deep_ep.module()} | fake_flashinfer.modules()).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Communicator, "group", property(fake_deep_ep.Group))
    monkeypatch.setattr(session, "why_absent", lambda package, comm: None)
    monkeypatch.setattr(fake_deep_ep.Buffer, "alive", 0)


def _run(ranks: int = RANKS, **changes: Any) -> Results:
    return run_ranks(run_session, ranks, Settings(**{**FEW.__dict__, **changes}), mode="thread", timeout=120)[0]


def _lines(results: Results) -> list[dict[str, Any]]:
    return [line for line in results.figures if line["implementation"] in ("DeepEP", "FlashInfer")]


def _reasons(results: Results) -> dict[tuple[str, str], str]:
    return {(entry["implementation"], entry["wire"]): entry["reason"] for entry in results.skipped}


@pytest.mark.parametrize(
    "routing", ["uniform", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("hot:0.9", "zipf:2"))]
)
def test_rounds_are_right_and_errors_are_those_of_their_wire(routing: str) -> None:
    results = _run(routings=(Routing.parse(routing),))
    lines = _lines(results)
    assert results.skipped == [] and len(lines) == len(FEW.tokens) * len(OURS) * len(ROUND)
    for line in lines:
        assert line["wrong"] == 0 and line["seconds"]["median"] > 0
        fp8, dispatched = line["wire"] == "fp8", line["operation"] == "dispatch"
        low, high = (0.015, 0.04) if fp8 else (0, 0) if dispatched else (0.0005, 0.005)
        assert low <= line["relative_error"] <= high
    assert fake_deep_ep.Buffer.alive == 0


def test_wire_bytes_are_rows_with_what_travels_beside_them() -> None:
    results = _run(2, tokens=(9,))
    lines = {(line["implementation"], line["wire"], line["operation"]): line for line in _lines(results)}
    rows = {leg: lines["DeepEP", "none", leg]["logical_bytes"] / (2 * HIDDEN) for leg in ("dispatch", "combine")}
    expected = {
        ("DeepEP", "none"): (2 * HIDDEN + 4 + 4 * 12, 2 * HIDDEN + 4),
        ("DeepEP", "fp8"): (HIDDEN + 4 * 2 + 4 + 4 * 12, 2 * HIDDEN + 4),
        ("FlashInfer", "none"): (2 * HIDDEN + 4 + 4 * 8, 2 * HIDDEN),
    }
    for (name, wire), (out, back) in expected.items():
        assert lines[name, wire, "dispatch"]["wire_bytes"] == pytest.approx(rows["dispatch"] * out)
        assert lines[name, wire, "combine"]["wire_bytes"] == pytest.approx(rows["combine"] * back)


def test_tokens_without_experts_are_zero_in_deepep_and_refused_for_flashinfer(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("9,0,0,3\n0,0,0,0\n2,0,9,0\n5,0,5,5\n")
    results = _run(routings=(Routing.parse(f"matrix:{tmp_path / 'm.csv'}"),), tokens=(9,))
    assert {line["implementation"] for line in _lines(results)} == {"DeepEP"} and results.wrong == 0
    assert _reasons(results) == {
        ("FlashInfer", "none"): "every token must have all of its 4 experts, and some have fewer here"
    }


@pytest.mark.parametrize(
    ("ranks", "changes", "reasons"),
    [
        (3, {}, {"DeepEP": "AssertionError: Unsupported number of EP ranks: 3"}),
        (2, {"experts": 9}, {"DeepEP": "num_tokens_per_expert->size(0) % num_ranks == 0"}),
        (2, {"dtype": "float16"}, {"DeepEP": "it takes bfloat16 alone, not float16"}),
        (2, {"dtype": "float32"}, {"DeepEP": "it takes bfloat16 alone, not float32"}),
        (2, {"hidden": 8192}, {"DeepEP": "rows of multiples of 32 bytes up to 16352; these have 16384"}),
        (2, {"hidden": 24}, {"DeepEP": "rows of multiples of 32 bytes up to 16352; these have 48"}),
        (2, {"top_k": 3}, {"FlashInfer": "RuntimeError: Check failed: Unsupported top_k"}),
        (2, {"hidden": 100}, {"DeepEP": "these have 200", "FlashInfer": "multiples of 16 bytes; these have 200"}),
    ],
    ids=["ranks", "experts", "float16", "float32", "long", "odd", "top_k", "narrow"],
)  # fmt: skip
def test_what_they_refuse_is_skipped_with_the_reason(ranks: int, changes: Any, reasons: dict[str, str]) -> None:
    results = _run(ranks, tokens=(2,), **changes)
    told = _reasons(results)
    for name, text in reasons.items():
        assert text in told[name, "none"]
        assert (name, "none") not in {(line["implementation"], line["wire"]) for line in _lines(results)}
    assert {name for name, wire in told if wire == "none"} == set(reasons) and results.wrong == 0
    assert fake_deep_ep.Buffer.alive == 0


def test_e4m3_needs_whole_groups() -> None:
    told = _reasons(_run(2, hidden=160))
    assert told == {("DeepEP", "fp8"): "its e4m3 takes multiples of 128 elements, not 160"}


def _spoil_rows(buffer: Any, *args: Any, original: Any, **kwargs: Any) -> Any:
    rows, *others = original(buffer, *args, **kwargs)
    return rows.flip(0), *others


def _spoil_weights(buffer: Any, *args: Any, original: Any, **kwargs: Any) -> Any:
    rows, ids, weights, *others = original(buffer, *args, **kwargs)
    return rows, ids, weights * 1.02, *others


@pytest.mark.parametrize(("spoil", "wrong"), [(_spoil_rows, {*ROUND}), (_spoil_weights, {"combine", "moe"})])
def test_a_library_that_errs_gets_no_time(spoil: Any, wrong: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    original = fake_deep_ep.Buffer.dispatch
    monkeypatch.setattr(
        fake_deep_ep.Buffer, "dispatch", lambda buffer, x, **kwargs: spoil(buffer, x, original=original, **kwargs)
    )
    results = _run(tokens=(37,), baselines=("deepep",))
    lines = [line for line in _lines(results) if line["wire"] == "none"]
    assert {line["operation"] for line in lines if line["wrong"]} == wrong
    assert all(line["seconds"] is None for line in lines)


def test_an_import_that_fails_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)  # makes importing it an ImportError
    told = _reasons(_run(2, tokens=(1,), baselines=("deepep",)))
    assert told["DeepEP", "none"].startswith(("ModuleNotFoundError: ", "ImportError: "))


def _fail_at_two(comm: Communicator) -> tuple[str, list[str]]:
    undone: list[str] = []

    def step() -> int:
        if comm.rank == 2:
            raise OSError("no such device\nand more")
        return comm.rank

    with pytest.raises(NotHere) as told:
        on_all_ranks(comm, step, undo=lambda: undone.append("undone"))
    assert on_all_ranks(comm, lambda: comm.rank) == comm.rank
    return str(told.value), undone


def test_a_step_that_fails_on_one_rank_fails_on_all_and_nothing_waits_for_it() -> None:
    found = run_ranks(_fail_at_two, 3, mode="thread")
    assert found == [("on rank 2: OSError: no such device", [])] * 3


def _absent(comm: Communicator) -> list[str | None]:
    return [why_absent("no_such_package_here", comm), why_absent("json", comm)]


def test_a_package_is_looked_for_before_gpus_are() -> None:
    assert run_ranks(_absent, 2, mode="thread")[0] == ["not installed", "it is for processes with a GPU each"]


def _rounds(comm: Communicator, experts: int) -> list[int]:
    ids = expert_ids(Routing("zipf", 1.0), 21, experts, 2, comm.size)
    problem, laps = Round(comm, torch.bfloat16, 64, ids, experts), Laps(comm.device)
    wrong = []
    for candidate in (deepep.deepep_round(problem, "none", laps), flashinfer.flashinfer_round(problem, laps)):
        try:
            contender = candidate.make()
        except NotHere:
            continue
        wrong += [contender.judge(leg, got).wrong for leg, got in contender.call().items()]
        contender.close()
    return wrong


@pytest.mark.parametrize(("ranks", "experts"), [(2, 2), (2, 7), (4, 64)])
def test_any_split_of_experts_that_they_take_is_right(ranks: int, experts: int) -> None:
    for wrong in run_ranks(_rounds, ranks, experts, mode="thread"):
        assert wrong == [0] * (3 if experts % ranks else 6)
