"""What cannot be measured is refused in one line, before torch is imported; routings give the rows that they say."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import numpy as np
import pytest

from thinwire.errors import ArgumentError
from thinwire.tools.bench.options import Routing, Settings, sweep
from thinwire.tools.bench.traffic import expert_ids, expert_load, row_counts, skew_of, violation_of
from thinwire.tools.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all_to_al"], "operation all_to_al: accepted are all_to_all_v, all_gather"),
        (["-b", "64Q"], "-b 64Q: a number of bytes is needed"),
        (["-b", "0"], "-b 0: a number of bytes is needed, at least 1"),
        (["-b", "2M", "-e", "1M"], "-b 2M is more than -e 1M"),
        (["-f", "2", "-i", "1K"], "-f 2 and -i 1K were given; expected one of them"),
        (["-i", "0"], "-i 0: a number of bytes is needed, at least 1"),
        (["-b", "1", "-e", "1M", "-i", "1K"], "-i 1K: more than 256 sizes from 1 to 1M; use a larger one"),
        (["--plot", "/proc/x"], "--plot /proc/x: No such file or directory; name a path that can be written to"),
        (["--json", "/proc/x/y"], "--json /proc/x: No such file or directory; name a path that can be written to"),
        (["-f", "1"], "-f 1: a factor above 1"),
        (["-f", "inf"], "-f inf: a factor above 1 is needed, at most 1e+06"),
        (["-b", "1", "-e", "1T", "-f", "1.0001"], "-f 1.0001: more than 256 sizes from 1 to 1T"),
        (["-e", "9" * 400], "a number of bytes is needed, at least 1 and at most 1024T"),
        (["--ranks", "1025"], "--ranks 1025: 1 to 1024 are accepted"),
        (["--experts", "65537"], "--experts 65537: 1 to 65536 are accepted"),
        (["-n", "0"], "-n 0: at least 1"),
        (["-w", "-1"], "-w -1: at least 0"),
        (["--wire", "int9"], "unknown wire format 'int9'"),
        (["--wire", ","], "--wire ',': at least one is needed"),
        (["--transport", "fast"], "--transport fast: accepted are direct, staged"),
        (["--tokens", "1,x"], "--tokens 1,x: whole numbers are needed"),
        (["--tokens", "1,0"], "--tokens 0: at least 1"),
        (["--top-k", "9", "--experts", "8"], "--top-k 9: 1 to 8 are accepted"),
        (["--routing", "hot:1.5"], "--routing hot:1.5: accepted are uniform, zipf:S"),
        (["--baselines", "group,mine"], "--baselines mine: accepted are all, none, group, mpi, copy"),
        (["--ranks", "0"], "--ranks 0: 1 to 1024 are accepted"),
        (["--timeout", "0"], "--timeout 0: seconds above 0"),
    ],
)
def test_unusable_options_are_one_line_of_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_a_typo_is_found_without_torch() -> None:
    code = "import sys; from thinwire.tools.cli import main; main(['bench', 'typo']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n" and "operation typo" in done.stderr


def test_a_launchers_ranks_are_not_overruled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "--ranks", "2"]) == 2
    assert "--ranks 2: torchrun (RANK, WORLD_SIZE) says 1" in capsys.readouterr().err


def test_sizes_grow_to_the_last_one() -> None:
    assert sweep("1", "10", 2) == [1, 2, 4, 8] and sweep("1", "3", 1.1) == [1, 2, 3] and sweep("8", "8", 2) == [8]
    assert sweep("8", "30", increment="10") == [8, 18, 28] and sweep("64K", "1M") == [1 << 16, 1 << 20]


@pytest.mark.parametrize("command", ["bench", "plan"])
def test_help_fits_into_100_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "102")  # argparse leaves two of them free
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as printed:
        main([command, "--help"])
    assert max(map(len, printed.getvalue().splitlines())) <= 100


def test_settings_are_refused_wherever_they_come_from() -> None:
    with pytest.raises(ValueError, match="--hidden 0"):
        Settings(hidden=0)


def test_every_row_is_dealt_to_somebody_and_a_single_one_changes_ranks() -> None:
    for ranks in (2, 3, 4):
        assert row_counts(Routing("uniform"), 1, ranks).diagonal().tolist() == [0] * ranks
        for rows in (0, 1, 5, 8):
            counts = row_counts(Routing("uniform"), rows, ranks)
            assert (counts.sum(1) == rows).all() and (counts.max(1) - counts.min(1) <= 1).all()


def test_a_hot_rank_gets_its_share_and_zipf_falls() -> None:
    hot = row_counts(Routing("hot", 0.7), 100, 4)
    assert hot[:, 0].tolist() == [70] * 4 and skew_of(hot.sum(0).tolist()) == pytest.approx(2.8)
    received = row_counts(Routing("zipf", 1.0), 1200, 4).sum(0).tolist()
    assert received == sorted(received, reverse=True) and received[0] == pytest.approx(2 * received[1], rel=0.02)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "ranks", "violation"),
    [(16, 64, 8, 4, 0.2), (500, 64, 8, 4, 1), (500, 64, 8, 2, 4), (33, 10, 3, 3, 7 / 3), (7, 12, 12, 2, 0)],
)
def test_the_busiest_expert_exceeds_the_mean_as_it_should_and_the_others_are_even(
    tokens: int, experts: int, top_k: int, ranks: int, violation: float
) -> None:
    ids = expert_ids(Routing("maxvio", violation), tokens, experts, top_k, ranks)
    assert [own.shape for own in ids] == [(tokens, top_k)] * ranks
    for own in ids:
        ordered = np.sort(own)
        assert (ordered[:, 1:] != ordered[:, :-1]).all() and own.min() >= 0 and own.max() < experts
    load = expert_load(ids, experts)
    mean = tokens * ranks * top_k / experts
    assert abs(violation_of(load) - violation) <= 0.5 / mean
    rest = np.delete(load, load.argmax())
    assert rest.max() - rest.min() <= 1
    by_rank = [int((own == load.argmax()).sum()) for own in ids]
    assert max(by_rank) - min(by_rank) <= 1


def test_a_violation_that_no_routing_has_is_refused() -> None:
    with pytest.raises(ArgumentError, match="with --top-k 4 of 12 experts at most maxvio:2 is possible"):
        expert_ids(Routing("maxvio", 2.1), 9, 12, 4, 3)
    with pytest.raises(ArgumentError, match="with 3 ranks at most maxvio:2 is possible"):
        row_counts(Routing("maxvio", 2.1), 9, 3)


def test_tokens_name_different_experts_as_popular_as_they_are_said_to_be() -> None:
    loads = {}
    for routing in (Routing("uniform"), Routing("hot", 0.9), Routing("zipf", 1.5)):
        ids = expert_ids(routing, 500, 64, 2, 4)
        assert all((np.sort(own)[:, 0] != np.sort(own)[:, 1]).all() and own.min() >= 0 for own in ids)
        assert not np.array_equal(ids[0], ids[1])
        loads[routing.kind] = expert_load(ids, 64)
        assert loads[routing.kind].sum() == 4 * 500 * 2
    by_rank = {kind: skew_of(load.reshape(4, 16).sum(1).tolist()) for kind, load in loads.items()}
    assert by_rank["uniform"] < 1.1 and by_rank["hot"] == pytest.approx(3.6, abs=0.2)
    assert loads["zipf"].max() > 5 * loads["uniform"].max()
