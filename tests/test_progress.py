"""What a long command shows meanwhile."""

from __future__ import annotations

import io
import re
import time

import pytest

from thinwire.testing import run_ranks
from thinwire.tools import progress
from thinwire.tools.progress import Progress, Report, print_over


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _wait_for(text: str, out: io.StringIO) -> None:
    deadline = time.monotonic() + 30
    while text not in out.getvalue():
        assert time.monotonic() < deadline, out.getvalue()
        time.sleep(0.01)


def test_lines_have_the_seconds_appear_while_ranks_work_and_are_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_REPEAT_SECONDS", 0.01)
    out = io.StringIO()
    with Progress(out, time.monotonic()) as shown:
        shown.stage("starting")

        def rank(comm: object) -> None:
            shown.report.stage("measuring", 2)
            shown.report.step()
            shown.report.now("first calls of gloo")
            _wait_for("still at it, 1 of 2: first calls of gloo\n", out)
            shown.report.stage("writing")
            _wait_for("writing\n", out)

        run_ranks(rank, 1, mode="thread")
        _wait_for("still at it\n", out)  # of an earlier stage nothing is left
    told = re.sub(r"^(\[ *\d+\.\d s\] +still at it.*\n)+", "", out.getvalue(), flags=re.MULTILINE)
    assert re.fullmatch(r"\[ *\d+\.\d s\] starting\n\[ *\d+\.\d s\] measuring\n\[ *\d+\.\d s\] writing\n", told)


def test_a_terminal_has_one_line_with_a_bar_no_wider_than_it_which_goes_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = _Terminal()
    with Progress(out, time.monotonic()) as shown:
        shown.report.stage("scoring", 3)
        shown.report.step()
        _wait_for(f"[{'#' * 10}{'.' * 20}] scoring  0 s", out)
        shown.report.now("x" * 100)
        _wait_for("x  0 s", out)
    assert "\n" not in out.getvalue() and out.getvalue().endswith("\r\033[K")
    assert max(map(len, out.getvalue().split("\r\033[K"))) == 59


def test_a_printed_line_replaces_that_of_progress_where_both_are_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for out, err, printed in (
        (_Terminal(), _Terminal(), "\r\033[Ktext\n"),
        (_Terminal(), io.StringIO(), "text\n"),  # as under mpirun
        (io.StringIO(), _Terminal(), "text\n"),
    ):
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", err)
        print_over("text")
        assert out.getvalue() == printed


def test_stages_need_no_file_and_others_than_the_first_rank_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.tempfile, "TemporaryDirectory", None)
    out = io.StringIO()
    with Progress(out, time.monotonic()) as shown:
        shown.stage("looking")
        Report(None).stage("scoring")
    assert out.getvalue().endswith("] looking\n")
