"""What DeepEP's handles stand for here: an exchange plan, with the ids and weights of the rows that came."""

from __future__ import annotations

import os
from collections.abc import Sequence
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

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # or FP8 rows and their scales, which travel exactly
_DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
_FACTS = ("experts", "top_k", "columns of x", "dtype of x", "columns of scales", "room for rows")


class GroupOfBuffer:
    """The process group of a buffer, and the formats in transit. All ranks of the group make the buffer together.

    A dispatch with a handle and a combine with `topk_weights` are what clients' backward calls: both use `grad_wire`.

    Raises:
        ConfigMismatch: ranks have other formats.
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
        wires = {"wire": str(self.wire), "combine_wire": str(self.combine_wire), "grad_wire": str(self.grad_wire)}
        self.comm.require_same("deep_ep", wires)
        LOGGER.info("deep_ep: %s; numbers of SMs and QPs and sizes of buffers have no effect", wires)

    def destroy(self) -> None:
        """Does nothing: memory is the communicator's, which ends with its group."""


class Route:
    """Where the tokens of a dispatch go, and what came of their ids and weights. Collective.

    Args:
        in_rank: bool [tokens, ranks]; None: it follows from ids.
        ids, weights: [tokens, top_k]. Without weights they are 1.
        capacity: rows that `there` gives; 0: as many as come.
        most: how many tokens are accepted.

    Attributes:
        counts: int64 [ranks, ranks], on the host: rows from rank i to rank j.
        num_rows: that came here, by source rank, then token.
        source: int32 [num_rows], their tokens' numbers at their ranks.
        ids, weights: [num_rows, top_k], experts of this rank or -1, weights or 0; None, if no ids were given.
        expert_counts: int64 [experts of this rank], rows of each; None, if no ids were given.

    Raises:
        RoutingError: on a rank whose arguments do not fit, and then on all; or ranks' arguments do not agree.
        CapacityError: on all ranks, more rows come to a rank than there is room for.
    """

    def __init__(
        self, comm: Communicator, x: Rows, in_rank: torch.Tensor | None, num_experts: int, ids: torch.Tensor | None,
        weights: torch.Tensor | None, capacity: int = 0, most: int | None = None,
    ) -> None:  # fmt: skip
        problem = _problem(x, in_rank, num_experts, comm.size, ids, weights, most)
        told = torch.full((1, comm.size + len(_FACTS)), -1, device=comm.device)
        if problem is None:
            in_rank = ranks_of(ids, num_experts, comm.size) if in_rank is None else in_rank
            rows, scales = x if isinstance(x, tuple) else (x, None)
            facts = [
                num_experts, 0 if ids is None else ids.shape[1], rows.shape[1], _DTYPES.index(rows.dtype),
                0 if scales is None else scales.shape[1], capacity,
            ]  # fmt: skip
            told = torch.cat([in_rank.sum(0), torch.tensor(facts, device=comm.device)])[None]
        heard: Any = all_gather(told, wire="none", comm=comm)
        heard = heard.cpu()
        self.counts, everyones = heard[:, : comm.size], heard[:, comm.size :].tolist()
        refusing = [rank for rank, told in enumerate(everyones) if told[0] < 0]
        if refusing:
            raise RoutingError(problem or f"ranks {refusing} refused their arguments, and raised why; nothing was sent")
        for name, of_ranks in zip(_FACTS, zip(*everyones, strict=True), strict=True):
            if len({*of_ranks}) > 1:
                raise RoutingError(f"ranks disagree on the {name}: {list(of_ranks)}; nothing was sent")
        if capacity and capacity < (rows_of_one := int(self.counts.sum(0).max())):
            raise CapacityError(f"a rank gets {rows_of_one} rows and has room for {capacity}; nothing was sent")
        assert in_rank is not None
        self.in_rank, self.topk_idx, self.capacity = in_rank, ids, capacity
        self.num_experts, self.num_local = num_experts, num_experts // comm.size
        to_all, of_all = self.counts[comm.rank].tolist(), self.counts[:, comm.rank].tolist()
        self.num_rows = sum(of_all)
        self.plan = ExchangePlan(in_rank.t().nonzero()[:, 1], to_all, comm, num_rows=len(in_rank), recv_counts=of_all)
        words = [torch.arange(len(in_rank), dtype=torch.int32, device=in_rank.device)[:, None]]
        if ids is not None:
            weights = torch.ones_like(ids, dtype=torch.float32) if weights is None else weights.float()
            words += [ids.int(), weights.contiguous().view(torch.int32)]
        came: Any = self.plan.there(torch.cat(words, 1), wire=EXACT)
        self.source = came[:, 0].contiguous()
        self.ids = self.weights = self.expert_counts = None
        if ids is not None:
            local = came[:, 1 : 1 + ids.shape[1]].long() - comm.rank * self.num_local
            here = (local >= 0) & (local < self.num_local)
            self.ids = torch.where(here, local, -1)
            self.weights = torch.where(here, came[:, 1 + ids.shape[1] :].contiguous().view(torch.float32), 0)
            self.expert_counts = torch.bincount(local[here], minlength=self.num_local)

    def there(self, x: Rows, wire: WireFormat, async_op: bool = False) -> Any:
        """The rows that came, or their Work; with a capacity so many, those behind them zero."""
        if isinstance(x, tuple):
            return tuple(self.there(part, EXACT) for part in x)
        data = octets_of_fp8(x)
        out = data.new_zeros(self.capacity, *x.shape[1:]) if self.capacity else None
        came = self.plan.there(data, wire=wire, out=out, async_op=async_op)
        return came if async_op else came.view(x.dtype)  # type: ignore[union-attr]

    def home(self, rows: torch.Tensor, wire: WireFormat, bias: Any = None) -> torch.Tensor:
        """Sums at home of the rows that came, with one bias or two added."""
        if len(rows) not in (self.num_rows, self.capacity):
            accepted = f"{self.num_rows}, as many as came" + f", or {self.capacity}" * bool(self.capacity)
            raise RoutingError(f"combine got {len(rows)} rows; accepted: {accepted}")
        y: Any = self.plan.back(rows[: self.num_rows], wire=wire)
        biases = [each for each in (bias if isinstance(bias, tuple) else (bias,)) if each is not None]
        for each in biases:
            if each.shape != y.shape:
                raise RoutingError(f"bias is {list(each.shape)}; accepted: {list(y.shape)}")
        home: torch.Tensor = sum((each.float() for each in biases), y.float()).to(y.dtype) if biases else y
        return home

    def padded(self, ids: torch.Tensor | None, weights: torch.Tensor | None) -> tuple[Any, Any]:
        """Ids and weights of the rows that came, with -1 and 0 behind them up to the capacity."""
        behind = (0, 0, 0, max(self.capacity - self.num_rows, 0))
        return None if ids is None else pad(ids, behind, value=-1), None if weights is None else pad(weights, behind)


