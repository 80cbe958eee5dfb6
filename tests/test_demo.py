"""The demo's promises, on the shipped model and a part of the held-out text."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from thinwire.cli import main


def _held_out(size: int) -> bytes:
    return (resources.files("thinwire.moe") / "tiny_moe" / "heldout.txt").read_bytes()[:size]


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
        (["--ranks", "0"], "--ranks 0: at least 1"),
        (["--wire", "int8,int9"], "unknown wire format 'int9'; accepted: none, int8"),
        (["--text", "/nonexistent"], "/nonexistent"),
    ],
)
def test_unusable_arguments_are_one_line_of_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and error.count("\n") == 1
