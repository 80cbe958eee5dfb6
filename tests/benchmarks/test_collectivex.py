"""The adapter for CollectiveX: its rounds and its model of a quantised combine; and all of its oracle, where that is.

INFERENCEX names a clone of https://github.com/SemiAnalysisAI/InferenceX; without it, ../InferenceX is looked for.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="CPU ranks need numba")

import thinwire as tw
from benchmarks.collectivex import oracle
from thinwire.comm import Communicator
from thinwire.testing import run_ranks

ROOT = Path(__file__).parents[2]
CHECKOUT = Path(os.environ.get("INFERENCEX", ROOT.parent / "InferenceX"))
HIDDEN, EXPERTS, TOP_K, TOKENS = 256, 8, 3, 11


class _Base:
    """What the adapter has of the benchmark's EPBackend."""

    def __init__(self, args: Any, rank: int, world_size: int, local_rank: int, device: torch.device) -> None:
        self.args, self.precision, self.combine_dtype = args, args.precision, "bf16"


def adapter() -> Any:
    sys.modules["ep_backend"] = types.ModuleType("ep_backend")
    sys.modules["ep_backend"].EPBackend = _Base  # type: ignore[attr-defined]
    return importlib.import_module("benchmarks.collectivex.ep_thinwire")


def backend_of(comm: Communicator, **settings: Any) -> Any:
    args = types.SimpleNamespace(precision="fp8", experts=EXPERTS, topk=TOP_K, hidden=HIDDEN, **settings)
    backend = adapter().ThinwireBackend(args, comm.rank, comm.size, comm.rank, torch.device("cpu"))
    backend.create_buffer(types.SimpleNamespace(max_tokens_per_rank=TOKENS))
    return backend


def problem_of(rank: int) -> Any:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices
    ids[0] = -1  # a token of no expert
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    return types.SimpleNamespace(dispatch_x=x, topk_idx=ids, topk_weights=weights)


