"""The benchmark of vLLM compares what one run did, and times from the first rank's start to the last one's end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_vllm


def test_ratios_are_those_of_medians_within_a_run() -> None:
    def run(alone: list[float], ranks: list[float]) -> dict[str, Any]:
        return {
            name: dict.fromkeys(bench_vllm.WORK, seconds) for name, seconds in ((bench_vllm.ALONE, alone), ("2", ranks))
        }

    lines = bench_vllm.figures([run([2, 4, 9], [8, 8, 1]), run([6, 6, 6], [4, 3, 5]), run([1, 1, 1], [1, 1, 1])])
    alone, ranks = lines
    assert ranks["decode"]["ratios"] == [0.5, 1.5, 1.0] and alone["decode"]["ratios"] == [1.0] * 3
    assert alone["prefill"]["tokens_per_second"] == 16 * 128 / 4 and ranks["decode"]["tokens_per_second"] == 16 * 32 / 4
    shown = bench_vllm.columns(ranks)
    assert shown["prefill x one process"] == "1.00 (0.50 to 1.50)" and shown["decode tokens/s"] == 128


def test_a_sample_lasts_until_the_last_rank_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_llm(model: Path, name: Path, ranks: int, wire: str, **more: Any) -> None:
        for rank, samples in enumerate(([[0, 99], [10, 13], [20, 21]], [[0, 1], [12, 14], [19, 20.5]])):
            content = {str(rank): dict.fromkeys(bench_vllm.WORK, samples)}
            name.with_name(f"{name.name}-{rank}.json").write_text(json.dumps(content))
        name.with_name(f"{name.name}-0.log").write_text(f"wire: {wire} out")

    monkeypatch.setattr(bench_vllm.serve_check, "run_llm", run_llm)
    seconds = bench_vllm.run(tmp_path, tmp_path / "none", (2, "none", None), 2)
    assert seconds == dict.fromkeys(bench_vllm.WORK, [4, 2]), "the first sample warms up"
    with pytest.raises(SystemExit, match="2 of 3 ranks"):
        bench_vllm.run(tmp_path, tmp_path / "none", (3, "none", None), 2)
