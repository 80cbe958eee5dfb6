"""The demo's promises, on the shipped model and a part of the held-out text."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from thinwire.tools.cli import main
from thinwire.tools.commands import demo
from thinwire.tools.demo.tiny_moe import load_tiny_moe


def _held_out(size: int) -> bytes:
    return (resources.files("thinwire.tools.demo") / "heldout.txt").read_bytes()[:size]


@pytest.mark.exhaustive
def test_the_demo_prints_its_table_and_int8_costs_less_than_half_a_percent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, figures = tmp_path / "text", tmp_path / "figures.json"
    text.write_bytes(_held_out(3000))  # twelve windows: ranks have unequal numbers of them
    assert main(["demo", "--ranks", "3", "--wire", "none,int8,int4", "--text", str(text), "--json", str(figures)]) == 0
    recorded = json.loads(figures.read_text())
    none, int8, int4 = recorded["scores"]
    unsharded = recorded["unsharded_bits_per_byte"]
    assert none["largest_logit_difference"] <= 1e-5
    assert none["dispatch_error"] == none["combine_error"] == 0
    assert abs(int8["bits_per_byte"] / unsharded - 1) < 0.005
    assert 0.003 < int8["dispatch_error"] < 0.0085 and 0.003 < int8["combine_error"] < 0.0085
    assert 0.06 < int4["dispatch_error"] < 0.15
    # 256 float32 against a record of 288 bytes: a little less than four times on the way back.
    assert 3.5 < int8["combine_logical_bytes"] / int8["combine_wire_bytes"] < 3.6
    assert int8["dispatch_wire_bytes"] > int8["combine_wire_bytes"]  # ids and weights travel with the rows
    shown = capsys.readouterr().out
    assert "unsharded" in shown and "tw.ExpertParallel(" in shown
    assert all(f"\n{wire}" in shown for wire in ("none ", "int8 ", "int4 "))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks 0: 1 to 8 are accepted"),
        (["--ranks", "100"], "--ranks 100: 1 to 8 are accepted, as every rank needs one of the experts"),
        (["--wire", "int8,int9"], "unknown wire format 'int9'; accepted: none, int8"),
        (["--text", "/nonexistent"], "--text /nonexistent: No such file or directory"),
        (["--text", "/dev/null"], "at least 2 bytes is needed, this has 0"),
        (["--json", "/nonexistent/figures"], "--json /nonexistent/figures: No such file or directory"),
        (["--timeout", "nan"], "--timeout nan: a number of seconds above 0"),
    ],
)
def test_unusable_arguments_are_one_line_of_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and error.count("\n") == 1


def test_arguments_are_checked_without_torch() -> None:
    code = """
import sys
sys.modules['torch'] = None
from thinwire.tools.cli import main
for arguments in (["--ranks", "9"], ["--wire", "int9"], ["--text", "/nonexistent"], ["--timeout", "0"]):
    assert main(["demo", *arguments]) == 2
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.count("thinwire: error: ") == 4, done.stderr


def test_the_models_sizes_are_what_the_command_says() -> None:
    config = load_tiny_moe().config
    assert (config.num_layers, config.num_experts, config.top_k, config.hidden_size) == (3, demo._EXPERTS, 2, 256)


@pytest.mark.exhaustive
def test_what_is_done_is_told_from_the_beginning(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(_held_out(600))
    command = [sys.executable, "-m", "thinwire", "demo", "--ranks", "2", "--wire", "int8", "--text", str(text)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "over 2 CPU ranks" in process.stdout.readline() + process.stdout.readline()
        lines = [process.stderr.readline() for _ in range(3)]
        assert process.poll() is None, "it was over before it told anything"
        shown, rest = process.communicate()
    told = [line.partition("] ")[2] for line in [*lines, *rest.splitlines(keepends=True)]]
    told = [line for line in told if line != "  still at it\n"]  # of what takes long here
    assert told[:2] == ["loading torch ...\n", "starting 2 ranks ...\n"]
    assert told[2] == "scoring with the unsharded model ...\n" and "scoring with int8 ...\n" in told
    assert process.returncode == 0 and "\nint8 " in shown
