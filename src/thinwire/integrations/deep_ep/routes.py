"""What both buffers have, and what their handles stand for: an exchange plan, and where experts' rows lie."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import embedding_bag

from thinwire.comm import Communicator, as_communicator
from thinwire.comm.tensors import is_int
from thinwire.errors import ArgumentError, CapacityError, RoutingError
from thinwire.fused.codec import resolve_wire
from thinwire.fused.exchange_plan import ExchangePlan
from thinwire.fused.ops import all_gather
from thinwire.integrations.deep_ep.events import EventOverlap, done
from thinwire.log import LOGGER
from thinwire.moe.plan import merge_repeated_experts
from thinwire.moe.received import check_capacity
from thinwire.wire import WireFormat

#: Formats of tokens, sums and gradients, by commas; those that are left out have their defaults.
VARIABLE = "THINWIRE_DEEP_EP_WIRES"
EXACT = WireFormat("none")
topk_idx_t = torch.int64

MaybeTensor = torch.Tensor | None
Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # or FP8 rows and their scales, which travel exactly
_DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (None, torch.float32, torch.int32, torch.uint8, torch.float16, torch.bfloat16)  # None: there are none
_INTEGERS = torch.int64, torch.int32
_FACTS = (
    "experts", "top_k", "columns of x", "dtype of x", "columns of scales", "dtype of scales", "room for rows (-1: any)"
)  # fmt: skip


class AnyBuffer:
    """The process group of a buffer, and the formats in transit. Ranks make it together, with the same formats.

    A dispatch with a handle and a combine with `topk_weights` are what clients' backward calls: both use `grad_wire`.
    Handles can be used any number of times, in any order. What is accepted without effect is DeepEP's.
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
        wire, combine, grad = (a or b for a, b in zip(self.installed, [*named, None, None][:3], strict=True))
        self.wire, self.grad_wire = resolve_wire(wire), resolve_wire(grad or "none")
        self.combine_wire = resolve_wire(combine or self.wire)
        wires = {"wire": str(self.wire), "combine_wire": str(self.combine_wire), "grad_wire": str(self.grad_wire)}
        self.comm.require_same("deep_ep", wires)
        LOGGER.info("deep_ep: %s; numbers of SMs and QPs and sizes of buffers have no effect", wires)

    @staticmethod
    def capture() -> EventOverlap:
        """What `previous_event` takes."""
        return done()

    def destroy(self) -> None:
        """Does nothing: memory is the communicator's, which ends with its group."""

    def _room(self, tokens: Any) -> Any:
        """For rows of all ranks with so many tokens each; what is no number, as it is."""
        return tokens * self.group_size if is_int(tokens, 0) else tokens

    def _home(self, route: Route, x: torch.Tensor, weights: MaybeTensor, bias: Any) -> tuple[torch.Tensor, MaybeTensor]:
        """Sums at home of rows, with one bias or two, and of weights."""

        def summed(rows: torch.Tensor, wire: WireFormat) -> Any:
            return route.plan.back(rows[: route.num_rows] if len(rows) == route.capacity else rows, wire=wire)

        biases = [each for each in (bias if isinstance(bias, tuple) else (bias,)) if each is not None]
        y = summed(x, self.combine_wire if weights is None else self.grad_wire)
        for each in biases:
            if each.shape != y.shape:
                raise RoutingError(f"bias is {list(each.shape)}; accepted: {list(y.shape)}")
        y = sum(biases, y.float()).to(y.dtype) if biases else y
        return y, None if weights is None else summed(weights.float(), EXACT)


