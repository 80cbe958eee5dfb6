"""Which ranks are lost, as the ranks have agreed, and the text that explains it."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from thinwire.comm.exchange import name_ranks

LOOK_SECONDS = 0.02  # between two looks at who has come

_REPORT_SECONDS = 0.5
_LEAST_LOOKS = 10
_MORE_SECONDS = 1.0  # at most, for these


class ReportTime:
    """The time that ranks get to say whom they miss: half a second after the last that has.

    The clock runs on where a busy host lets nobody run, so there is also a least number of looks at who has come.
    """

    def __init__(self) -> None:
        self._came: object = None
        self._since, self._looks = 0.0, 0

    def is_over(self, came: object) -> bool:
        """Takes a look. `came` is equal to that of the look before if nobody has come since."""
        now = time.monotonic()
        if came != self._came:
            self._came, self._since, self._looks = came, now, 0
        self._looks += 1
        passed = now - self._since - _REPORT_SECONDS
        return passed > 0 and (self._looks > _LEAST_LOOKS or passed > _MORE_SECONDS)


class Verdict(NamedTuple):
    """The lost ranks, the same on every rank that asked, and the text that explains it."""

    ranks: tuple[int, ...]
    remark: str


def stronger(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Which of two verdicts on who is lost holds, on all that know of both.

    It is the one that leaves more ranks, or of two that leave as many, the one that leaves the lowest rank in which
    they differ.

    >>> stronger([1, 2], [0]), stronger([0, 1], [2, 3])
    ((0,), (2, 3))
    """
    return min(tuple(sorted({*one})), tuple(sorted({*other})), key=lambda lost: (len(lost), [-rank for rank in lost]))


def verdict_at(rank: int, ranks: Collection[int]) -> Verdict:
    """That `ranks` are lost, as `rank` tells it.

    >>> verdict_at(0, [1])
    Verdict(ranks=(1,), remark='the ranks agree that rank 1 is lost')
    """
    names = name_ranks(ranks)
    if not ranks:
        remark = (
            "nobody is lost: all ranks that were missed have answered, so they called something else, or with other "
            "sizes"
        )
    elif rank in ranks:
        remark = f"the others have given up {names}, which is this rank" + " among others" * (len(ranks) > 1)
    else:
        remark = f"the ranks agree that {names} {'are' if len(ranks) > 1 else 'is'} lost"
    return Verdict(tuple(sorted(ranks)), remark)
