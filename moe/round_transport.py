"""What expert parallelism asks of a transport, and what it refuses on any."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from thinwire.comm.call import Call
from thinwire.comm.exchange import name_ranks
from thinwire.comm.tensors import is_plain
from thinwire.errors import CapacityError, LaneError, RoutingError, ThinwireError
from thinwire.moe.config import ParallelConfig
from thinwire.moe.gradients import describe_tag
from thinwire.triton_kernels.round_layout import DTYPE_BITS, DTYPE_CODES, LEFT_OPEN
from thinwire.wire import Traffic

OVERTAKEN = "a later dispatch took its lane; end it before that, or use another lane (lanes=)"
FORGOTTEN = (
    "a round whose x or topk_weights wants a gradient was dispatched and not combined, and the next dispatch drops it: "
    "its experts add nothing, and get no gradients; combine() it before that, or abandon() it"
)
CLOSED = "its ExpertParallel was closed, or rebuilt, since"
_REFUSALS = ("", "x", "topk_ids", "topk_weights", "more tokens than max_tokens")  # what a rank refuses, by its number
MOST_REFUSALS = len(_REFUSALS)
_MOST_ACCEPTED = 1024  # shapes and dtypes that are remembered


def refusal_of(error: Exception) -> int:
    """What an error of dispatch's arguments is about, as a number for the peers; 0: something else."""
    if isinstance(error, CapacityError):
        return _REFUSALS.index("more tokens than max_tokens")
    named = re.match(r"(x|topk_ids|topk_weights)\b", str(error))
    return _REFUSALS.index(named[1]) if named else 0


def refused_by(refusals: Mapping[int, int]) -> str:
    """What the peers of ranks that refused are told, whatever numbers these sent."""
    said = {rank: _REFUSALS[number] for rank, number in refusals.items() if 0 < number < MOST_REFUSALS}
    why = ", ".join(f"{what} on rank {rank}" for rank, what in said.items())
    return (
        f"{name_ranks(refusals)} refused what dispatch was given there{f' ({why})' if why else ''}, and raised why; no "
        "rank's tokens were taken, and all ranks may go on"
    )


def named_legs(backward: bool) -> tuple[tuple[str, str], str]:
    """What errors call the legs on a lane, by DISPATCH and COMBINE, and what a tag there numbers."""
    if backward:
        return ("backward of combine", "backward of dispatch"), "round"
    return ("dispatch", "combine"), "layer"


class OnLane:
    """What a lane is in use for: a Dispatched, which may be read and combined, or a Started, to be finished."""

    _how_over: str  # once it is over, for who tries to go on with it

    @property
    def _wants_gradients(self) -> bool:
        """Whether it is a round of which x or topk_weights wants a gradient."""
        return False


