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
    rank j is sent a share that goes with `(j + 1) ** -S`, under `hot` rank 0 gets the share.

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
    elif routing.kind == "hot" and ranks > 1:
        shares = np.full(ranks, (1 - routing.value) / (ranks - 1))
        shares[0] = routing.value
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
    those of rank 0 have the share of it. `matrix` gives rows from rank i to rank j in its proportions, the largest
    entry being all tokens; a token goes to a rank once, whatever the number of its experts there.

    Raises:
        ArgumentError: a matrix that needs more ranks for a token than it has experts, or a rank without experts.
    """
    first = first_experts(experts, ranks)
    if routing.kind == "matrix":
        matrix = read_matrix(routing, ranks)
        wanted = np.rint(matrix * (tokens / matrix.max())).astype(np.int64)
        return [_ids_of_rows(routing, row, tokens, top_k, first) for row in wanted]
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


def skew_of(received: Sequence[int]) -> float:
    """Rows of the busiest rank by the mean over ranks.

    >>> skew_of([4, 4]), skew_of([6, 2])
    (1.0, 1.5)
    """
    return max(received) * len(received) / sum(received)
