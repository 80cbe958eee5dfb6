"""What DeepEP's handles stand for: an exchange plan, with the ids and weights of the rows that came."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import embedding_bag, pad

from thinwire.comm import Communicator, as_communicator
from thinwire.errors import ArgumentError, CapacityError, RoutingError
from thinwire.fused.all_gather import all_gather
from thinwire.fused.codec import resolve_wire
from thinwire.fused.exchange_plan import ExchangePlan
from thinwire.log import LOGGER
from thinwire.wire import WireFormat

#: Formats of tokens, sums and gradients, by commas; those that are left out have their defaults.
VARIABLE = "THINWIRE_DEEP_EP_WIRES"
EXACT = WireFormat("none")
topk_idx_t = torch.int64

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # or FP8 rows and their scales, which travel as they are


class GroupOfBuffer:
    """The group of a buffer, whose ranks all make it, and the formats of what travels.

    A dispatch with a handle and a combine with `topk_weights` are what clients' backward calls: both use `grad_wire`.
    """

    installed: Sequence[str | None] = (None, None, None)  # by `install`

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if group is None:
            raise NotImplementedError("a buffer over an MPI communicator; thinwire takes a torch.distributed group")
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.comm = as_communicator(group)
        named = [each.strip() or None for each in os.environ.get(VARIABLE, "").split(",")]
        if len(named) > 3:
            raise ArgumentError(f"{VARIABLE} is {os.environ[VARIABLE]!r}; accepted: up to three formats, by commas")
        wire, combine, grad = (
            chosen or other for chosen, other in zip(self.installed, [*named, None, None][:3], strict=True)
        )
        self.wire, self.grad_wire = resolve_wire(wire), resolve_wire(grad or "none")
        self.combine_wire = self.wire if combine is None else resolve_wire(combine)
        LOGGER.info(
            "deep_ep over thinwire: dispatch %s, combine %s, gradients %s; numbers of SMs and QPs and sizes of buffers "
            "have no effect", self.wire, self.combine_wire, self.grad_wire,
        )  # fmt: skip

    def destroy(self) -> None:
        """Does nothing: memory is the communicator's, which ends with its group."""


