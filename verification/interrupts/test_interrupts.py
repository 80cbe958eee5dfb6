"""An interrupt never makes a result wrong: the call is completed, or the communicator ends at that rank."""

from __future__ import annotations

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

from tests.helpers.speeds import exhaustive_but
from thinwire.testing import run_ranks
from verification.interrupts.__main__ import run_rank
from verification.interrupts.calls import KINDS, PLACES, judge, was_slow

NAMES = [place.name for place in PLACES]


@pytest.mark.parametrize("place", exhaustive_but(["all_gather int8"], NAMES))
def test_the_same_call_made_again_after_an_interrupt_gives_no_wrong_result(place: str) -> None:
    kinds = ["an event", "a signal, the peer late"] if place == NAMES[3] else list(KINDS)
    found = run_ranks(run_rank, 2, [place], kinds, 3, 7, timeout=300)[0]
    assert len(found) == 2 * len(kinds)
    wrong = {cell: key for cell, seen in found.items() for key in seen if key.startswith("WRONG")}
    assert not wrong and any(seen["ended"] for seen in found.values()), wrong


def test_what_must_not_be_is_found() -> None:
    right, ended = ["right"] * 4, ["right", "KeyboardInterrupt", *["ThinwireError: it has ended at this rank"] * 3]
    assert judge([right, right]) == "right" and judge([ended, ["right", *["PeerTimeout [0]"] * 3]]) == "ended"
    assert judge([[*right, "RoutingError: it is over"], right]) == "told"
    for odd in ([right, ["WRONG: [1.0] in place of [2.0]"]], [ended, ["right", *["PeerTimeout []"] * 3]]):
        assert judge(odd) == str(odd)


def test_a_trial_that_a_busy_machine_spoilt_is_told_from_one_that_an_earlier_one_spoilt() -> None:
    slow, gone, right = ["PeerTimeout []"] * 4, ["PeerTimeout [0]"] * 4, ["right"] * 4
    assert was_slow([slow, slow]) and was_slow([right, slow])
    assert not was_slow([right, right]) and not was_slow([slow, gone]) and not was_slow([["right", *slow], right])
    assert judge([slow, slow]) == str([slow, slow])  # every time
