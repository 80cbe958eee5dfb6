"""Gradients of a round: combine's backward is a dispatch of dy, and dispatch's backward is a combine.

With w the router's weight of a token and an expert, and o the expert's output, each token's home sends dy to the ranks
of its experts, along the plan of the forward round, and what comes back is added up there::

    combine's backward:   d o = w * dy           d w = <dy, o>      at the experts' rank
    dispatch's backward:  d x = sum of the gradients of the token's rows, and with them the d w      at home

Quantisation counts as the identity (straight through). What travels backward is in `grad_wire`; d w is float32.

The order of rounds. All ranks must run the same legs in the same order, and do. Autograd numbers the nodes of a graph
as they are made, and of the nodes whose gradients are complete a device's thread always runs the one with the highest
number. What uses a node's result was made after it, so among all nodes that are left the highest has nothing left to
wait for: on one device nodes run in exactly the reverse of the order in which they were made, whatever lies between
them. Ranks that dispatched and combined in the same order in forward therefore run the reverse of it in backward. Of a
round, combine's node has a higher number than dispatch's, and is connected with it even where no gradient of a row
flows between them; rounds that were open one after the other on a lane are so in backward, and on two lanes two are
open. A recomputation (`torch.utils.checkpoint`) runs where the first saved tensor of its region is asked for. Combine's
node always saves one, and asks for it before it sends: so on every rank the region's forward rounds come after the
backward of all that was made later, and before the backward of its last round, and none of them is left half done.

This does not hold for a graph that was made by several threads (their numbers are not comparable), one in which
independent rounds depend on nodes of other devices, whose threads take their own time, or one of which ranks
differentiate different parts: a rank that leaves out a round, or a rank without tokens that does not call backward.
A leg therefore names the forward round to which it belongs, and ranks whose legs belong to different ones do not
exchange rows: the staged transport takes no message of another round, so all ranks get PeerTimeout; the direct one
raises RoutingError, or on CUDA gives NaN and raises at the next call. A rank that runs no leg at all is a PeerTimeout
for the others.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from thinwire.comm.call import Recorder
from thinwire.compiler import GraphNode
from thinwire.errors import RoutingError
from thinwire.fused.counts import new_rows
from thinwire.moe.plan import first_mentions

MOST_WANTS = 8  # different ones
MOST_LAYERS = 1 << 16
_TAG_MASK = (1 << 28) - 1
_DOT_ROWS = 4096  # of which float32 copies are made at a time

#: Rows of a round's `tokens`, int64, -1 for none, and how many rows there are.
_Places = tuple[torch.Tensor, int]


class Wants(NamedTuple):
    """What of a round's input wants a gradient, the same on every rank, which the dispatch compares.

    Attributes:
        experts: whether gradients are enabled at all: experts of any rank may want theirs, whatever x and topk_weights
            do, and dy comes to them from all ranks.
    """

    rows: bool
    weights: bool
    experts: bool

    @classmethod
    def of(cls, x: torch.Tensor, topk_weights: torch.Tensor) -> Wants:
        return cls(x.requires_grad, topk_weights.requires_grad, True) if torch.is_grad_enabled() else NO_WANTS

    @classmethod
    def of_code(cls, code: int) -> Wants:
        return cls(*(bool(code & bit) for bit in (1, 2, 4)))

    @property
    def of_tokens(self) -> bool:
        """Whether dispatch has a backward, too."""
        return self.rows or self.weights

    @property
    def code(self) -> int:
        """Encodes these as a number that a graph can hold; 0: nothing is wanted."""
        return self.rows + 2 * self.weights + 4 * self.experts

    def tag(self, of: int = 0) -> int:
        """Encodes what dispatch compares: these, and a leg's layer, or the round of its backward. At most 28 bits."""
        return (of * MOST_WANTS + self.code) & _TAG_MASK


#: Of a round without gradients.
NO_WANTS = Wants(False, False, False)


def describe_tag(tag: int, of: str) -> str:
    """A tag in words, of a "layer" or a "round"."""
    wants = Wants.of_code(tag % MOST_WANTS)
    inputs = [name for name, wanted in (("x", wants.rows), ("topk_weights", wants.weights)) if wanted]
    said = "gradients enabled" if wants.experts else "no gradients"
    return (f"gradients of {' and '.join(inputs)}" if inputs else said) + (
        f" of {of} {tag // MOST_WANTS}" if tag >= MOST_WANTS else ""
    )