def rounds(comm: Communicator) -> None:
    backend, problem = backend_of(comm, wire="int8:64"), problem_of(comm.rank)
    assert (backend.dispatch_dtype, backend.combine_dtype) == ("int8:64", "bf16")
    row_bytes = backend.dispatch_value_bytes * HIDDEN + backend.dispatch_scale_bytes_per_copy
    assert row_bytes == tw.WireFormat.parse("int8:64").row_bytes(HIDDEN)
    first, problems = comm.rank * EXPERTS // 2, [problem_of(rank) for rank in range(2)]
    x, ids, weights = (
        torch.cat([getattr(p, name) for p in problems]) for name in ("dispatch_x", "topk_idx", "topk_weights")
    )
    here = (ids >= first) & (ids < first + EXPERTS // 2)
    came = here.any(1)
    handle = backend.dispatch(problem)
    view = backend.inspect_dispatch(problem, handle)
    assert torch.equal(view.payload, backend.semantic_payload(x[came])) and not torch.equal(view.payload, x[came])
    for row, wanted in enumerate(zip(ids[came], weights[came], here[came], strict=True)):
        expected = sorted((int(e), float(w)) for e, w, mine in zip(*wanted, strict=True) if mine)
        found = [(int(e), float(w)) for e, w in zip(view.expert_ids[row], view.weights[row], strict=True) if e >= 0]
        assert found == expected
    assert view.local_expert_counts.tolist() == torch.bincount(ids[here] - first, minlength=EXPERTS // 2).tolist()
    assert backend.recv_tokens(handle) == came.sum()
    backend.stage(problem, handle)
    y = backend.combine(problem, handle)
    copies = torch.tensor([len({int(e) // (EXPERTS // 2) for e in token if e >= 0}) for token in problem.topk_idx])
    assert torch.equal(y, (backend.semantic_payload(problem.dispatch_x).float() * copies[:, None]).bfloat16())
    # Once the number of rows is known, the device is not waited for.
    problem.recv_tokens = int(came.sum())
    handle = backend.dispatch(problem)
    backend.stage(problem, handle)
    assert torch.equal(handle.combine_input, view.payload)
    assert torch.equal(backend.combine_transformed(problem, handle, 2 * handle.combine_input), 2 * y)
    with pytest.raises(ValueError, match="'int4'; the benchmark counts whole bytes"):
        backend_of(comm, wire="int4")


def test_its_rounds_carry_rows_weights_and_experts_and_bring_sums_home() -> None:
    run_ranks(rounds, 2)


def modelled(comm: Communicator) -> None:
    """An expert that scales; the model of combine then has the very bits that come home."""
    backend, problem = backend_of(comm, wire="none", combine_wire="int8"), problem_of(comm.rank)
    problem.oracle_x = problem.dispatch_x

    def transform(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (rows.float() * (weights * (ids + 1) * (ids >= 0)).sum(1, keepdim=True)).bfloat16()

    def plain(_: Any, problem: Any, experts_per_rank: int, domain: int, semantics: str) -> torch.Tensor:
        assert (experts_per_rank, domain, semantics) == (EXPERTS // 2, 2, "unweighted-rank-sum")
        return transform(problem.oracle_x, problem.topk_idx, problem.topk_weights).float()

    def normalized(_: Any, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = torch.where(ids >= 0, ids, EXPERTS).argsort(dim=1)
        return ids.gather(1, order), weights.gather(1, order)

    harness = types.SimpleNamespace(_expected_transformed_combine=plain, _normalized_expert_metadata=normalized)
    handle = backend.dispatch(problem)
    view = backend.inspect_dispatch(problem, handle)
    y = backend.combine_transformed(problem, handle, transform(view.payload, view.expert_ids, view.weights))
    with adapter().quantised_combine(harness, backend.ep):
        expected = harness._expected_transformed_combine(torch, problem, EXPERTS // 2, 1, "unweighted-rank-sum")
    assert torch.equal(y, expected.bfloat16())
    assert harness._expected_transformed_combine is plain
    exact = transform(problem.oracle_x, problem.topk_idx, problem.topk_weights)
    assert 1e-3 < (y.float() - exact.float()).norm() / exact.float().norm() < 0.02
    assert not y[0].any()


def test_its_model_of_a_quantised_combine_is_what_comes_home() -> None:
    run_ranks(modelled, 2)


def test_what_fails_on_one_rank_or_in_the_chain_fails() -> None:
    def report(**checks: bool) -> dict[str, Any]:
        passed = all(checks.values())
        return {"passed": passed, "checks": checks, "max_elementwise_relative_error": 0.01, "rel_tol": 0.03}

    good = {"before": report(weights=True), "after": report(weights=True), "chain": True, "chain_error": 0.0}
    bad = good | {"after": report(weights=False)}
    broken = good | {"chain": False, "chain_error": 2.0}
    for point, passed, failed in ((good, "yes", ""), (bad, "no", "weights"), (broken, "no", "chain")):
        for by_rank in ([[good], [point]], [[point], [good]]):
            (line,) = oracle.figures(2, "int8/int8", [8], by_rank)
            assert (line["passed"], line["failed"]) == (passed, failed)


def test_a_folder_that_is_no_clone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected a clone of InferenceX"):
        oracle.main(["--checkout", str(tmp_path)])


class _Event:
    """A CUDA event on the host's clock."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return (end.at - self.at) * 1e3


def swept(comm: Communicator, checkout: str, precision: str, out: str) -> int:
    """The benchmark's own sweep, as its `run_ep.py` starts it, but for a few samples."""
    vars(torch.cuda).update(synchronize=lambda *_: None, Event=_Event)
    sys.path[:0] = [f"{checkout}/{oracle._BENCH}", str(ROOT / "benchmarks" / "collectivex")]
    harness, made = importlib.import_module("ep_harness"), importlib.import_module("ep_thinwire")
    args = types.SimpleNamespace(
        mode="normal", precision=precision, phase="decode", tokens_ladder="1 8", routing="uniform", seed=67, version=1,
        suite="s", workload_name="w", warmup=1, iters=2, trials=1, chain_iters=4, chain_trials=1, chain_drop=1,
        runner="cpu", topology_class="t", transport="t", scope="scale-up", scale_up_transport="t",
        scale_out_transport="", gpus_per_node=2, scale_up_domain=2, out=out, **oracle.SHAPE,
    )  # fmt: skip
    case = {"backend": "thinwire", "workload": "w", "ep": 2}
    case |= {name: getattr(args, name) for name in ("mode", "phase", "routing", "precision")}
    args.case_id = harness.case_id("cpu", case)
    backend = made.ThinwireBackend(args, comm.rank, comm.size, comm.rank, torch.device("cpu"))
    code: int = harness.run_sweep(args, backend, torch, torch.distributed, torch.device("cpu"), comm.rank, comm.size)
    backend.ep.close()
    return code


needs_checkout = pytest.mark.skipif(
    not (CHECKOUT / "experimental").exists(), reason=f"{CHECKOUT} is no clone of InferenceX"
)


@needs_checkout
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bf16"), ("fp8", "int8")])
def test_the_benchmarks_own_sweep_is_valid(precision: str, dtype: str, tmp_path: Path) -> None:
    out = tmp_path / "case.json"
    assert run_ranks(swept, 2, str(CHECKOUT), precision, str(out), timeout=120) == [0, 0]
    written = json.loads(out.read_text())
    assert written["outcome"] == {"reasons": [], "status": "success"}
    assert (written["measurement"]["dispatch_dtype"], written["measurement"]["combine_dtype"]) == (dtype, "bf16")
    assert all(row["correctness"]["post_chain_state_passed"] for row in written["measurement"]["rows"])


@needs_checkout
def test_the_oracle_passes_every_case(tmp_path: Path) -> None:
    file = tmp_path / "collectivex.json"
    oracle.main(["--checkout", str(CHECKOUT), "--ranks", "2", "--tokens", "8", "1", "--json", str(file)])
    written = json.loads(file.read_text())
    assert [(line["wires"], line["tokens"]) for line in written["figures"]] == [
        (wires, tokens) for wires in oracle.WIRES for tokens in (1, 8)
    ]
    assert all(line["passed"] == "yes" and line["error"] < line["tolerance"] for line in written["figures"])
    assert written["command"].startswith("python -m benchmarks.collectivex.oracle")