class Slots:
    """Where each expert's rows lie. A row that came has a slot for each of its experts here; slots are by expert.

    Args:
        starts: int64 [experts], each expert's first slot.

    Attributes:
        place, row, k: int64 [slots], of each slot its place, its row, and which of the row's ids it is for. They are in
            ascending row, then k; within an expert, places are in ascending row.
    """

    def __init__(self, route: Route, starts: torch.Tensor) -> None:
        assert route.ids is not None and route.expert_counts is not None
        self.num_rows, (self.row, self.k) = route.num_rows, (route.ids >= 0).nonzero().unbind(1)
        expert = route.ids[self.row, self.k]
        order = expert.argsort(stable=True)
        self.place = torch.empty_like(order)
        self.place[order] = torch.arange(len(order), device=order.device)
        self.place += (starts - (route.expert_counts.cumsum(0) - route.expert_counts))[expert]

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
    ranks = ids.div(max(num_experts // size, 1), rounding_mode="floor")
    found = torch.zeros(len(ids), size + 1, dtype=torch.bool, device=ids.device)
    return found.scatter_(1, torch.where((ids >= 0) & (ranks < size), ranks, size).long(), True)[:, :size]


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
    x, scales = x if isinstance(x, tuple) else (x, None)
    rows = len(x)
    if x.dim() != 2 or x.dtype not in _DTYPES:
        return f"x is {x.dtype} {list(x.shape)}; accepted: bfloat16, float32, float16 or FP8 [tokens, hidden]"
    if scales is not None and (scales.dim() != 2 or len(scales) != rows):
        return f"scales are {list(scales.shape)}; accepted: [{rows}, columns]"
    if scales is None and x.dtype.itemsize == 1:
        return f"x is {x.dtype} without scales; accepted: a pair of FP8 rows and scales"
    if most is not None and rows > most:
        return f"x has {rows} tokens; accepted: the most tokens of a rank that were announced, {most}"
    if ids is None and in_rank is None:
        return "a dispatch without a handle needs topk_idx or is_token_in_rank"
    if num_experts < 1 or num_experts % size:
        return f"there are {num_experts} experts; accepted: multiples of the group's {size} ranks"
    if in_rank is not None and (in_rank.shape != (rows, size) or in_rank.dtype != torch.bool):
        return f"is_token_in_rank is {in_rank.dtype} {list(in_rank.shape)}; accepted: bool [{rows}, {size}]"
    if ids is not None and (ids.dim() != 2 or len(ids) != rows or ids.is_floating_point()):
        return f"topk_idx is {ids.dtype} {list(ids.shape)}; accepted: int64 [{rows}, top_k]"
    if ids is not None and ids.numel() and int(ids.max()) >= num_experts:
        return f"topk_idx has {int(ids.max())}; accepted: -1 ... {num_experts - 1}"
    if ids is not None and weights is not None and weights.shape != ids.shape:
        return f"topk_weights is {list(weights.shape)}; accepted: {list(ids.shape)}"
    return None
