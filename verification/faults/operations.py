"""The operations that faults happen to. Each call is drawn from its number, and compared with plain torch's bits."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import thinwire as tw
from tests.helpers.collectives import all_gathered, all_reduced
from tests.helpers.wires import assert_same_bits
from thinwire.comm.communicator import Communicator
from thinwire.triton_kernels.codec_reference import dequantize_reference, quantize_reference
from thinwire.wire import WireFormat
from verification.faults.rules import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    OTHER_OPERATION,
    OTHER_SETTINGS,
    OTHER_SIZES,
    ROUND,
)
from verification.soak.schedules import Oracle, Plan, Settings

HIDDEN = 72
LARGE_BYTES = 36 << 20  # of one tensor, more than what malloc may take from memory that was freed
_INT8 = WireFormat.parse("int8")


class Operation(ABC):
    """One operation at one rank.

    Args:
        comm: the ranks.
        transport: "direct" or "staged".
        large: the rank that needs much more memory in call 0, which it is not to have; -1: none. What the others get
            does not depend on how much that is, or is the same everywhere.

    Attributes:
        seconds: spent in the library since this was set to 0.
    """

    #: What a rank calls that calls another operation.
    other: type[Operation]

    def __init__(self, comm: Communicator, transport: str, large: int = -1) -> None:
        self.comm, self.transport, self.large, self.seconds = comm, transport, large, 0.0
        self.options: dict[str, Any] = {"comm": comm, "transport": transport}
        self._prepared: dict[int, Any] = {}

    @abstractmethod
    def draw(self, number: int) -> Any:
        """What the call of this number takes, and must give."""

    @abstractmethod
    def call(self, number: int, deviation: str = "") -> None:
        """The call of this number.

        Args:
            deviation: how this rank's call differs from the others', if it does.

        Raises:
            AssertionError: the result is another one than plain torch's.
        """

    def prepare(self, number: int) -> Any:
        """Draws a call, once. What plain torch gives may take longer than ranks wait for each other."""
        if number not in self._prepared:
            self._prepared[number] = self.draw(number)
        return self._prepared[number]

    def agree_on_settings(self, number: int, deviation: str = "") -> None:
        """What ranks call of which one has other settings."""
        self.call(number, deviation)

    def go_on(self, lost: tuple[int, ...] | None) -> Operation:
        """The same over the ranks that are left after a PeerTimeout; None leaves it to the library who is lost."""
        return type(self)(self.comm.shrink(lost), self.transport)

    def close(self) -> None:
        """Ends what it has beside the communicator."""
        return  # most have nothing

    @contextlib.contextmanager
    def clock(self) -> Iterator[None]:
        """Around what is the library's."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - start

    def tensors(self, number: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
        """Each rank's tensor of a call."""
        generator = torch.Generator().manual_seed(number)
        return [torch.randn(shape, generator=generator) for shape in shapes]


class AllToAllV(Operation):
    def draw(self, number: int) -> tuple[torch.Tensor, list[int], list[int], torch.Tensor]:
        size, me = self.comm.size, self.comm.rank
        counts = [[1 + (number + source + 2 * to) % 4 for to in range(size)] for source in range(size)]
        if number == 0 and me == self.large:
            counts[me][me] = LARGE_BYTES // (4 * HIDDEN)
            rows, received = sum(counts[me]), [row[me] for row in counts]
            return torch.ones(rows, HIDDEN), counts[me], received, torch.empty(0)
        tensors = self.tensors(number, *((sum(row), HIDDEN) for row in counts))
        sent = torch.cat([x.split(row)[me] for x, row in zip(tensors, counts, strict=True)])
        expected = dequantize_reference(quantize_reference(sent, _INT8), _INT8, HIDDEN, sent.dtype)
        return tensors[me], counts[me], [row[me] for row in counts], expected

    def call(self, number: int, deviation: str = "") -> None:
        x, sends, receives, expected = self.prepare(number)
        if deviation == OTHER_SIZES:
            sends, receives = [count + 1 for count in sends], [count + 1 for count in receives]
            x = torch.ones(sum(sends), HIDDEN)
        wire = "int4" if deviation == OTHER_SETTINGS else "int8"
        with self.clock():
            got = tw.all_to_all_v(x, sends, receives, wire=wire, **self.options)
        assert_same_bits(f"all_to_all_v {number}", expected, got)


class AllReduce(Operation):
    def draw(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if number == 0 and self.large >= 0:
            x, few = torch.ones(LARGE_BYTES // 4), torch.ones(10)
            return x, all_reduced([few] * self.comm.size, _INT8, _INT8)[:1].expand(x.shape)
        tensors = self.tensors(number, *[(3000,)] * self.comm.size)
        return tensors[self.comm.rank], all_reduced(tensors, _INT8, _INT8)

    def call(self, number: int, deviation: str = "") -> None:
        x, expected = self.prepare(number)
        wire = "int4" if deviation == OTHER_SETTINGS else "int8"
        with self.clock():
            got = tw.all_reduce(x[:-600] if deviation == OTHER_SIZES else x, wire=wire, **self.options)
        assert_same_bits(f"all_reduce {number}", expected, got)


class AllGather(Operation):
    def draw(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.comm.size
        if number == 0 and self.large >= 0:
            x, few = torch.ones(LARGE_BYTES // (4 * size * HIDDEN) + 1, HIDDEN), torch.ones(1, HIDDEN)
            return x, all_gathered([few] * size, _INT8)[:1].expand(size * x.shape[0], HIDDEN)
        tensors = self.tensors(number, *[(40, HIDDEN)] * size)
        return tensors[self.comm.rank], all_gathered(tensors, _INT8)

    def call(self, number: int, deviation: str = "") -> None:
        x, expected = self.prepare(number)
        wire = "int4" if deviation == OTHER_SETTINGS else "int8"
        with self.clock():
            got = tw.all_gather(x[:-10] if deviation == OTHER_SIZES else x, wire=wire, **self.options)
        assert_same_bits(f"all_gather {number}", expected, got)


class Barrier(Operation):
    def draw(self, number: int) -> None:
        return None

    def call(self, number: int, deviation: str = "") -> None:
        with self.clock():
            self.comm.barrier()


class Round(Operation):
    """A dispatch and its combine."""

    def __init__(self, comm: Communicator, transport: str, large: int = -1) -> None:
        super().__init__(comm, transport, large)
        max_tokens = 6 if large < 0 else LARGE_BYTES // (4 * HIDDEN)
        self.settings = Settings(
            world=comm.size, num_experts=7, top_k=2, hidden=HIDDEN, max_tokens=max_tokens, wire="int8",
            combine_wire="int8", dtype=torch.float32, align=1, lanes=1, first_epoch=0,
        )  # fmt: skip
        self.ep = self._make()

    def _make(self, top_k: int = 2) -> tw.ExpertParallel:
        s = self.settings
        with self.clock():
            return tw.ExpertParallel(
                self.comm, s.num_experts, top_k, s.hidden, s.max_tokens, wire=s.wire, transport=self.transport
            )

    def draw(self, number: int) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
        plan = Plan.draw(replace(self.settings, max_tokens=6), f"{number}", abandons=False)
        plan = replace(plan, parts=[replace(part, reads="tokens") for part in plan.parts])
        if number == 0 and self.large >= 0:
            plan = self._without_tokens_of(self.large, plan)
            if self.comm.rank == self.large:  # all for its own experts
                own = torch.full((self.settings.max_tokens, self.settings.top_k), self.ep.local_experts.start)
                x = torch.ones(own.shape[0], HIDDEN)
                part = replace(plan.parts[self.large], x=x, ids=own, weights=torch.ones(own.shape))
                return part, torch.empty(0), torch.empty(0), torch.empty(0)
        oracle, me = Oracle(self.settings, plan), self.comm.rank
        tokens = oracle.tokens(me, int(oracle.offsets[me][-1]))
        out = torch.empty(tokens.shape, dtype=plan.parts[me].output)
        for place, expert in enumerate(oracle.experts[me]):
            first = int(oracle.offsets[me][place])
            rows = slice(first, first + int(oracle.counts[me][place]))
            out[rows] = oracle.apply(expert, tokens[rows], out.dtype)
        return plan.parts[me], tokens, out, oracle.result(me)

    @staticmethod
    def _without_tokens_of(rank: int, plan: Plan) -> Plan:
        part = plan.parts[rank]
        parts = [*plan.parts]
        parts[rank] = replace(part, x=part.x[:0], ids=part.ids[:0], weights=part.weights[:0])
        return replace(plan, parts=parts)

    def call(self, number: int, deviation: str = "") -> None:
        part, tokens, expert_out, expected = self.prepare(number)
        x = torch.ones(part.x.shape[0], HIDDEN + 1) if deviation == OTHER_SIZES else part.x
        with self.clock():
            d = self.ep.dispatch(x, part.ids, part.weights)
            came = d.tokens
        assert_same_bits(f"tokens {number}", tokens, came)
        with self.clock():
            home = self.ep.combine(expert_out, d)
        assert_same_bits(f"combine {number}", expected, home)

    def agree_on_settings(self, number: int, deviation: str = "") -> None:
        self._make(top_k=3 if deviation else 2).close()

    def go_on(self, lost: tuple[int, ...] | None) -> Round:
        self.ep.rebuild(lost)
        # What is left is of the rebuilt object, so no constructor.
        left = Round.__new__(Round)
        Operation.__init__(left, self.ep.comm, self.transport)
        left.settings, left.ep = replace(self.settings, world=self.ep.comm.size), self.ep
        return left

    def close(self) -> None:
        self.ep.close()


AllToAllV.other = AllReduce.other = Barrier.other = Round.other = AllGather
AllGather.other = AllReduce

BY_NAME: dict[str, type[Operation]] = {
    ROUND: Round, ALL_TO_ALL: AllToAllV, ALL_REDUCE: AllReduce, ALL_GATHER: AllGather, BARRIER: Barrier,
}  # fmt: skip


def deviating(operation: Operation, number: int, fault: str, mine: bool) -> None:
    """The call in which one rank does something else than the others, `mine` if it is this one."""
    if fault == OTHER_OPERATION and mine:
        with operation.clock():
            operation.other(operation.comm, operation.transport).call(number)
    elif fault == OTHER_SETTINGS:
        operation.agree_on_settings(number, fault if mine else "")
    else:
        operation.call(number, fault if mine else "")