class Route:
    """Where the tokens of a dispatch go, and what came of their ids and weights. Making it is collective.

    Rows that came are by source rank, then token. If padded, as many as `room` are given; those behind have ids of -1.
    Whatever was passed on this rank, its peers are told, and all ranks raise RoutingError.

    Args:
        ids, weights: [tokens, top_k]. Without weights they are 1.
        in_rank: bool [tokens, ranks]; None: it follows from ids.
        room: how many rows may come to a rank.
        once: whether each expert has so many slots, so that a token may name it once only.
        made: gives rows and scales of x, once that was checked.
        alignment, per_expert: of experts' rows, and how many each gets.
    """

    made: Any = None  # what `made` gave, for who asked for it to take
    topk_idx: Any  # as it was passed
    ids: Any = None  # int64 [rows, top_k], experts of this rank or -1; None without ids, as what follows
    weights: Any = None  # float32 [rows, top_k], 0 where ids are -1
    expert_counts: Any = None  # int64 [experts of this rank], rows of each

    def __init__(
        self, comm: Communicator, x: Rows, num_experts: int, ids: MaybeTensor, weights: MaybeTensor,
        in_rank: MaybeTensor = None, room: int | None = None, padded: bool = True, once: bool = False,
        made: Callable[[], Rows] | None = None, alignment: int = 1, per_expert: MaybeTensor = None,
    ) -> None:  # fmt: skip
        problem: Exception | None = None
        told = torch.full((comm.size + len(_FACTS),), -1, device=comm.device)
        try:
            _check(comm, x, in_rank, num_experts, ids, weights, room, alignment, per_expert)
            chosen: Any = ids
            if once and room is not None and (merge_repeated_experts(chosen, chosen)[0] != chosen.clamp(min=-1)).any():
                raise RoutingError("topk_idx names an expert twice for a token; accepted in a fixed shape: once")
            if made is not None:
                x = self.made = made()
            in_rank = ranks_of(ids, num_experts, comm.size) if ids is not None and in_rank is None else in_rank
            assert in_rank is not None
            rows, scales = x if isinstance(x, tuple) else (x, None)
            facts = [
                num_experts, 0 if ids is None else ids.shape[1], rows.shape[1], _DTYPES.index(rows.dtype),
                0 if scales is None else scales.shape[1], _SCALES.index(None if scales is None else scales.dtype),
                -1 if room is None else room,
            ]  # fmt: skip
            told = torch.cat([in_rank.sum(0), torch.tensor(facts, device=comm.device)])
        except Exception as error:  # of any kind, as peers wait for what is told
            problem = error
        heard: Any = all_gather(told[None], wire="none", comm=comm)
        self.counts, of_all = heard.cpu().split([comm.size, len(_FACTS)], 1)  # [i, j]: rows from rank i to rank j
        refusing = (of_all[:, 0] < 0).nonzero().flatten().tolist()
        if refusing:
            others = f"ranks {refusing} refused their arguments, and raised why; nothing was sent"
            raise RoutingError(str(problem or others)) from problem
        for name, of_ranks in zip(_FACTS, of_all.t().tolist(), strict=True):
            if len({*of_ranks}) > 1:
                raise RoutingError(f"ranks disagree on the {name}: {of_ranks}; nothing was sent")
        if room is not None and room < (most := int(self.counts.sum(0).max())):
            raise CapacityError(f"a rank gets {most} rows and has room for {room}; nothing was sent")
        assert in_rank is not None
        self.in_rank, self.topk_idx, self.capacity = in_rank, ids, room or 0 if padded else 0
        self.num_experts, self.num_local = num_experts, num_experts // comm.size
        sent, received = self.counts[comm.rank].tolist(), self.counts[:, comm.rank].tolist()
        self.num_rows = sum(received)
        self.plan = ExchangePlan(in_rank.t().nonzero()[:, 1], sent, comm, num_rows=len(in_rank), recv_counts=received)
        words = [torch.arange(len(in_rank), dtype=torch.int32, device=in_rank.device)[:, None]]
        if ids is not None:
            weights = torch.ones_like(ids, dtype=torch.float32) if weights is None else weights.float()
            words += [ids.int(), weights.contiguous().view(torch.int32)]
        came = self.there(torch.cat(words, 1), EXACT, behind=-1)
        self.source = came[:, 0].contiguous()  # int32 [rows], their tokens' numbers at their ranks
        if ids is not None:
            local = came[:, 1 : 1 + ids.shape[1]].long() - comm.rank * self.num_local
            here = (local >= 0) & (local < self.num_local)
            self.ids = torch.where(here, local, -1)
            self.weights = torch.where(here, came[:, 1 + ids.shape[1] :].contiguous().view(torch.float32), 0)
            self.expert_counts = torch.bincount(local[here], minlength=self.num_local)

    def there(self, x: Rows, wire: WireFormat, async_op: bool = False, behind: int = 0) -> Any:
        """The rows that came, or their Work; with a capacity so many, with `behind` in those behind them."""
        if isinstance(x, tuple):
            return tuple(self.there(part, EXACT) for part in x)
        data = octets_of_fp8(x)
        out = data.new_full((self.capacity, *x.shape[1:]), behind) if self.capacity else None
        came: Any = self.plan.there(data, wire=wire, out=out, async_op=async_op)
        return came if async_op else came.view(x.dtype)

    def lay_out(self, starts: torch.Tensor) -> None:
        """Gives each row a slot for each of its experts here, of an expert from its start on, in ascending row.

        Then `row`, `k`, `expert` and `place` are of each slot its row, which of its ids, that expert, and where it is.
        """
        self.row, self.k = (self.ids >= 0).nonzero().unbind(1)
        self.expert = self.ids[self.row, self.k]
        order = self.expert.argsort(stable=True)
        self.place = (starts - (self.expert_counts.cumsum(0) - self.expert_counts))[self.expert]
        self.place[order] += torch.arange(len(order), device=order.device)

    def sums(self, x: torch.Tensor, weights: MaybeTensor = None) -> torch.Tensor:
        """The sum of each row's slots of x, times weights [rows, top_k] if given: float32, in ascending k."""
        terms = x.index_select(0, self.place).float()
        if weights is not None:
            terms *= weights[self.row, self.k, None]
        if not len(terms):
            return terms.new_zeros(self.num_rows, *x.shape[1:])
        starts = torch.searchsorted(self.row, torch.arange(self.num_rows, device=terms.device))
        # index_add_ would add in another order on CUDA in every run.
        return embedding_bag(torch.arange(len(terms), device=terms.device), terms, starts, mode="sum")

    def spread(self, rows: torch.Tensor, size: int) -> torch.Tensor:
        """So many rows, each of these at its slots, the others zero."""
        out = rows.new_zeros(size, *rows.shape[1:])
        out[self.place] = octets_of_fp8(rows).index_select(0, self.row).view(rows.dtype)
        return out