class GradientPlan(ABC):
    """The way of a round's gradients, for as long as the graph lives: the lane may have gone on to other rounds."""

    wants: Wants

    @abstractmethod
    def send(self, dy: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A dispatch of gradients [tokens, hidden], collective.

        Returns:
            The experts' [num_rows, hidden], in the order and dtype of the round's tokens, zero where a row is padding;
            and the router weight of each row, float32.
        """

    @abstractmethod
    def collect(
        self, rows: torch.Tensor | None, dots: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """A combine of gradients, collective.

        Args:
            rows: [any number of rows, hidden]; None: there are none.
            dots: float32, one for each row of expert_out; None: they are zero.

        Returns:
            What each token's rows add up to, [tokens, hidden], and its weights' gradients, float32 [tokens, top_k];
            each only where it is wanted.
        """


class RoundGradients:
    """What the nodes of one round share: its plan, and the gradients that wait for dispatch's node."""

    plan: GradientPlan  # from when the round has been dispatched

    def __init__(self, topk_ids: torch.Tensor, recorder: Recorder) -> None:
        self._ids, self._recorder = topk_ids, recorder
        self._is_open = False  # between its two legs
        self._forget()

    def ended_by(self, error: BaseException) -> None:
        """Ends the communicator if what comes from outside has ended backward between its legs, or in the second."""
        if self._is_open:
            self._recorder.ended_by(error)

    def _forget(self) -> None:
        self._rows: torch.Tensor | None = None
        self._dots: torch.Tensor | None = None
        self._made_by = torch._C._current_graph_task_id()

    def _of_this_backward(self) -> None:
        """Forgets what another one has left here, which differentiated a part of the round."""
        if self._made_by != torch._C._current_graph_task_id():
            self._forget()

    def of_experts(self, dy: torch.Tensor, expert_out: torch.Tensor | None, num_rows: int) -> torch.Tensor:
        """Combine's backward: the gradients of expert_out; the weights' are kept, if expert_out is given."""
        rows, weights = self._send(dy, num_rows)
        if expert_out is not None:
            pieces = zip(rows.split(_DOT_ROWS), expert_out.split(_DOT_ROWS), strict=True)
            self._dots = torch.cat(
                [torch.linalg.vecdot(left.to(weights.dtype), right.to(weights.dtype)) for left, right in pieces]
            )
        return rows.mul_(weights.unsqueeze(1))

    def of_records(self, dy: torch.Tensor, places: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Backward of a combine of weighted rows: a record's gradient is what came to the place of its first row."""
        rows, _ = self._send(dy, num_rows)
        return torch.nn.functional.pad(rows, (0, 0, 0, 1))[places]  # -1 is the row of zeros behind the last

    def _send(self, dy: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._forget()
        self._is_open = True
        return self.plan.send(dy.resolve_neg().contiguous(), num_rows)

    def add_rows(self, grad: torch.Tensor) -> None:
        """Keeps gradients of the rows that were gathered; those of several gatherings add up."""
        self._of_this_backward()
        self._rows = _added(self._rows, grad)

    def add_dots(self, grad: torch.Tensor) -> None:
        """Keeps gradients of the rows' router weights, which add up, too."""
        self._of_this_backward()
        self._dots = _added(self._dots, grad)

    def of_tokens(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Dispatch's backward: the gradients of x and topk_weights."""
        self._of_this_backward()
        rows, dots = self._rows, self._dots
        self._forget()
        dx, dw = self.plan.collect(rows, dots)
        if dw is not None:  # of merged experts: every mention has the gradient of the first
            dw = torch.where(self._ids >= 0, dw.gather(1, first_mentions(self._ids)), 0.0)
        self._is_open = False
        return dx, dw


def _added(known: torch.Tensor | None, grad: torch.Tensor) -> torch.Tensor:
    if known is None:
        return grad
    more, fewer = sorted((known, grad), key=len, reverse=True)
    total = more.clone()
    total[: len(fewer)] += fewer
    return total


def put_rows(values: torch.Tensor, places: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Values [*n, ...] at their places, int64 [*n], among so many rows, zero elsewhere; of place -1 nowhere."""
    rows = new_rows(values, num_rows + 1, values.shape[places.dim() :], zero=True)
    rows[places] = values  # -1 is the last
    return rows[:num_rows]


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A node's backward, which is refused where it would have to be differentiated itself.

    What it gives depends on more than the gradients that it gets, and torch looks at these alone.
    """

    @functools.wraps(backward)
    def refusing(*args: Any) -> Any:
        if torch.is_grad_enabled():
            raise RoutingError("rounds have no second derivatives: call backward without create_graph=True")
        try:
            return backward(*args)
        except BaseException as error:
            if hasattr(args[0], "gradients"):  # which nodes of operators do not have: operators find them
                args[0].gradients.ended_by(error)
            raise

    return refusing


class _Dispatch(GraphNode):
    """Stands for the round in the graph: its result carries no values, and orders the other nodes before it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, topk_weights: torch.Tensor, gradients: RoundGradients) -> torch.Tensor:
        ctx.gradients, ctx.dtype = gradients, topk_weights.dtype
        return x.new_empty(0, dtype=torch.float32)

    @staticmethod
    @once
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dw = ctx.gradients.of_tokens()
        return dx, None if dw is None else dw.to(ctx.dtype), None


class _Take(GraphNode):
    """Rows or router weights as experts see them, whose gradients are kept for dispatch's node."""

    @staticmethod
    def forward(
        ctx: Any,
        carrier: torch.Tensor,
        gradients: RoundGradients,
        take: Callable[[], tuple[torch.Tensor, ...]],
        keep: Callable[[torch.Tensor], None],
        places: _Places | None,
    ) -> Any:
        ctx.gradients, ctx.keep, ctx.places = gradients, keep, places
        ctx.carrier = torch.empty_like(carrier)
        taken = take()
        ctx.mark_non_differentiable(*taken[1:])
        return taken

    @staticmethod
    @once
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.keep(grads[0] if ctx.places is None else put_rows(grads[0], *ctx.places))
        return ctx.carrier, None, None, None, None


class _Combine(GraphNode):
    @staticmethod
    def forward(
        ctx: Any,
        expert_out: torch.Tensor,
        carrier: torch.Tensor,
        gradients: RoundGradients,
        combine: Callable[[torch.Tensor], torch.Tensor],
        places: _Places | None,
    ) -> torch.Tensor:
        ctx.gradients, ctx.num_rows, ctx.dtype = gradients, expert_out.shape[0], expert_out.dtype
        ctx.places = places
        # Something is saved in any case: the module's docstring says why.
        kept = [expert_out] if gradients.plan.wants.weights and places is None else []
        ctx.save_for_backward(carrier, *kept)
        return combine(expert_out)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        carrier, *kept = ctx.saved_tensors  # may run forward rounds anew, so it comes first
        if ctx.places is None:
            rows = ctx.gradients.of_experts(grads[0], kept[0] if kept else None, ctx.num_rows)
        else:
            rows = ctx.gradients.of_records(grads[0], *ctx.places)
        return rows.to(ctx.dtype) if ctx.needs_input_grad[0] else None, torch.empty_like(carrier), None, None, None


class Link:
    """One round's place in the graph."""

    def __init__(self, carrier: torch.Tensor, gradients: RoundGradients) -> None:
        self._carrier, self._gradients = carrier, gradients

    @classmethod
    def of(cls, x: torch.Tensor, topk_weights: torch.Tensor, gradients: RoundGradients) -> Link:
        """Puts a round's dispatch into the graph, which leaves it out where experts alone want gradients."""
        carrier: torch.Tensor = _Dispatch.apply(x, topk_weights, gradients)
        return cls(carrier.requires_grad_(), gradients)

    @property
    def wants(self) -> Wants:
        """Says what of the round's input wants a gradient."""
        return self._gradients.plan.wants

    def lacks_gradient(self, tokens: torch.Tensor) -> bool:
        """Whether rows were gathered under no_grad, and shall have a gradient now."""
        return torch.is_grad_enabled() and self.wants.rows and not tokens.requires_grad

    def gather(
        self, gather: Callable[[], tuple[torch.Tensor, torch.Tensor]], places: _Places | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gathers rows, with the gradient of the rows at `places`, or of all, if x wants one."""
        if not (torch.is_grad_enabled() and self.wants.rows):
            return gather()
        gathered: tuple[torch.Tensor, torch.Tensor] = self._take(gather, self._gradients.add_rows, places)
        return gathered

    def weights(self, weights: torch.Tensor, places: _Places) -> torch.Tensor:
        """Weights of any shape, float32, with a gradient, if topk_weights wants one; places has their shape."""
        if not (torch.is_grad_enabled() and self.wants.weights):
            return weights
        linked: torch.Tensor = self._take(lambda: (weights.clone(),), self._gradients.add_dots, places)[0]
        return linked

    def _take(self, take: Callable[[], Any], keep: Callable[[torch.Tensor], None], places: _Places | None) -> Any:
        return _Take.apply(self._carrier, self._gradients, take, keep, places)

    def combine(
        self,
        expert_out: torch.Tensor,
        combine: Callable[[torch.Tensor], torch.Tensor],
        places: _Places | None = None,
    ) -> torch.Tensor:
        """Combines expert_out, with a gradient; `places`: of rows that were weighted."""
        combined: torch.Tensor = _Combine.apply(expert_out, self._carrier, self._gradients, combine, places)
        return combined
