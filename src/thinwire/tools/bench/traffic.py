"""Who sends how many rows to whom, and which experts a token names: the same arithmetic on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from thinwire.errors import ArgumentError
from thinwire.tools.bench.options import Routing

Integers = npt.NDArray[np.int64]
_SEED = 20260101


def first_experts(experts: int, ranks: int) -> list[int]:
    """Where each rank's block of experts begins, and the end: the first `experts % ranks` ranks own one more.

    >>> first_experts(10, 4)
    [0, 3, 6, 8, 10]
    """
    return [rank * (experts // ranks) + min(rank, experts % ranks) for rank in range(ranks + 1)]


def row_counts(routing: Routing, rows: int, ranks: int) -> Integers:
    """[ranks, ranks] rows that rank i sends to rank j, where the busiest sender has `rows`.

    What does not divide goes to the ranks after the sender, so that a single row always changes ranks. Under `zipf`
    rank j is sent a share that goes with `(j + 1) ** -S`, under `hot` rank 0 gets the share, and under `maxvio` V more
    than the mean.

    >>> row_counts(Routing("uniform"), 7, 3).tolist()
    [[2, 3, 2], [2, 2, 3], [3, 2, 2]]
    >>> row_counts(Routing("hot", 0.7), 10, 4)[1].tolist()
    [7, 1, 1, 1]
    """
    if routing.kind == "zipf":
        shares = np.arange(1, ranks + 1, dtype=np.float64) ** -routing.value
    elif routing.kind in ("hot", "maxvio") and ranks > 1:
        share = routing.value if routing.kind == "hot" else _violating(routing, ranks, f"{ranks} ranks") / ranks
        shares = np.full(ranks, (1 - share) / (ranks - 1))
        shares[0] = share
    else:
        shares = np.ones(ranks)
    counts = np.tile(np.floor(rows * shares / shares.sum() + 1e-9).astype(np.int64), (ranks, 1))
    for sender in range(ranks):
        for place in range(rows - int(counts[sender].sum())):
            counts[sender, (sender + 1 + place) % ranks] += 1
    return counts


def expert_ids(routing: Routing, tokens: int, experts: int, top_k: int, ranks: int) -> list[Integers]:
    """[tokens, top_k] different experts that each rank's tokens name.

    Under `zipf` the popularity of experts goes with a power of their place in an order that is drawn once; under `hot`
    those of rank 0 have the share of it. Under `maxvio` one expert, drawn once, gets V more rows than the mean, and all
    others are dealt out evenly, in an order drawn once.

    Raises:
        ArgumentError: a violation larger than that of an expert that every token names.
    """
    first = first_experts(experts, ranks)
    if routing.kind == "maxvio":
        return _violating_ids(routing, tokens, experts, top_k, ranks)
    popularity = np.ones(experts)
    if routing.kind == "zipf":
        order = np.random.default_rng(_SEED).permutation(experts)
        popularity[order] = np.arange(1, experts + 1, dtype=np.float64) ** -routing.value
    elif routing.kind == "hot" and first[1] < experts:
        popularity[: first[1]] = routing.value / first[1]
        popularity[first[1] :] = (1 - routing.value) / (experts - first[1])
    drawn = []
    for rank in range(ranks):
        # The largest of log(popularity) plus Gumbel noise are a sample without replacement.
        noise = np.random.default_rng([_SEED, rank, tokens]).gumbel(size=(tokens, experts))
        keys = -(np.log(popularity) + noise)
        drawn.append(np.argpartition(keys, top_k - 1, axis=1)[:, :top_k].astype(np.int64))
    return drawn


def _violating(routing: Routing, most: float, of: str) -> float:
    """Returns what the busiest gets, by the mean; `most` would be everything."""
    if routing.value > most - 1:
        raise ArgumentError(f"--routing {routing}: with {of} at most maxvio:{most - 1:g} is possible")
    return 1 + routing.value


def _violating_ids(routing: Routing, tokens: int, experts: int, top_k: int, ranks: int) -> list[Integers]:
    by_mean = _violating(routing, experts / top_k, f"--top-k {top_k} of {experts} experts")
    busiest, *others = np.random.default_rng(_SEED).permutation(experts).tolist()
    every = tokens * ranks
    rows = min(every, round(by_mean * every * top_k / experts))
    names_busiest = np.diff(np.arange(every + 1) * rows // every).astype(bool)
    # Each token goes on where the one before ended, so its others are different ones.
    counts = top_k - names_busiest
    places = (np.cumsum(counts) - counts)[:, None] + np.arange(top_k)
    ids = np.array(others or [busiest], dtype=np.int64)[places % max(1, len(others))]
    ids[names_busiest, -1] = busiest
    return list(ids.reshape(ranks, tokens, top_k))


def rows_between(ids: list[Integers], experts: int) -> Integers:
    """[ranks, ranks] tokens of rank i that name an expert of rank j."""
    ranks = len(ids)
    first = first_experts(experts, ranks)
    return np.array(
        [[((own >= first[j]) & (own < first[j + 1])).any(1).sum() for j in range(ranks)] for own in ids], dtype=np.int64
    )


def expert_load(ids: list[Integers], experts: int) -> Integers:
    """[experts] rows of each expert, of all ranks' tokens."""
    return np.bincount(np.concatenate([own.ravel() for own in ids]), minlength=experts).astype(np.int64)


def violation_of(load: Integers) -> float:
    """MaxVio: rows of the busiest expert by the mean over experts, less 1.

    >>> violation_of(np.array([4, 4])), violation_of(np.array([6, 2]))
    (0.0, 0.5)
    """
    return float(load.max() * len(load) / load.sum() - 1)


def skew_of(received: Sequence[int]) -> float:
    """Rows of the busiest rank by the mean over ranks.

    >>> skew_of([4, 4]), skew_of([6, 2])
    (1.0, 1.5)
    """
    return max(received) * len(received) / sum(received)