def ranks_of(ids: torch.Tensor, num_experts: int, size: int) -> torch.Tensor:
    """bool [tokens, ranks]: whether a token has an expert there."""
    ranks = ids // max(num_experts // size, 1)
    found = torch.zeros(len(ids), size + 1, dtype=torch.bool, device=ids.device)
    return found.scatter_(1, torch.where((ranks >= 0) & (ranks < size), ranks, size).long(), True)[:, :size]


def aligned(counts: Any, alignment: int) -> Any:
    """A count or a tensor of counts, rounded up to multiples."""
    return -(-counts // alignment) * alignment


def octets_of_fp8(x: torch.Tensor) -> torch.Tensor:
    """FP8 as bytes, as torch can do little with it; other tensors as they are."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _check(
    comm: Communicator, x: Any, in_rank: MaybeTensor, num_experts: int, ids: MaybeTensor, weights: MaybeTensor,
    room: int | None, alignment: int, per_expert: MaybeTensor,
) -> None:  # fmt: skip
    """Raises a ThinwireError for what does not fit of a dispatch's arguments, which says what is accepted."""
    is_pair = isinstance(x, tuple) and len(x) == 2 and x[1] is not None
    size, (x, scales) = comm.size, x if is_pair else (x, None)
    comm.check_device("x", x)
    names = "scales", "is_token_in_rank", "topk_idx", "topk_weights", "num_tokens_per_expert"
    for name, tensor in zip(names, (scales, in_rank, ids, weights, per_expert), strict=True):
        if tensor is not None:
            comm.check_device(name, tensor)
    rows, problem = len(x) if x.dim() else 0, None
    if x.dim() != 2 or x.dtype not in _DTYPES:
        problem = f"x is {x.dtype} {list(x.shape)}; accepted: bfloat16, float32, float16 or FP8 [tokens, hidden]"
    elif scales is not None and (scales.dim() != 2 or len(scales) != rows or scales.dtype not in _SCALES):
        problem = f"scales are {scales.dtype} {list(scales.shape)}; accepted: float32 or int32 [{rows}, columns]"
    elif scales is None and x.dtype.itemsize == 1:
        problem = f"x is {x.dtype} without scales; accepted: a pair of FP8 rows and scales"
    elif not is_int(num_experts, 1) or num_experts % size:
        problem = f"there are {num_experts!r} experts; accepted: multiples of the group's {size} ranks"
    elif not is_int(alignment, 1):
        problem = f"expert_alignment is {alignment!r}; accepted: an int of at least 1"
    elif in_rank is not None and (in_rank.shape != (rows, size) or in_rank.dtype != torch.bool):
        problem = f"is_token_in_rank is {in_rank.dtype} {list(in_rank.shape)}; accepted: bool [{rows}, {size}]"
    elif ids is None and in_rank is None:
        problem = "a dispatch without a handle needs topk_idx or is_token_in_rank"
    elif ids is not None and (ids.dim() != 2 or len(ids) != rows or ids.dtype not in _INTEGERS):
        problem = f"topk_idx is {ids.dtype} {list(ids.shape)}; accepted: int64 [{rows}, top_k]"
    elif ids is not None and ids.numel() and int(ids.max()) >= num_experts:
        problem = f"topk_idx has {int(ids.max())}; accepted: -1 ... {num_experts - 1}"
    elif ids is not None and weights is not None and (weights.shape != ids.shape or weights.is_complex()):
        problem = f"topk_weights is {weights.dtype} {list(weights.shape)}; accepted: floats {list(ids.shape)}"
    if problem is not None:
        raise RoutingError(problem)
    if room is not None:
        check_capacity(room, x.shape[1] * x.itemsize * x.is_cpu)