class Rounds:
    """The rounds of one transport, which was chosen for a reason; a `Transport`."""

    name: str  # the transport's
    on_gpu = False  # whether calls return before the device is done, of which the host then knows nothing
    tagged_by = "layer"  # what a tag numbers
    takers: Sequence[int] | None = None  # over two levels: of each rank, who of this host takes its rows here

    def __init__(self, config: ParallelConfig, reason: str, lack: type[ThinwireError] | None = None) -> None:
        self.config = config
        self.reason, self.lack = reason, lack
        self.closed = False
        self.open_rounds: list[OnLane | None] = [None] * config.lanes
        self.rounds_begun = [0] * config.lanes
        self.places_of_ids = config.places_of_ids()  # made here, as it is not while a graph is captured
        self._accepted: set[object] = set()  # shapes and dtypes of tokens that were dispatched

    def begin(
        self, lane: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, tag: int
    ) -> Callable[[], Any]:
        """Begins a round on a lane on which none is open, whose arguments were checked.

        What is returned waits for the peers' part, and gives a `Dispatched`. `tag` is a `Wants.tag`; ranks with
        different ones raise RoutingError here or there, and nothing is taken.
        """
        raise NotImplementedError

    def refuse(self, lane: int, why: int) -> None:
        """Tells the peers, who are in a dispatch or come to it, that this rank's arguments were: a `refusal_of`."""
        raise NotImplementedError

    def is_open(self, lane: int) -> bool:
        """Whether a round was dispatched on the lane and not combined."""
        raise NotImplementedError

    def close_round(self, lane: int, end: int) -> None:
        """Ends the open round without sums of this rank: ABANDONED, or LEFT_OPEN for the next dispatch on the lane."""
        raise NotImplementedError

    def leave_open(self, lane: int) -> None:
        """Before a dispatch on a lane with an open round: numbers of calls match those of peers that combine it."""
        if self.is_open(lane):
            with self.call("abandon", lane):
                left, self.open_rounds[lane] = self.open_rounds[lane], None
                if left is not None:
                    left._how_over = OVERTAKEN
                    if left._wants_gradients:
                        warnings.warn(f"lane {lane}: {FORGOTTEN}", RuntimeWarning, 2)
                self.close_round(lane, LEFT_OPEN)
        self.open_rounds[lane] = None

    def call(
        self, name: str, lane: int, shape: Sequence[int] | None = None, dtype: object = None, ahead: int = 0
    ) -> Call:
        """Begins a round's end; or a dispatch, with the round that is `ahead`."""
        config = self.config
        wire = config.wire if ahead else config.combine_wire
        return config.comm.call(name, shape, dtype, wire, self.name, self.place(lane, ahead))

    def call_backward(self, name: str, shape: Sequence[int], dtype: torch.dtype, wire: object, place: Any) -> Call:
        """Begins a leg of backward of the round that had this place."""
        if self.closed:
            raise LaneError(f"{name}: the ExpertParallel of this round was closed, or rebuilt, since")
        return self.config.comm.call(name, shape, dtype, wire, self.name, place)

    def place(self, lane: int, ahead: int = 0) -> tuple[object, ...]:
        """Details of the flight recorder: the lane, and the number of its round; `ahead` of the next."""
        return "lane", lane, "epoch", self.rounds_begun[lane] + ahead

    def describe(self) -> str:
        """What it is and why, for `explain`."""
        raise NotImplementedError

    def crossing(self, d: Any, phase: int) -> Traffic:
        """What a leg of a round sends to other hosts, over two levels."""
        return Traffic(0, 0, 0)

    @property
    def lost(self) -> tuple[int, ...] | None:
        """The ranks that a wait of its own named; None where it did not, or leaves waiting to the communicator."""
        return None

    @property
    def memory_bytes(self) -> int:
        """Bytes held between calls."""
        return 0

    def check(self) -> None:
        """Raises what went wrong on the device since the last call."""

    def close(self) -> None:
        """Gives back what it holds."""
        self.closed = True

    def check_tokens(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        """What `dispatch` refuses before anything is sent."""
        config = self.config
        device = config.comm.device
        if is_plain(x, device) and is_plain(topk_ids, device) and is_plain(topk_weights, device):
            # Shapes and dtypes are looked at once: a decode step is over in microseconds.
            kind = x.shape, x.dtype, topk_ids.shape, topk_ids.dtype, topk_weights.shape, topk_weights.dtype
            if kind not in self._accepted:
                self._check_kinds(x, topk_ids, topk_weights)
                if len(self._accepted) >= _MOST_ACCEPTED:
                    self._accepted.clear()
                self._accepted.add(kind)
        else:
            self._check_kinds(x, topk_ids, topk_weights)
        # On CUDA the ids' range would cost a synchronisation: the direct kernels look at it, and `check` tells.
        if self.on_gpu or not topk_ids.numel():
            return
        lowest, highest = (int(bound) for bound in topk_ids.aminmax())
        if lowest < -1 or highest >= config.num_experts:
            raise RoutingError(
                f"topk_ids runs from {lowest} to {highest}; experts are 0 ... {config.num_experts - 1}, and -1 "
                "stands for none"
            )

    def _check_kinds(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        config = self.config
        check_device = config.comm.check_device
        check_device("x", x)
        check_device("topk_ids", topk_ids)
        check_device("topk_weights", topk_weights)
        dtypes = config.row_dtypes if config.dtype is None else (config.dtype,)
        given = x.shape
        if x.dtype not in dtypes or len(given) != 2 or given[1] != config.hidden_size:
            accepted = config.describe_dtypes() if config.dtype is None else config.dtype
            remedy = ": x.flatten(0, -2) makes it so" if len(given) > 2 and given[-1] == config.hidden_size else ""
            raise RoutingError(
                f"x is {x.dtype} {list(x.shape)}; {accepted} [tokens, {config.hidden_size}] is needed{remedy}"
            )
        tokens = given[0]
        if tokens > config.max_tokens:
            raise CapacityError(
                f"{tokens} tokens were passed; this ExpertParallel accepts at most max_tokens={config.max_tokens}: "
                f"make a larger one, ExpertParallel(..., max_tokens={tokens}), on all ranks"
            )
        shape = (tokens, config.top_k)
        if topk_ids.dtype not in (torch.int32, torch.int64) or topk_ids.shape != shape:
            raise RoutingError(
                f"topk_ids is {topk_ids.dtype} {list(topk_ids.shape)}; int32 or int64 {list(shape)} is needed"
            )
        if not topk_weights.is_floating_point() or topk_weights.shape != shape:
            raise RoutingError(
                f"topk_weights is {topk_weights.dtype} {list(topk_weights.shape)}; floats {list(shape)} are needed"
            )


def left_open(lane: int, ranks: Iterable[int]) -> RoutingError:
    """What a combine comes to if ranks have left the round open."""
    return RoutingError(
        f"lane {lane}: {name_ranks(ranks)} left this round open and went on to the next dispatch, so the sums of the "
        "experts there are missing; the round is over, and all ranks may go on"
    )


def disagreement(
    lane: int, refusals: Mapping[int, int], told: Mapping[int, tuple[int, int]], tagged_by: str, max_tokens: int
) -> RoutingError:
    """What ranks that do not dispatch alike get.

    Args:
        refusals: of the ranks that refused what they were given, if any, a `refusal_of`.
        told: of each rank, its number of tokens, and the word of their dtype and tag.
        tagged_by: see `named_legs`.
    """
    if refusals:
        return RoutingError(f"lane {lane}: {refused_by(refusals)}")
    names, described = {code: str(dtype) for dtype, code in DTYPE_CODES.items()}, []
    for rank, (tokens, word) in told.items():
        dtype = names.get(word & (1 << DTYPE_BITS) - 1, "an unknown dtype")
        described.append(f"rank {rank} {tokens} tokens of {dtype} with {describe_tag(word >> DTYPE_BITS, tagged_by)}")
    return RoutingError(
        f"lane {lane}: all ranks of a round need the same dtype and {tagged_by}, at most {max_tokens} tokens, and must "
        f"want the same gradients, those without tokens too; they dispatched: {', '.join(described)}"
    )
