"""`thinwire plan`: what it prints is what the parts say, and what it cannot plan it refuses by name."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import published
from tests.planning.test_fit import content
from thinwire.moe.memory import plan_memory
from thinwire.tools.cli import main
from thinwire.tools.planning.model import LINKS, Leg, chosen_model

SIZES = "--ranks 8 --experts 256 --top-k 8 --hidden 7168 --max-tokens 4096".split()


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> dict:
    assert main(["plan", *SIZES, *options, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_report_has_the_memory_of_plan_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SIZES, "--wire", "int8", "--link", "nvlink4", "--lanes", "2"]) == 0
    text = capsys.readouterr().out
    memory = plan_memory(8, 256, 8, 7168, 4096, wire="int8", lanes=2)
    assert f"{memory.forward_bytes:,} bytes" in text
    assert "5.295 ranks" in text and "predicted and not measured" in text


def test_a_leg_takes_alpha_and_its_bytes_over_what_is_reached_of_beta(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--alpha", "10", "--beta", "100")
    for leg in plan["legs"]:
        assert leg["predicted_seconds"] == pytest.approx(10e-6 + leg["wire_bytes"] / 100e9)
    nvlink = planned(capsys, "--link", "nvlink4")
    seconds = 20e-6 + nvlink["legs"][0]["wire_bytes"] / (0.65 * 450e9)
    assert nvlink["legs"][0]["predicted_seconds"] == pytest.approx(seconds)
    assert planned(capsys)["legs"][0]["predicted_seconds"] is None


def test_of_two_levels_the_slower_one_counts() -> None:
    model = chosen_model("nvlink4", None, None, 1.0, 2, "ib400")
    assert model is not None
    leg = Leg("dispatch", "int8", 1, 0, 0, within_bytes=450e6, between_bytes=5e6)
    assert model.seconds(leg) == pytest.approx(20e-6 + 1e-3)
    leg = Leg("dispatch", "int8", 1, 0, 0, within_bytes=450e6, between_bytes=500e6)
    assert model.seconds(leg) == pytest.approx(40e-6 + 10e-3)


def test_times_come_from_a_fit_where_one_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = content()["figures"]
    both = content(figures=[*figures, *(figure | {"operation": "combine"} for figure in figures)])
    file = tmp_path / "results.json"
    file.write_text(json.dumps(both))
    leg, _ = planned(capsys, "--fit", str(file), "--wire", "int8")["legs"]
    assert leg["predicted_seconds"] == pytest.approx(1e-5 + leg["wire_bytes"] / 1e9)
    assert main(["plan", *SIZES, "--fit", str(file), "--wire", "int8"]) == 0
    text = capsys.readouterr().out
    fitted = "dispatch int8: alpha 10.0 us, beta 1.000 GB/s (2 sizes from 1,000 to 100,000 bytes, at most 0.0 % off)"
    assert fitted in text and "another number of ranks" in text and "as none            -" in text
    assert main(["plan", *SIZES, "--fit", str(file), "--wire", "int4"]) == 2
    there = (
        "no two sizes to fit dispatch thinwire int4 direct uniform by; it has: dispatch thinwire int8 direct uniform"
    )
    assert there in capsys.readouterr().err


def test_a_sweep_has_a_line_for_each_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    swept = planned(capsys, "--sweep", "--link", "nvlink4", "--hosts", "2", "--inter-link", "ib400")["sweep"]
    assert [(plan["settings"]["ranks"], plan["settings"]["hosts"]) for plan in swept] == [
        (2, 1), (4, 1), (8, 2), (16, 4), (32, 8), (64, 16), (128, 32), (256, 64)
    ]  # fmt: skip
    fan_outs = [plan["fan_out"] for plan in swept]
    assert fan_outs == sorted(fan_outs) and fan_outs[-1] == pytest.approx(8)
    assert swept[2]["memory"]["transport"] == "staged" and swept[1]["memory"]["transport"] == "direct"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--link", "pcie9"], "link 'pcie9' is not known; accepted: nvlink3, nvlink4"),
        (["--model", "deepseek-v2"], "model 'deepseek-v2' is not known; accepted: deepseek-v3, qwen3-30b-a3b, mixtral"),
        (["--gpu", "h10"], "gpu 'h10' is not known; accepted: a100-40g, a100-80g, h100"),
        (["--alpha", "3"], "no link and no beta was given"),
        (["--beta", "-1"], "beta is -1.0, expected a number"),
        (["--beta", "nan"], "beta is nan"),
        (["--hosts", "3"], "hosts is 3, expected a divisor of 8"),
        (["--hosts", "2x8"], "ranks is 8 with hosts 2x8, expected their product"),
        (["--hosts", "2x"], "hosts is '2x', expected a number, or those of hosts and of each one's ranks, as 2x8"),
        (["--hosts", "two"], "hosts is 'two'"),
        (["--hosts", "0x8"], "ranks is 8 with hosts 0x8"),
        (["--routing", "matrix:x.csv"], "routing is 'matrix:x.csv', expected demo, uniform, zipf:S, hot:SHARE or max"),
        (["--routing", "zipf:-1"], "zipf:S with S of at least 0"),
        (["--routing", "uniform", "--invariant"], "invariant is True"),
        (["--expert-map", "/nowhere/map.json"], "/nowhere/map.json: cannot be read"),
        (["--hosts", "2", "--link", "nvlink4"], "no inter_link was given for 2 hosts"),
        (["--hosts", "2", "--transport", "direct"], "transport is 'direct' over 2 hosts"),
        (["--lanes", "0"], "lanes is 0"),
        (["--heap", "shm"], "heap is 'shm'"),
        (["--wire", "int9"], "unknown wire format 'int9'"),
        (["--top-k", "257", "--experts", "8"], "top_k is 257"),
        (["--fit", "/nowhere/results.json"], "/nowhere/results.json"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *SIZES, *options]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "sizes"),
    [("deepseek-v3", (256, 8, 7168)), ("qwen3-30b-a3b", (128, 8, 2048)), ("mixtral-8x7b", (8, 2, 4096))],
)
def test_a_model_has_its_sizes_but_for_those_that_are_given(
    model: str, sizes: tuple[int, int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    def settings(*options: str) -> tuple[int, int, int]:
        assert main(["plan", "--model", model, "--ranks", "2", "--max-tokens", "8", *options, "--json", "-"]) == 0
        found = json.loads(capsys.readouterr().out)["settings"]
        return found["experts"], found["top_k"], found["hidden"]

    assert settings() == sizes and settings("--top-k", "1", "--hidden", "64") == (sizes[0], 1, 64)


def test_without_a_model_all_sizes_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("plan --model mixtral-8x7b --max-tokens 8 --hosts 2".split()) == 2
    assert "ranks is None with hosts 2, expected their product, or --hosts as 2x8" in capsys.readouterr().err
    assert main("plan --ranks 2 --max-tokens 8 --experts 4 --hidden 8".split()) == 2
    assert "--top-k is missing; give it, or --model with one of deepseek-v3, " in capsys.readouterr().err


def test_a_gpu_gives_its_link_and_a_share_of_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    plain, with_gpu = planned(capsys, "--link", "nvlink5"), planned(capsys, "--gpu", "b200")
    assert with_gpu["legs"] == plain["legs"] and with_gpu["gpu"] == {"memory_gb": 180, "link": "nvlink5"}
    assert planned(capsys, "--gpu", "b200", "--link", "pcie5")["legs"] == planned(capsys, "--link", "pcie5")["legs"]
    slow = planned(capsys, "--gpu", "b200", "--beta", "1")["legs"]
    assert slow == planned(capsys, "--beta", "1")["legs"]
    assert main(["plan", *SIZES, "--gpu", "a100-40g"]) == 0
    held = plain["memory"]
    told = [f"{100 * held[name] / 40e9:.1f} %" for name in ("forward_bytes", "training_bytes")]
    assert f"  {told[0]} of the 40 GB of a100-40g; with gradients {told[1]}" in capsys.readouterr().out


def test_of_two_hosts_the_share_is_that_of_the_messages_and_times_need_a_link_between(
    capsys: pytest.CaptureFixture[str],
) -> None:
    two = ["--hosts", "2", "--gpu", "h100"]
    plan = planned(capsys, *two)
    assert plan["legs"][0]["predicted_seconds"] is None and plan["memory"]["forward_bytes"] == 0
    assert main(["plan", *SIZES, *two]) == 0
    text = capsys.readouterr().out
    assert "time: not predicted; --inter-link would say by what" in text
    assert f"{plan['memory']['round']['most_bytes']:,} bytes" in text
    assert f"  {plan['memory']['round']['most_bytes'] / 80e7:.2f} % of the 80 GB of h100" in text
    assert planned(capsys, *two, "--inter-link", "ib400")["legs"][0]["predicted_seconds"] > 0


def test_the_page_shows_what_its_commands_print(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("THINWIRE_WIRE", raising=False)
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    samples = re.findall(r"```sh\n(thinwire plan [^\n]*)\n```\n\n```text\n(.*?)```", page, re.DOTALL)
    assert len(samples) == 2
    for command, shown in samples:
        assert main(shlex.split(command)[1:]) == 0
        assert capsys.readouterr().out == shown, f"paste what {command} prints"


def test_the_page_shows_the_table_of_published_figures() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    assert published.table() in page, "print it anew: python -m benchmarks.published"


def test_the_models_constants_are_what_published_kernels_reach() -> None:
    shares = [row.share for row in published.PREFILL]
    assert min(shares) < LINKS["nvlink4"].efficiency < max(shares)
    errors = [row.predicted() / row.measured - 1 for row in (*published.PREFILL, *published.DECODE)]
    assert max(map(abs, errors)) < 0.35


def test_options_are_refused_before_torch_is_imported() -> None:
    call = f"main(['plan', *{SIZES}, '--link', 'x'])"
    code = f"import sys; from thinwire.tools.cli import main; {call}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_a_link_is_not_followed_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, link = tmp_path / "own", tmp_path / "link"
    own.write_text("kept")
    link.symlink_to(own)
    assert main(["plan", *SIZES, "--json", str(link)]) == 2
    assert own.read_text() == "kept" and "a symbolic link, which is not followed" in capsys.readouterr().err
    assert main(["plan", *SIZES, "--json", str(own)]) == 0 and json.loads(own.read_text())
