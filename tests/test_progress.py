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


def test_lines_have_the_seconds_and_appear_while_ranks_work() -> None:
    out = io.StringIO()
    with Progress(out, time.monotonic()) as shown:
        shown.stage("starting")

        def rank(comm: object) -> None:
            shown.report.stage("scoring", 2)
            _wait_for("scoring", out)

        run_ranks(rank, 1, mode="thread")
    assert re.fullmatch(r"\[ *\d+\.\d s\] starting\n\[ *\d+\.\d s\] scoring\n", out.getvalue())


def test_a_long_stage_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_REPEAT_SECONDS", 0.01)
    out = io.StringIO()
    with Progress(out, time.monotonic()) as shown:
        shown.report.stage("scoring", 4)
        shown.report.step()
        _wait_for("still at it, 1 of 4\n", out)


def test_what_a_long_stage_does_now_is_told_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_REPEAT_SECONDS", 0.01)
    out = io.StringIO()
    with Progress(out, time.monotonic()) as shown:
        shown.report.stage("measuring", 2)
        shown.report.now("first calls of gloo")
        _wait_for("still at it, 0 of 2: first calls of gloo\n", out)
        shown.report.stage("writing")
        _wait_for("still at it\n", out)  # of an earlier stage nothing is left


def test_a_terminal_has_one_line_with_a_bar_which_goes_at_the_end() -> None:
    out = _Terminal()
    with Progress(out, time.monotonic()) as shown:
        shown.report.stage("scoring", 3)
        shown.report.step()
        _wait_for(f"[{'#' * 10}{'.' * 20}] scoring  0 s", out)
    assert "\n" not in out.getvalue() and out.getvalue().endswith("\r\033[K")


def test_a_line_is_no_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = _Terminal()
    with Progress(out, time.monotonic()) as shown:
        shown.report.stage("measuring", 3)
        shown.report.now("x" * 100)
        _wait_for("x  0 s", out)
    lines = out.getvalue().split("\r\033[K")
    assert max(map(len, lines)) == 59 and any(line.endswith("x  0 s") for line in lines)


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


def test_stages_need_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.tempfile, "TemporaryDirectory", None)
    out = io.StringIO()
    with Progress(out, time.monotonic()) as shown:
        shown.stage("looking")
    assert out.getvalue().endswith("] looking\n")


def test_others_than_the_first_rank_tell_nothing() -> None:
    Report(None).stage("scoring")
    Report(None).step()
