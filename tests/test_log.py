"""The logger `thinwire`: each choice once, in the words of `explain`, and nothing unless it is asked for."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch

import thinwire as tw
from thinwire.testing import run_ranks


def _calls(comm: tw.Communicator) -> str:
    with tw.ExpertParallel(comm, 4, 1, 64, 3, wire="int8") as ep:
        for tokens in (1, 1, 3):
            d = ep.dispatch(torch.ones(tokens, 64), torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1))
            ep.combine(d.tokens, d)
        for _ in range(2):
            tw.all_reduce(torch.ones(64), comm=comm)
        return ep.explain()


def _told(records: list[logging.LogRecord], rank: int) -> list[str]:
    begin = f"rank {rank} of 2: "
    return [text.removeprefix(begin) for record in records if (text := record.getMessage()).startswith(begin)]


def test_each_choice_is_told_once_in_the_words_of_explain(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "thinwire"):
        explained = run_ranks(_calls, 2, mode="thread")
    assert {record.name for record in caplog.records} == {"thinwire"}
    for rank in range(2):
        told = _told(caplog.records, rank)
        for line in explained[rank].splitlines():
            fact = line.strip()
            if not fact.startswith(("communicator: ", "flight recorder: ", "transport: ")):
                assert sum(fact in text for text in told) == 1, fact
        beginnings = [text.partition(",")[0] for text in told if text.startswith("ExpertParallel: transport: ")]
        assert len(beginnings) == 1
        assert any(text.startswith("symmetric memory: threads heap") for text in told)


def test_the_staged_transport_and_why_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINWIRE_BACKEND", "torch")
    with caplog.at_level("INFO", "thinwire"):
        run_ranks(lambda comm: tw.all_reduce(torch.ones(64), comm=comm), 2, mode="thread")
    why = "all_to_all_v and collectives: staged, as it needs the numba backend"
    assert any(text.startswith(why) for text in _told(caplog.records, 1))


def test_experts_tell_which_product_they_take_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    experts = tw.GroupedExperts(2, 64, 64)
    odd = tw.GroupedExperts(2, 63, 64)
    with caplog.at_level("INFO", "thinwire"):
        for _ in range(3):
            experts(torch.ones(2, 64), torch.tensor([1, 1]))
            odd(torch.ones(2, 63), torch.tensor([1, 1]))
    told = [record.getMessage() for record in caplog.records]
    counts = torch.tensor([1, 1])
    assert told == [experts.explain(torch.ones(2, 64), counts), odd.explain(torch.ones(2, 63), counts)]


_PROGRAM = """
import torch, thinwire as tw
with tw.init(rank=0, world_size=1, device="cpu") as comm:
    tw.init(rank=0, world_size=1)
    comm.barrier()
"""


@pytest.mark.parametrize(("level", "lines"), [(None, 0), ("info", 1), ("debug", 2), ("error", 0)])
def test_the_environment_has_messages_on_standard_error_and_without_it_there_are_none(
    level: str | None, lines: int
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "THINWIRE_LOG"}
    environment |= {} if level is None else {"THINWIRE_LOG": level}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "" and done.stderr.count("\n") == lines, done.stderr
    assert (
        lines == 0 or "rank 0 of 1: rank and size: from the arguments rank and world_size; device: cpu" in done.stderr
    )


def test_a_level_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_LOG", "loud")
    with pytest.raises(tw.ArgumentError, match="THINWIRE_LOG is 'loud' .* expected one of debug, info"):
        run_ranks(lambda comm: None, 1, mode="thread")
