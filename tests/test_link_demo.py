"""`thinwire demo --link`: what it counts and draws, and that it runs where there can be a link, also without root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from thinwire import ExpertParallel
from thinwire.comm import Communicator
from thinwire.moe.tiny import bits_per_byte, load_tiny_moe
from thinwire.testing import run_ranks
from thinwire.tools import link
from thinwire.tools.cli import main
from thinwire.tools.link_demo import LinkScore, format_chart, score_rank

WIRES = ["none", "int8", "int4"]


def _held_out(size: int) -> bytes:
    return (resources.files("thinwire.moe") / "tiny_moe" / "heldout.txt").read_bytes()[:size]


def test_rounds_are_counted_and_the_text_costs_what_it_does_in_one_process() -> None:
    text = _held_out(3000)
    first, second = run_ranks(score_rank, 2, text.decode("latin-1"), WIRES, None)
    assert first == second
    none, int8, int4 = (LinkScore(**score) for score in first)
    expected = bits_per_byte(load_tiny_moe(), text)
    assert abs(none.bits_per_byte / expected - 1) < 0.002 and abs(int8.bits_per_byte / expected - 1) < 0.005
    assert 0 < abs(int4.bits_per_byte / expected - 1) < 0.01
    # A row of 256 bfloat16 against records of 288 and 160 bytes; ids and weights travel with it on one leg.
    assert 1.6 < none.wire_bytes / int8.wire_bytes < 2 < none.wire_bytes / int4.wire_bytes < 3.2
    for score in (none, int8, int4):
        assert len(score.samples) == 15 and min(score.samples) <= score.seconds <= max(score.samples)


def test_the_chart_fits_a_terminal_and_its_bars_are_as_long_as_rounds_take() -> None:
    scores = [
        LinkScore("none", 12.3456, 123.4e6, 1.7809, [1.0]),
        LinkScore("int8+h64", 6.1728, 61.7e6, 1.781, [1.0]),
        LinkScore("int4", 0.0123456, 30e6, 1.7835, [1.0]),
    ]
    head, *lines = format_chart(scores, "#").splitlines()
    assert all(len(line) <= 80 for line in (head, *lines))
    assert [line.count("#") for line in lines] == [24, 12, 1]
    assert lines[1].split()[:5] == ["int8+h64", "6172.8", "2.00", "61.70", "1.7810"]


def _rank(comm: Communicator) -> int:
    return comm.rank


@pytest.fixture(scope="module")
def can_link() -> None:
    """Skips what needs a link where there can be none."""
    try:
        link.run_on_two_hosts(f"{__name__}:_rank", {}, rate="1gbit", timeout=120)
    except link.LinkUnavailable as reason:
        pytest.skip(f"there can be no limited link here: {reason}")


@pytest.fixture
def small_text(tmp_path: Path, can_link: None) -> Path:
    """A file."""
    (tmp_path / "text").write_bytes(_held_out(3000))
    return tmp_path / "text"


def _command(text: Path, figures: Path) -> list[str]:
    options = ["--link", "1Gbit", "--wire", "int8", "--text", str(text), "--json", str(figures)]
    return [sys.executable, "-m", "thinwire", "demo", *options]


@pytest.mark.exhaustive
def test_it_runs_over_a_link_and_exact_rounds_come_first(small_text: Path, tmp_path: Path) -> None:
    done = subprocess.run(_command(small_text, tmp_path / "figures"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "on two hosts, joined by 1Gbit/s, scoring 3,000 bytes" in done.stdout
    assert "\nnone (bf16) " in done.stdout and "\nint8 " in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.partition("\n\n")[2].splitlines())
    figures = json.loads((tmp_path / "figures").read_text())
    assert [score["wire"] for score in figures["scores"]] == ["none", "int8"] and figures["text_bytes"] == 3000
    assert figures["demo"] == "thinwire demo --link 1Gbit --wire none,int8"


def score_share(comm: Communicator, *, text: str) -> list[float]:
    """Bits per byte of a rank's share of the text, of the model on two levels: in the format `none`, and in int8."""
    config, length = load_tiny_moe().config, len(text) // comm.size
    share = text[comm.rank * length :][:length].encode("latin-1")
    sizes, bits = (config.num_experts, config.top_k, config.hidden_size, 16 * config.context), []
    for wire in ("none", "int8"):
        with ExpertParallel(comm, *sizes, wire=wire, transport="two_level") as ep:
            bits.append(bits_per_byte(load_tiny_moe(ep=ep), share))
    return bits


@pytest.mark.exhaustive
def test_on_two_hosts_of_two_ranks_the_text_costs_what_it_does_in_one_process(can_link: None) -> None:
    text, unsharded = _held_out(19_262), load_tiny_moe()
    expected = [bits_per_byte(unsharded, text[start:][:4815]) for start in range(0, 4 * 4815, 4815)]
    settings = {"text": text.decode("latin-1")}
    found = link.run_on_two_hosts(f"{__name__}:score_share", settings, rate="1gbit", ranks_per_host=2, timeout=120)
    none, int8 = (sum(bits) / 4 for bits in zip(*found, strict=True))
    assert none == pytest.approx(sum(expected) / 4, rel=1e-6)
    assert 0 < abs(int8 / none - 1) < 0.005


@pytest.mark.exhaustive
def test_a_user_who_is_not_root_has_a_link_too(small_text: Path, tmp_path: Path) -> None:
    as_user = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    tried = subprocess.run([*as_user, "unshare", "--user", "--map-root-user", "--net", "true"], capture_output=True)
    if tried.returncode:
        pytest.skip("there are no user namespaces here")
    done = subprocess.run([*as_user, *_command(small_text, tmp_path / "figures")], capture_output=True, text=True)
    assert done.returncode == 0 and "\nint8 " in done.stdout, done.stderr


def test_where_users_get_no_namespace_it_says_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for tool in link._TOOLS:
        (tmp_path / tool).write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2; exit 1\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["demo", "--link", "1Gbit"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("thinwire: error: a link needs network namespaces, and this system grants user 1000 none ")
    assert "Operation not permitted" in error and "sudo" in error and error.count("\n") == 1


def test_without_the_tools_it_names_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool, path: None if tool == "tc" else tool)
    assert main(["demo", "--link", "1Gbit"]) == 2
    assert capsys.readouterr().err == "thinwire: error: tc not found; they come with iproute2 and util-linux\n"
