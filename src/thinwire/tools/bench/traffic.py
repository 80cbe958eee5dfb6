"""Who sends how many rows to whom, and which experts a token names: the same arithmetic on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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


def read_matrix(routing: Routing, ranks: int) -> npt.NDArray[np.float64]:
    """Rows from rank i to rank j, out of a CSV or .npy file.

    Raises:
        ArgumentError: what is in the file cannot be such a matrix for so many ranks.
    """
    file = Path(routing.file)
    try:
        matrix = np.load(file) if file.suffix == ".npy" else np.loadtxt(file, delimiter=",", ndmin=2)
        matrix = matrix.astype(np.float64)
    except (ValueError, OSError, EOFError, TypeError) as error:
        raise ArgumentError(f"--routing {routing}: {error}; numbers between commas, or .npy, are needed") from error
    if matrix.shape != (ranks, ranks):
        shape = " x ".join(map(str, matrix.shape))
        raise ArgumentError(f"--routing {routing}: a matrix of {shape}, where {ranks} ranks need {ranks} x {ranks}")
    if not np.isfinite(matrix).all() or (matrix < 0).any() or not matrix.any():
        raise ArgumentError(f"--routing {routing}: rows must be numbers of at least 0, and not all of them 0")
    return matrix


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
    if routing.kind == "matrix":
        matrix = read_matrix(routing, ranks)
        return np.rint(matrix * (rows / matrix.sum(1).max())).astype(np.int64)
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
    """[tokens, top_k] experts that each rank's tokens name, different ones, -1 for none.

    Under `zipf` the popularity of experts goes with a power of their place in an order that is drawn once; under `hot`
    those of rank 0 have the share of it. Under `maxvio` one expert, drawn once, gets V more rows than the mean, and all
    others are dealt out evenly, in an order drawn once. `matrix` gives rows from rank i to rank j in its proportions,
    the largest entry being all tokens; a token goes to a rank once, whatever the number of its experts there.

    Raises:
        ArgumentError: a matrix that needs more ranks for a token than it has experts, or a rank without experts; a
            violation larger than that of an expert that every token names.
    """
    first = first_experts(experts, ranks)
    if routing.kind == "matrix":
        matrix = read_matrix(routing, ranks)
        wanted = np.rint(matrix * (tokens / matrix.max())).astype(np.int64)
        return [_ids_of_rows(routing, row, tokens, top_k, first) for row in wanted]
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
    """What the busiest gets, by the mean, of which `most` is everything."""
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


def _ids_of_rows(routing: Routing, rows: Integers, tokens: int, top_k: int, first: list[int]) -> Integers:
    for receiver in np.flatnonzero(rows).tolist():
        if first[receiver] == first[receiver + 1]:
            raise ArgumentError(
                f"--routing {routing}: rank {receiver} owns none of {first[-1]} experts, but the matrix sends it rows"
            )
    if rows.sum() > tokens * top_k:
        raise ArgumentError(
            f"--routing {routing}: a rank's {tokens} tokens would go to {int(rows.sum())} places, more than their "
            f"{top_k} experts each allow; a larger --top-k is needed"
        )
    owned = [int(count) for count in np.diff(first)]
    targets: list[list[int]] = [[] for _ in range(tokens)]
    place = 0
    # One after the other, round and round: no token has two places more than another.
    for rank, count in enumerate(rows.tolist()):
        for step in range(count):
            targets[(place + step) % tokens].append(rank)
        place += count
    ids = np.full((tokens, top_k), -1, dtype=np.int64)
    for token, ranks in enumerate(targets):
        free = top_k
        for number, rank in enumerate(ranks):
            share = min(-(-free // (len(ranks) - number)), owned[rank])
            start = token % owned[rank]
            chosen = [first[rank] + (start + step) % owned[rank] for step in range(share)]
            ids[token, top_k - free : top_k - free + share] = chosen
            free -= share
    return ids


def rows_between(ids: list[Integers], experts: int) -> Integers:
    """[ranks, ranks] tokens of rank i that name an expert of rank j."""
    ranks = len(ids)
    first = first_experts(experts, ranks)
    return np.array(
        [[((own >= first[j]) & (own < first[j + 1])).any(1).sum() for j in range(ranks)] for own in ids], dtype=np.int64
    )


def expert_load(ids: list[Integers], experts: int) -> Integers:
    """[experts] rows of each expert, of all ranks' tokens."""
    every = np.concatenate([own.ravel() for own in ids])
    return np.bincount(every[every >= 0], minlength=experts).astype(np.int64)


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