class Route:
    """Where the tokens of a dispatch go, and what came of their ids and weights. Collective.

    Args:
        in_rank: bool [tokens, ranks]; None: it follows from ids.
        ids, weights: [tokens, top_k]. Without weights they are 1.
        most: how many tokens are accepted.

    Attributes:
        counts: int64 [ranks, ranks], on the host: rows from rank i to rank j.
        num_rows: that came here, by source rank, then token.
        source: int32 [num_rows], their tokens' numbers at their ranks.
        ids, weights: [num_rows, top_k], experts of this rank or -1, weights or 0; None, if no ids were given.

    Raises:
        RoutingError: on a rank whose arguments do not fit, and then on all.
    """

    def __init__(
        self, comm: Communicator, x: Rows, in_rank: torch.Tensor | None, num_experts: int,
        ids: torch.Tensor | None, weights: torch.Tensor | None, most: int | None = None,
    ) -> None:  # fmt: skip
        problem = _problem(x, in_rank, num_experts, comm.size, ids, weights, most)
        counts = torch.full((1, comm.size), -1, device=comm.device)
        if problem is None:
            in_rank = ranks_of(ids, num_experts, comm.size) if in_rank is None else in_rank
            counts = in_rank.sum(0).view(1, -1)
        everyones: Any = all_gather(counts, wire="none", comm=comm)
        self.counts: torch.Tensor = everyones.cpu()
        refusing = (self.counts[:, 0] < 0).nonzero().flatten().tolist()
        if refusing:
            raise RoutingError(problem or f"ranks {refusing} refused their arguments, and raised why; nothing was sent")
        assert in_rank is not None
        self.in_rank, self.topk_idx = in_rank, ids
        self.num_experts, self.num_local = num_experts, num_experts // comm.size
        to_all, of_all = self.counts[comm.rank].tolist(), self.counts[:, comm.rank].tolist()
        rows, self.num_rows = in_rank.t().nonzero()[:, 1], sum(of_all)
        self.plan = ExchangePlan(rows, to_all, comm, num_rows=len(in_rank), recv_counts=of_all)
        words = [torch.arange(len(in_rank), dtype=torch.int32, device=in_rank.device)[:, None]]
        if ids is not None:
            weights = torch.ones_like(ids, dtype=torch.float32) if weights is None else weights.float()
            words += [ids.int(), weights.contiguous().view(torch.int32)]
        came: Any = self.plan.there(torch.cat(words, 1), wire=EXACT)
        self.source = came[:, 0].contiguous()
        self.ids = self.weights = None
        if ids is not None:
            local = came[:, 1 : 1 + ids.shape[1]].long() - comm.rank * self.num_local
            here = (local >= 0) & (local < self.num_local)
            self.ids = torch.where(here, local, -1)
            self.weights = torch.where(here, came[:, 1 + ids.shape[1] :].contiguous().view(torch.float32), 0)

    def there(self, x: Rows, wire: WireFormat, capacity: int = 0, async_op: bool = False) -> Any:
        """The rows that came, or work of theirs; with a capacity so many, those behind them zero."""
        if isinstance(x, tuple):
            return tuple(self.there(part, EXACT, capacity) for part in x)
        most = int(self.counts.sum(0).max())
        if capacity and most > capacity:  # all ranks know, and none sends
            raise CapacityError(f"a rank gets {most} rows and has room for {capacity}; pass a larger number of tokens")
        data = octets_of_fp8(x)
        out = data.new_zeros(capacity, *x.shape[1:]) if capacity else None
        came = self.plan.there(data, wire=wire, out=out, async_op=async_op)
        return came if async_op else came.view(x.dtype)  # type: ignore[union-attr]

    def home(self, rows: torch.Tensor, wire: WireFormat, bias: Any = None) -> torch.Tensor:
        """Sums at home, of as many of these rows as came, with one bias or two added."""
        y: Any = self.plan.back(rows[: self.num_rows], wire=wire)
        for each in bias if isinstance(bias, tuple) else (bias,):
            y = y if each is None else (y.float() + each.float()).to(y.dtype)
        home: torch.Tensor = y
        return home

    def weights_home(self, weights: torch.Tensor | None) -> torch.Tensor | None:
        """[rows that came, top_k] -> [tokens, top_k], added up exactly."""
        return None if weights is None else self.home(weights.float(), EXACT)

    def padded(self, capacity: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Ids and weights, with -1 and 0 behind them."""
        behind = (0, 0, 0, max(capacity - self.num_rows, 0))
        return None if self.ids is None else pad(self.ids, behind, value=-1), (
            None if self.weights is None else pad(self.weights, behind)
        )


class Slots:
    """Where the rows of each expert lie, by expert, then row: one for each row that came and each of its experts here.

    Args:
        starts: gives of the int64 counts [experts] each expert's first slot.

    Attributes:
        counts: int64 [experts].
        place, row, k: int64 [slots], each slot's place, and whose it is; in ascending row, then k.
    """

    def __init__(self, route: Route, starts: Callable[[torch.Tensor], torch.Tensor]) -> None:
        assert route.ids is not None
        self.num_rows, (self.row, self.k) = route.num_rows, (route.ids >= 0).nonzero().unbind(1)
        expert = route.ids[self.row, self.k]
        self.counts = torch.bincount(expert, minlength=route.num_local)
        order = expert.argsort(stable=True)
        self.place = torch.empty_like(order)
        self.place[order] = torch.arange(len(order), device=order.device)
        self.place += (starts(self.counts) - (self.counts.cumsum(0) - self.counts))[expert]

    def spread(self, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Puts each row at its slots of `out`, whose other slots stay as they are."""
        octets_of_fp8(out).index_copy_(0, self.place, octets_of_fp8(rows)[self.row])
        return out

    def sums(self, x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of each row's slots of x, times weights [rows, top_k] if given: float32, in ascending k."""
        terms = x[self.place].float()
        if weights is not None:
            terms *= weights[self.row, self.k, None]
        if not len(terms):
            return terms.new_zeros(self.num_rows, *x.shape[1:])
        starts = torch.searchsorted(self.row, torch.arange(self.num_rows, device=terms.device))
        # index_add_ would add in another order on CUDA in every run.
        return embedding_bag(torch.arange(len(terms), device=terms.device), terms, starts, mode="sum")


def ranks_of(ids: torch.Tensor | None, num_experts: int, size: int) -> torch.Tensor:
    """bool [tokens, ranks]: whether a token has an expert there."""
    assert ids is not None
    ranks = ids.div(num_experts // size, rounding_mode="floor")
    found = torch.zeros(len(ids), size + 1, dtype=torch.bool, device=ids.device)
    return found.scatter_(1, torch.where((ids >= 0) & (ranks < size), ranks, size), True)[:, :size]


def aligned(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """Counts rounded up to multiples."""
    return -(-counts // alignment) * alignment


def octets_of_fp8(x: torch.Tensor) -> torch.Tensor:
    """FP8 as bytes, as torch can do little with it; other tensors as they are."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _problem(
    x: Rows, in_rank: torch.Tensor | None, num_experts: int, size: int, ids: torch.Tensor | None,
    weights: torch.Tensor | None, most: int | None,
) -> str | None:  # fmt: skip
    """What does not fit of a dispatch's arguments, and what is accepted."""
    rows = len(x[0] if isinstance(x, tuple) else x)
    if most is not None and rows > most:
        return f"x has {rows} tokens; accepted: the most tokens of a rank that were announced, {most}"
    if ids is None and in_rank is None:
        return "a dispatch without a handle needs topk_idx or is_token_in_rank"
    if num_experts < 1 or num_experts % size:
        return f"there are {num_experts} experts; accepted: multiples of the group's {size} ranks"
    if in_rank is not None and in_rank.shape != (rows, size):
        return f"is_token_in_rank is {list(in_rank.shape)}; accepted: [{rows}, {size}]"
    if ids is not None and (ids.dim() != 2 or len(ids) != rows or ids.is_floating_point()):
        return f"topk_idx is {ids.dtype} {list(ids.shape)}; accepted: int64 [{rows}, top_k]"
    if ids is not None and ids.numel() and int(ids.max()) >= num_experts:
        return f"topk_idx has {int(ids.max())}; accepted: -1 ... {num_experts - 1}"
    if ids is not None and weights is not None and weights.shape != ids.shape:
        return f"topk_weights is {list(weights.shape)}; accepted: {list(ids.shape)}"
    return None
