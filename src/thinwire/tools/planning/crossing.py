"""Counts what crosses between hosts and within them, on one level and on two, from routings that are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch

from thinwire.errors import ArgumentError
from thinwire.fields import parse_json, read_bytes
from thinwire.moe.routing import owners_in
from thinwire.tools.bench.options import Routing
from thinwire.tools.bench.traffic import Integers, expert_ids, expert_load, first_experts, skew_of, violation_of
from thinwire.tools.demo.tiny_moe import HELD_OUT_PATH, load_tiny_moe, text_windows
from thinwire.tools.planning.plan import Request

#: The share of tokens that go to a host, from which messages are dense: 1 / 0.9 times the bytes at most, but no counts,
#: for which a leg would wait as long as the network takes to answer.
DENSE = 0.9
_DRAWN = 1 << 24  # random numbers, one for each token and expert: less than a second


@dataclass(frozen=True)
class Crossing:
    """One leg on one level or two; bytes of messages, without signals and counts.

    Attributes:
        message_bytes: of a record that crosses between hosts; in dispatch with the token's ids, weights and number.
        token_bytes: that cross between hosts for a token, on average.
        sent, received: between hosts, by the rank that sends and the one that receives most; `imbalance`: by the mean.
        within: that a rank sends or receives within its host, at most; sums on two levels are float32 there.
    """

    name: str
    level: str
    wire: str
    message_bytes: int
    token_bytes: float
    sent: float
    received: float
    imbalance: float
    within: float


@dataclass(frozen=True)
class Crossings:
    """Both legs in the request's wire formats and in `none`, with one routing and one map of experts.

    Attributes:
        tokens, ranks, hosts: tokens counted, and to how many ranks and hosts one goes, on average, its own included.
        host_share: of tokens, those that go to a host, on average over hosts.
        form: of messages on two levels: "dense", every token to every host, or "compact", those that the host wants.
        imbalance: rows of the busiest rank's experts by the mean; `contiguous`: if ranks owned blocks of experts.
    """

    routing: str
    tokens: int
    ranks: float
    hosts: float
    host_share: float
    form: str
    imbalance: float
    contiguous: float
    legs: tuple[Crossing, ...]


def draw_ids(routing: str, experts: int, top_k: int, ranks: int) -> Integers:
    """[tokens, top_k] experts of tokens of all ranks, the same ones on every call.

    Args:
        routing: uniform, zipf:S, hot:SHARE or maxvio:V, drawn as `thinwire bench` does; or demo: what the packaged
            model does with its held-out text, in the layer that uses its experts least evenly.

    Raises:
        ArgumentError: another routing, or demo with other numbers of experts than the packaged model's.
    """
    if routing == "demo":
        model = load_tiny_moe()
        if (experts, top_k) != (model.config.num_experts, model.config.top_k):
            raise ArgumentError(f"routing is demo with {top_k} of {experts} experts, expected --experts 8 --top-k 2")
        text = HELD_OUT_PATH.read_bytes()
        with torch.no_grad():
            layers = model.forward_with_routing(text_windows(text, model.config.context)[0][0])[1]
        return max((one.topk_ids.numpy() for one in layers), key=lambda ids: violation_of(expert_load([ids], experts)))
    if routing.partition(":")[0] not in ("uniform", "zipf", "hot", "maxvio"):
        raise ArgumentError(f"routing is {routing!r}, expected demo, uniform, zipf:S, hot:SHARE or maxvio:V")
    tokens = -(-_DRAWN // (experts * ranks))
    return np.concatenate(expert_ids(Routing.parse(routing), tokens, experts, top_k, ranks))


def owners_of(expert_map: Sequence[int] | Path | None, experts: int, ranks: int) -> Integers:
    """[experts] the rank that owns each: as in a list, or a JSON file with one; contiguous blocks for None.

    Raises:
        ArgumentError, ThinwireError: it is no such list, or the file cannot be read.
    """
    if expert_map is None:
        return np.repeat(np.arange(ranks), np.diff(first_experts(experts, ranks)))
    given = parse_json(*read_bytes(expert_map)) if isinstance(expert_map, Path) else expert_map
    return np.array(owners_in(given, experts, ranks), dtype=np.int64)


def count_crossings(
    request: Request, routing: str = "uniform", expert_map: Sequence[int] | Path | None = None
) -> Crossings:
    """Counts what a round of `max_tokens` tokens on each rank sends, if all ranks route alike.

    Raises:
        ArgumentError, ThinwireError: what these refuse; hosts that do not divide the ranks; an invariant request.
    """
    ranks, hosts, each = request.ranks, request.hosts, request.ranks // request.hosts
    if request.invariant or ranks % hosts:
        raise ArgumentError(
            f"invariant is {request.invariant}, hosts {hosts}: expected False, and a divisor of {ranks}"
        )
    ids = draw_ids(routing, request.experts, request.top_k, ranks)
    owners, blocks = (owners_of(owned, request.experts, ranks) for owned in (expert_map, None))
    reached = np.zeros((len(ids), ranks), dtype=bool)
    reached[np.arange(len(ids))[:, None], owners[ids]] = True
    to_ranks, to_hosts = reached.mean(0), reached.reshape(len(ids), hosts, each).any(2).mean(0)
    own = np.arange(ranks) // each
    of_host = to_ranks.reshape(hosts, each).sum(1)[own]
    within = max((of_host - to_ranks).max(), to_ranks.max() * (each - 1))
    # Rows that a token of another host brings to a rank and to its host, and ranks whose rows a rank spreads within its
    # host: on two levels one of each host, so that each forwarder takes its share of what its host gets.
    levels = {"one level": (to_ranks, of_host, 1), "two levels": (to_hosts[own] / each, to_hosts[own], hosts)}
    legs = {}
    for name, level, wire in product(("dispatch", "combine"), list(levels)[:hosts], (None, "none")):
        settings, (to_rank, to_host, spread) = request.settings("staged", wire), levels[level]
        rows = [float((to_rank.sum() - to_host).max()), float(to_rank.max() * (ranks - each)), float(within * spread)]
        record = settings.wire if name == "dispatch" else settings.combine_wire
        message = inside = record.row_bytes(request.hidden, request.dtype)
        if name == "dispatch":
            message = settings.message_bytes(request.dtype)
        else:
            rows[:2], inside = rows[1::-1], 4 * request.hidden
        if level == "one level":
            inside = message
        mean = float(to_rank.sum()) * (ranks - each) / ranks
        sent, received, moved = (request.max_tokens * number for number in rows)
        sizes = mean * message, sent * message, received * message, max(rows[:2]) / mean if mean else 1.0
        legs[name, level, record] = Crossing(name, level, str(record), message, *sizes, moved * inside)
    load, share = expert_load([ids], request.experts), float(to_hosts.mean())
    imbalance, contiguous = (skew_of(np.bincount(owned, load, ranks).tolist()) for owned in (owners, blocks))
    form, reaches = "dense" if share >= DENSE else "compact", (float(to_ranks.sum()), float(to_hosts.sum()))
    return Crossings(routing, len(ids), *reaches, share, form, imbalance, contiguous, tuple(legs.values()))
