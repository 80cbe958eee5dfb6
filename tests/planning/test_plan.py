"""`thinwire plan`: times come from a link or a fit, and what it prints is what the parts say."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import published
from thinwire.moe.memory import plan_memory
from thinwire.tools.bench.results import read_results
from thinwire.tools.cli import main
from thinwire.tools.planning.model import LINKS, Leg, chosen_model
from thinwire.tools.planning.plan import FittedModel, Request, fit_link

SIZES = "--ranks 8 --experts 256 --top-k 8 --hidden 7168 --max-tokens 4096".split()


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["plan", *SIZES, *options, "--json", "-"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["plan", *SIZES, *options]) == 0
    return capsys.readouterr().out


def test_a_leg_takes_alpha_and_its_bytes_over_what_is_reached_of_beta(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--alpha", "10", "--beta", "100")
    for leg in plan["legs"]:
        assert leg["predicted_seconds"] == pytest.approx(10e-6 + leg["wire_bytes"] / 100e9)
    leg = planned(capsys, "--link", "nvlink4")["legs"][0]
    assert leg["predicted_seconds"] == pytest.approx(20e-6 + leg["wire_bytes"] / (0.65 * 450e9))
    assert planned(capsys)["legs"][0]["predicted_seconds"] is None
    text = printed(capsys, "--wire", "int8", "--link", "nvlink4", "--lanes", "2")
    assert f"{plan_memory(8, 256, 8, 7168, 4096, wire='int8', lanes=2).forward_bytes:,} bytes" in text
    assert "5.295 ranks" in text and "predicted and not measured" in text


@pytest.mark.parametrize(("between", "seconds"), [(5e6, 20e-6 + 1e-3), (500e6, 40e-6 + 10e-3)])
def test_of_two_levels_the_slower_one_counts(between: float, seconds: float) -> None:
    model = chosen_model("nvlink4", None, None, 1.0, 2, "ib400")
    assert model is not None
    leg = Leg("dispatch", "int8", 1, 0, 0, within_bytes=450e6, between_bytes=between)
    assert model.seconds(leg) == pytest.approx(seconds)


def test_a_sweep_has_a_line_for_each_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    swept = planned(capsys, "--sweep", "--link", "nvlink4", "--hosts", "2", "--inter-link", "ib400")["sweep"]
    assert [(plan["settings"]["ranks"], plan["settings"]["hosts"]) for plan in swept] == [
        (2, 1), (4, 1), (8, 2), (16, 4), (32, 8), (64, 16), (128, 32), (256, 64)
    ]  # fmt: skip
    fan_outs = [plan["fan_out"] for plan in swept]
    assert fan_outs == sorted(fan_outs) and fan_outs[-1] == pytest.approx(8)
    assert swept[2]["memory"]["transport"] == "staged" and swept[1]["memory"]["transport"] == "direct"


@pytest.mark.parametrize(
    ("model", "sizes"),
    [("deepseek-v3", (256, 8, 7168)), ("qwen3-30b-a3b", (128, 8, 2048)), ("mixtral-8x7b", (8, 2, 4096))],
)
def test_a_model_has_its_sizes_but_for_those_that_are_given(
    model: str, sizes: tuple[int, int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    for options, expected in ((), sizes), (("--top-k", "1", "--hidden", "64"), (sizes[0], 1, 64)):
        assert main(["plan", "--model", model, "--ranks", "2", "--max-tokens", "8", *options, "--json", "-"]) == 0
        found = json.loads(capsys.readouterr().out)["settings"]
        assert (found["experts"], found["top_k"], found["hidden"]) == expected


def test_a_gpu_gives_its_link_and_a_share_of_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    plain, with_gpu = planned(capsys, "--link", "nvlink5"), planned(capsys, "--gpu", "b200")
    assert with_gpu["legs"] == plain["legs"] and with_gpu["gpu"] == {"memory_gb": 180, "link": "nvlink5"}
    for other in ("--link", "pcie5"), ("--beta", "1"):
        assert planned(capsys, "--gpu", "b200", *other)["legs"] == planned(capsys, *other)["legs"]
    held = plain["memory"]
    told = [f"{100 * held[name] / 40e9:.1f} %" for name in ("forward_bytes", "training_bytes")]
    text = printed(capsys, "--gpu", "a100-40g")
    assert f"  {told[0]} of the 40 GB of a100-40g; with gradients {told[1]}" in text
    # Of two hosts the share is that of the messages, and times need a link between them.
    two = ["--hosts", "2", "--gpu", "h100"]
    plan, text = planned(capsys, *two), printed(capsys, *two)
    most = plan["memory"]["round"]["most_bytes"]
    assert plan["legs"][0]["predicted_seconds"] is None and plan["memory"]["forward_bytes"] == 0
    assert "time: not predicted; --inter-link would say by what" in text
    assert f"{most:,} bytes" in text and f"  {most / 80e7:.2f} % of the 80 GB of h100" in text
    assert planned(capsys, *two, "--inter-link", "ib400")["legs"][0]["predicted_seconds"] > 0


def test_the_models_constants_are_what_published_kernels_reach() -> None:
    shares = [row.share for row in published.PREFILL]
    assert min(shares) < LINKS["nvlink4"].efficiency < max(shares)
    errors = [row.predicted() / row.measured - 1 for row in (*published.PREFILL, *published.DECODE)]
    assert max(map(abs, errors)) < 0.35


def test_a_link_is_not_followed_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, link = tmp_path / "own", tmp_path / "link"
    own.write_text("kept")
    link.symlink_to(own)
    assert main(["plan", *SIZES, "--json", str(link)]) == 2
    assert own.read_text() == "kept" and "a symbolic link, which is not followed" in capsys.readouterr().err
    assert main(["plan", *SIZES, "--json", str(own)]) == 0 and json.loads(own.read_text())


# ---------------------------------------------------------------------------------------------------------------------
# Fits


@pytest.mark.parametrize(("alpha", "beta"), [(20e-6, 300e9), (1e-3, 1e8), (5e-6, 1e12)])
def test_a_fit_finds_the_line_that_made_the_points(alpha: float, beta: float) -> None:
    link = fit_link([(size, alpha + size / beta) for size in (1e7, 0, 1e5, 1e3)])
    assert (link.alpha, link.beta, link.efficiency) == (pytest.approx(alpha), pytest.approx(beta), 1)
    assert link.source == "4 sizes from 0 to 10,000,000 bytes, at most 0.0 % off"


def test_residuals_are_relative_so_that_small_messages_count() -> None:
    generator = random.Random(3)
    sizes = [4.0**power for power in range(4, 15)]
    noisy = [(size, (30e-6 + size / 1e9) * generator.uniform(0.95, 1.05)) for size in sizes]
    link = fit_link(noisy)

    def squares(alpha: float, beta: float) -> float:
        return sum(((alpha + size / beta) / seconds - 1) ** 2 for size, seconds in noisy)

    for alpha, beta in ((1.001, 1), (0.999, 1), (1, 1.001), (1, 0.999)):
        assert squares(link.alpha, link.beta) <= squares(link.alpha * alpha, link.beta * beta)
    falling, steep = (fit_link([(size, size**power) for size in (1.0, 2.0, 4.0)]) for power in (-1, 2))
    assert falling.beta == float("inf") and falling.alpha > 0 and steep.alpha == 0 and steep.beta > 0


def test_times_come_from_right_results_of_thinwires_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (
        {"operation": "dispatch", "implementation": "thinwire", "wire": "int8", "transport": "direct",
         "routing": "uniform", "wire_bytes": size, "seconds": {"median": 1e-5 + size / 1e9}}
        for size in (1000, 100000)
    )  # fmt: skip
    wrong, other = first | {"wire_bytes": 5, "seconds": None, "wrong": 3}, second | {"implementation": "gloo"}
    combined = [
        figure | {"operation": "combine", "wire": wire} for figure in (first, second) for wire in ("int8", "none")
    ]
    content = {"format": "thinwire bench", "version": 1, "ranks": 4, "hosts": 1}
    file = tmp_path / "results.json"
    file.write_text(json.dumps(content | {"figures": [first, wrong, other, second, *combined]}))
    model = FittedModel.of(Request(4, 8, 2, 64, 16, "int8", "none"), read_results(file))
    assert {*model.links} == {("dispatch", "int8"), ("combine", "int8"), ("combine", "none")} and model.ranks == 4
    leg, _ = planned(capsys, "--fit", str(file), "--wire", "int8")["legs"]
    assert leg["predicted_seconds"] == pytest.approx(1e-5 + leg["wire_bytes"] / 1e9)
    text = printed(capsys, "--fit", str(file), "--wire", "int8")
    fitted = "dispatch int8: alpha 10.0 us, beta 1.000 GB/s (2 sizes from 1,000 to 100,000 bytes, at most 0.0 % off)"
    assert fitted in text and "another number of ranks" in text
    assert main(["plan", *SIZES, "--fit", str(file), "--wire", "int4"]) == 2
    lacking = "no two sizes to fit dispatch thinwire int4 direct uniform by; it has: "
    assert lacking in capsys.readouterr().err
    file.write_text(json.dumps(content | {"figures": [], "ranks": 0}))
    assert main(["plan", *SIZES, "--fit", str(file)]) == 2
    assert f"{file}: ranks is 0, expected an int from 1" in capsys.readouterr().err
