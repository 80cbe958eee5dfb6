"""The adapter for CollectiveX: what it carries, and its model of a quantised combine; and its oracle, where that is.

INFERENCEX names a clone of https://github.com/SemiAnalysisAI/InferenceX; without it, ../InferenceX is looked for.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="CPU ranks need numba")

from benchmarks.collectivex import oracle
from thinwire.comm import Communicator
from thinwire.testing import run_ranks

CHECKOUT = Path(os.environ.get("INFERENCEX", Path(__file__).parents[3] / "InferenceX"))
HIDDEN, EXPERTS, TOP_K, TOKENS = 256, 8, 3, 11


class _Base:
    """What the adapter has of the benchmark's EPBackend."""

    def __init__(self, args: Any, rank: int, world_size: int, local_rank: int, device: torch.device) -> None:
        self.args, self.precision, self.combine_dtype = args, args.precision, "bf16"


def backend_of(comm: Communicator, **settings: Any) -> tuple[Any, Any]:
    """The adapter's module, and its backend on this rank."""
    sys.modules["ep_backend"] = types.ModuleType("ep_backend")
    sys.modules["ep_backend"].EPBackend = _Base  # type: ignore[attr-defined]
    adapter: Any = importlib.import_module("benchmarks.collectivex.ep_thinwire")
    args = types.SimpleNamespace(precision="fp8", experts=EXPERTS, topk=TOP_K, hidden=HIDDEN, **settings)
    backend = adapter.ThinwireBackend(args, comm.rank, comm.size, comm.rank, torch.device("cpu"))
    backend.create_buffer(types.SimpleNamespace(max_tokens_per_rank=TOKENS))
    return adapter, backend


def problem_of(rank: int) -> Any:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices
    ids[0] = -1  # a token of no expert
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    return types.SimpleNamespace(dispatch_x=x, topk_idx=ids, topk_weights=weights, oracle_x=x)


def modelled(comm: Communicator) -> None:
    """An expert that scales; the model of combine then has the very bits that come home."""
    adapter, backend = backend_of(comm, wire="none", combine_wire="int8")
    problem = problem_of(comm.rank)

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
    came = torch.cat([problem_of(rank).dispatch_x[(problem_of(rank).topk_idx // (EXPERTS // 2) == comm.rank).any(1)]
                      for rank in range(2)])  # fmt: skip
    assert torch.equal(view.payload, came) and backend.recv_tokens(handle) == len(came)
    y = backend.combine_transformed(problem, handle, transform(view.payload, view.expert_ids, view.weights))
    with adapter.quantised_combine(harness, backend.ep):
        expected = harness._expected_transformed_combine(torch, problem, EXPERTS // 2, 1, "unweighted-rank-sum")
    assert torch.equal(y, expected.bfloat16()) and harness._expected_transformed_combine is plain
    exact = transform(problem.oracle_x, problem.topk_idx, problem.topk_weights)
    assert 1e-3 < (y.float() - exact.float()).norm() / exact.float().norm() < 0.02
    with pytest.raises(ValueError, match="'int4'; the benchmark counts whole bytes"):
        backend_of(comm, wire="int4")


def test_its_model_of_a_quantised_combine_is_what_comes_home() -> None:
    run_ranks(modelled, 2)


@pytest.mark.skipif(not (CHECKOUT / "experimental").exists(), reason=f"{CHECKOUT} is no clone of InferenceX")
def test_the_oracle_passes_every_case(tmp_path: Path) -> None:
    file = tmp_path / "collectivex.json"
    oracle.main(["--checkout", str(CHECKOUT), "--ranks", "2", "--tokens", "8", "1", "--json", str(file)])
    figures = json.loads(file.read_text())["figures"]
    assert [(line["wires"], line["tokens"]) for line in figures] == [(w, n) for w in oracle.WIRES for n in (1, 8)]
    assert all(line["passed"] == "yes" and line["error"] < line["tolerance"] for line in figures)
