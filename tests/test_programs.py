"""Random programs: some of them here, 1,000 in `make soak`; and that a wrong result shows."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")


from tests.helpers.speeds import exhaustive_but
from thinwire.comm.call import Recorder
from thinwire.fused.staged import StagedExchange
from thinwire.moe.gradients import RoundGradients, Wants
from thinwire.moe.pulled import PulledRounds
from thinwire.testing import RankError, run_ranks
from thinwire.triton_kernels.round_layout import ABANDONED
from verification.soak.programs import draw_autocast_program, draw_program, run_program, run_programs, script

WORLDS = ("3 threads", "2 threads", "3 processes", "4 processes")
CALLS = {
    "all_reduce",
    "all_gather",
    "all_to_all_v",
    "exact exact_reduce",
    "dispatch",
    "refused",
    "waits",
    "backward of round",
    "parts by y",
    "rounds of an open round",
    "rounds of another layer",
    "programs with interrupts",
}


@pytest.mark.parametrize("ranks", exhaustive_but(["3 threads"], WORLDS))
def test_programs_give_what_plain_torch_gives(ranks: str) -> None:
    world, mode = int(ranks[0]), "thread" if "threads" in ranks else "process"
    seen = run_ranks(run_programs, world, list(range(15, 35)), mode=mode, timeout=240)
    assert not CALLS - {name for counted in seen for name in +counted}


@pytest.mark.parametrize("ranks", exhaustive_but([3], [2, 3, 4]))
def test_rounds_and_their_backward_under_autocast_give_what_plain_torch_gives(ranks: int) -> None:
    seen = run_ranks(run_programs, ranks, list(range(12)), draw_autocast_program, mode="thread", timeout=240)
    assert not {"backward of round", "parts by y", "waits"} - {name for counted in seen for name in +counted}
    drawn = "".join(line for seed in range(12) for line in draw_autocast_program(seed, ranks))
    assert all(name in drawn for name in ("'float16'", "'bfloat16'", "'direct'", "'staged'", "'two_level'", "False)"))


def test_a_wrong_element_shows_and_the_script_has_the_programs_lines() -> None:
    right = StagedExchange.arrivals

    def wrong(exchange: StagedExchange) -> Any:
        for piece in right(exchange):
            exchange.received[-1, 0] ^= 1
            yield piece

    with mock.patch.object(StagedExchange, "arrivals", wrong), pytest.raises(RankError) as caught:
        run_ranks(run_programs, 2, list(range(20)), mode="thread", timeout=240)
    assert "AssertionError" in str(caught.value) and "in the program of seed" in str(caught.value)
    text = script(5, 2, "thread")
    compile(text, "script", "exec")
    assert all(line in text for line in draw_program(5, 2))


TRAINS = ["g.make_trainer('trainer', 'world', 5, 1, 'direct')", "g.train('train', 'trainer', 0, 7, False, {})"]
PARTS = ["g.part('train', 'y', ['scales'])", "g.part('train', 'd.tokens', ['weights'])", "g.wait('train')"]


@pytest.mark.parametrize(
    ("where", "name", "faults", "shows"),
    [
        (RoundGradients, "_of_this_backward", [], "gradients of weights by d.tokens"),
        (Wants, "tag", [("another layer", 3)], "no error said .*of layer 3"),
        (PulledRounds, "close_round", [("an open round", 3)], "no error said .*left this round open"),
    ],
)
def test_what_the_library_leaves_out_shows(where: type, name: str, faults: list[Any], shows: str) -> None:
    """Router gradients that an earlier backward left, the number of a layer, and how a round was left open."""
    right, lines = getattr(where, name), [*TRAINS, *PARTS]
    lines[1] = lines[1].format(faults)

    def wrong(of: Any, *arguments: Any) -> Any:
        if name == "tag":
            return right(of)
        return right(of, arguments[0], ABANDONED) if name == "close_round" else None

    run_ranks(run_program, 2, lines, mode="thread")
    with mock.patch.object(where, name, wrong), pytest.raises(RankError, match=shows):
        run_ranks(run_program, 2, lines, mode="thread")


#: Rank 1 is interrupted at events all over a call, of which it has a hundred: some come when it has told its peer.
INTERRUPTS = [
    f"g.interrupt(1, {at}, 'KeyboardInterrupt', [\"g.host('counts', 'world', 7)\"])" for at in range(30, 150, 10)
]


def test_a_call_that_is_made_again_as_if_nothing_had_been_shows() -> None:
    assert run_ranks(run_program, 2, INTERRUPTS, mode="thread", timeout=240)[1]["of them ended"]
    # Its peer is to name rank 1, and names nobody, or itself.
    with mock.patch.object(Recorder, "ended_by"), pytest.raises(RankError, match=r"PeerTimeout \[0?\]"):
        run_ranks(run_program, 2, INTERRUPTS, mode="thread", timeout=240)
