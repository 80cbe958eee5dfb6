"""Who is lost, as the ranks have agreed, and what there is to say of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from thinwire.comm.exchange import name_ranks

REPORT_SECONDS = 0.5  # that ranks get to say whom they miss, once one of them has


class Verdict(NamedTuple):
    """Who is lost, the same on every rank that asked, and what there is to say of it."""

    ranks: tuple[int, ...]
    remark: str


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
