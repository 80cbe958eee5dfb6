"""More families of transformers: over two ranks they compute what they compute whole, or transformers refuses them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="`make test-all` installs transformers and runs this")
pytest.importorskip("numba", reason="CPU ranks need numba")

from tests.helpers.speeds import exhaustive_but
from tests.integrations.families import CASES, FAMILIES, INEXACT, REFUSED, refusal
from tests.integrations.models import STOCK, quiet, run, write_models
from thinwire.testing import run_ranks


# With state space models, with linear attention, and with a layer that has no experts.
@pytest.mark.parametrize("family", exhaustive_but(["nemotron_h", "qwen3_next", "glm4_moe"], FAMILIES))
def test_a_family_over_ranks_is_the_whole_one(family: str, tmp_path: Path) -> None:
    quiet()
    write_models(tmp_path, {family: FAMILIES[family]})
    implementations = ["thinwire:none", "thinwire:int8", *([STOCK] if family in INEXACT else [])]
    cases = [case for case in CASES if case[0] == family]
    for (_, _, use), figures in run(2, tmp_path, implementations, all_cases=cases).items():
        exact, int8 = figures["thinwire:none"], figures["thinwire:int8"]
        logits, gradients = 1e-6, 1e-6 if use == "a batch each" else 2e-6
        if family in INEXACT:
            stock = figures[STOCK]
            logits, gradients = max(logits, stock["logits"]), max(gradients, 1.1 * max(stock["gradients"].values()))
        assert exact["logits"] <= logits and max(exact["layers"]) <= 1e-6, use
        assert max(exact["gradients"].values()) <= gradients and set(exact["gradients"]) == {
            "experts",
            "router",
            "rest",
        }
        assert exact["tokens_equal"] and exact["flips"] == 0, use
        assert 1e-3 < min(int8["layers"]) and max(int8["layers"]) <= 0.02, use


# Should one of them be spread one day, it belongs among the others.
@pytest.mark.parametrize(("family", "use"), exhaustive_but([("llama4_text", "a batch each")], REFUSED, several=True))
def test_what_transformers_refuses_is_refused_with_any_implementation(family: str, use: str, tmp_path: Path) -> None:
    quiet()
    write_models(tmp_path, {family: REFUSED[family, use]})
    said = [run_ranks(refusal, 2, str(tmp_path / family), use, name, timeout=280) for name in (STOCK, "thinwire:none")]
    assert said[0] == said[1] and all("ep_plan" in each or "overlapping meshes" in each for each in said[0])
