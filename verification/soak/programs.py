"""Random programs of all public operations on a few ranks, each result compared with plain torch or numpy.

    python -m verification.soak.programs --count 1000 --seed 1 --json FILE

A program is lines of Python, the same on all ranks, that call the methods of `Ground`. All values are drawn from seeds
in those lines, so every rank knows all others' values and all results. Handles are waited for in any order, several
communicators and lanes are in use at a time, and refused calls come in between. Ranks leave rounds open, are in other
layers than their peers, differentiate parts of a graph before the whole, and are interrupted. A program that fails is
printed as a script that runs it again. `--autocast` runs rounds and their backward within torch.autocast, on the three
transports, from threads. If FILE exists, the run continues where it ended, on the same commit; `--seconds
N` ends a run after N seconds.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

import thinwire as tw
from benchmarks.timing import machine, read_json, write_json
from tests.helpers.collectives import all_gathered, all_reduced, reduce_scattered, through
from tests.helpers.wires import DTYPES, WIRES, assert_same_bits
from thinwire.comm.communicator import Communicator
from thinwire.comm.exchange import name_ranks
from thinwire.errors import PeerTimeout, RoutingError, ThinwireError
from thinwire.fused.all_to_all import open_channel
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import RankError, RanksTimeout, run_ranks
from thinwire.triton_kernels.codec_reference import dequantize_reference, quantize_reference, round_reference
from thinwire.wire import WireFormat
from verification.interrupts.calls import Interrupted, Raise
from verification.soak.schedules import RandomRound, Schedule, Settings

T = TypeVar("T")

FLAT_ROW = 1024
EXACT_DTYPES = ("uint8", "int16", "int64", "bool", "float64", "float32", "bfloat16", "complex64")
_NUMPY_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": np.add.reduce, "min": np.minimum.reduce, "max": np.maximum.reduce, "prod": np.multiply.reduce
}  # fmt: skip
#: Calls of which a handle may be kept.
_LATER = {"all_reduce", "reduce_scatter", "all_gather", "all_gather_v", "all_to_all_v", "exact_reduce", "exact_move"}
BATCH = 25  # programs of one world
INNER_TIMEOUT = 2.0  # of programs in which a rank is interrupted
EVENTS = 3000  # of the profiler's, at the most before the interrupt
RACY = "threading", "torch.autograd.grad_mode", "numba"
AUTOCAST = "float16", "bfloat16"
#: Of threads, for programs under autocast.
HOSTS = {2: ["0|1"], 3: ["01|2", "0|12", "02|1"], 4: ["01|23", "02|13", "0|123"]}
ENDED = "has ended at this rank"  # what a communicator says after an interrupt
WORLDS = ((2, "thread"), (3, "thread"), (4, "thread"), (2, "process"), (3, "process"), (4, "process"))


# ---------------------------------------------------------------------------------------------------------------------
# What the lines of a program call


class InLibrary(Raise):
    """Raises at one event of this thread's profiler, of those that come while the library is at work.

    Not in `RACY` code, which is not the library's: interrupted there, a lock stays taken, the grad mode as it was
    changed, or a compiler half made.
    """

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        caller: FrameType | None = frame
        while caller is not None and (module := caller.f_globals.get("__name__", "")) != __name__:
            if module.startswith(RACY):
                return None
            if module.startswith("thinwire."):
                return super().__call__(frame, event, argument)
            caller = caller.f_back
        return None


class Graph(NamedTuple):
    """A graph of this rank's and the same in plain torch, over all ranks.

    Attributes:
        losses: by name this rank's, and the sum of all ranks'.
        tensors: by name this rank's, those that are it in plain torch, and which of their rows it has.
        error: of an element, where wires are quantised; else all are exact.
    """

    losses: dict[str, tuple[torch.Tensor, torch.Tensor]]
    tensors: dict[str, tuple[torch.Tensor, list[torch.Tensor], slice]]
    error: float = 0.0

    def expected(self, loss: str, of: list[str]) -> list[torch.Tensor]:
        """What plain torch gives, with zeros where a tensor is not in the graph."""
        wanted = []
        for name in of:
            mine, plain, rows = self.tensors[name]
            if not plain:  # rows of a rank without experts
                wanted.append(torch.zeros_like(mine))
                continue
            grads = torch.autograd.grad(self.losses[loss][1], plain, retain_graph=True, allow_unused=True)
            pieces = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, plain, strict=True)]
            wanted.append(torch.cat(pieces)[rows])
        return wanted

    def compare(self, name: str, loss: str, of: list[str], grads: list[torch.Tensor | None]) -> None:
        for tensor, want, grad in zip(of, self.expected(loss, of), grads, strict=True):
            got = torch.zeros_like(want) if grad is None else grad
            assert _near(want, got, self.error), (f"{name}: gradients of {tensor} by {loss}", want, got)


class Ground:
    """One rank's side of a program.

    Args:
        timeout: of rounds that train.
        interrupts: comes in the middle of a call; then the same call is made again.
    """

    def __init__(self, comm: Communicator, timeout: float = 20.0, interrupts: InLibrary | None = None) -> None:
        self.comms = {"world": comm}
        self.timeout, self.interrupts = timeout, interrupts
        self.autocast = ""  # the dtype of all calls' autocast
        open_channel(comm, piece_bytes=17920)  # so that what has these sizes is several pieces
        self.eps: dict[str, tuple[ExpertParallel, Settings]] = {}
        self.rounds: dict[str, RandomRound] = {}
        self.trainers: dict[str, tuple[ExpertParallel, int]] = {}
        self.graphs: dict[str, Graph] = {}
        self.pending: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        self.seen: Counter[str] = Counter()

    def call(self, function: Callable[[], T]) -> T:
        """What a call of the library gives; those that make its objects are not interrupted."""
        if self.autocast:
            with torch.autocast("cpu", getattr(torch, self.autocast)):
                return function()
        if self.interrupts is None:
            return function()
        try:
            sys.setprofile(self.interrupts)
            return function()
        except (Interrupted, KeyboardInterrupt):
            self.seen["interrupts"] += 1
        finally:
            sys.setprofile(None)
        return function()

    def interrupt(self, rank: int, at: int, error: str, lines: list[str]) -> None:
        """A program on a communicator of its own, of which a rank is interrupted at some event of all its calls.

        Either all ranks get what plain torch gives, or the communicator ends at that rank, and others name it.
        """
        world = self.comms["world"]
        comm = world.split(groups=[range(world.size)])
        comm._exchange.timeout = INNER_TIMEOUT
        kind = KeyboardInterrupt if error == "KeyboardInterrupt" else Interrupted
        ground = Ground(comm, INNER_TIMEOUT, InLibrary(at, kind) if world.rank == rank else None)
        outcome = "right"
        try:
            for line in lines:
                _run_line(ground, line)
        except ThinwireError as caught:
            ranks, notes = list(getattr(caught, "ranks", ())), "; ".join(caught.__notes__)
            outcome = f"{type(caught).__name__} {ranks}: {caught}\n{notes}"
        outcomes = world.all_gather_data(outcome, str)
        of_rank, *others = (
            told.partition("\n")[0] for told in (outcomes[rank], *outcomes[:rank], *outcomes[rank + 1 :])
        )
        if "Interrupted: " in of_rank:  # it came while memory was made, which has failed so, and all are told
            assert {*others} == {of_rank}, (rank, outcomes)
        else:
            named = "right" if of_rank == "right" else ("right", f"PeerTimeout [{rank}]")
            assert all(told.startswith(named) for told in others), (rank, outcomes)
            if not of_rank.startswith("LaneError"):  # of a round, or a half, that was over when the interrupt came
                assert of_rank == "right" or ENDED in of_rank, (rank, outcomes)
        if world.rank == rank and ENDED in of_rank:
            _raises(ThinwireError, comm.barrier, ENDED)
            _raises(ThinwireError, lambda: tw.all_reduce(torch.ones(9), comm=comm), ENDED)
        ended = ENDED in of_rank
        ground.close()
        comm.close()
        self.seen += ground.seen + Counter({"programs with interrupts": 1, "of them ended": ended})

    def split(self, name: str, groups: list[list[int]], hosts: str = "") -> None:
        self.comms[name] = self.comms["world"].split(groups=groups)
        if hosts:
            self.comms[name].hosts = tuple(tuple(map(int, members)) for members in hosts.split("|"))

    def all_reduce(self, name: str, seed: int, shape: list[int], dtype: str, of: str, **options: Any) -> None:
        comm, wires = self.comms[of], _wires(options)
        tensors = [_floats(seed, rank, shape, dtype) for rank in range(comm.size)]
        expected = all_reduced(tensors, wires[0], wires[-1])
        self._call(name, tw.all_reduce, tensors[comm.rank], comm, options, expected)

    def reduce_scatter(self, name: str, seed: int, shape: list[int], dtype: str, of: str, **options: Any) -> None:
        comm, wires = self.comms[of], _wires(options)
        shape = [shape[0] * comm.size, *shape[1:]]
        tensors = [_floats(seed, rank, shape, dtype) for rank in range(comm.size)]
        expected = reduce_scattered(tensors, wires[0], comm.rank)
        self._call(name, tw.reduce_scatter, tensors[comm.rank], comm, options, expected)

    def all_gather(self, name: str, seed: int, shape: list[int], dtype: str, of: str, **options: Any) -> None:
        comm, (wire, *_) = self.comms[of], _wires(options)
        tensors = [_floats(seed, rank, shape, dtype) for rank in range(comm.size)]
        expected = all_gathered(tensors, wire) if wire.quantized else torch.cat(tensors)
        self._call(name, tw.all_gather, tensors[comm.rank], comm, options, expected)

    def all_gather_v(
        self, name: str, seed: int, tail: list[int], dtype: str, of: str, told: bool, **options: Any
    ) -> None:
        comm, (wire, *_) = self.comms[of], _wires(options)
        counts = [random.Random(f"{seed} {rank}").choice((0, 1, 3, 20)) for rank in range(comm.size)]
        tensors = [_floats(seed, rank, [count, *tail], dtype) for rank, count in enumerate(counts)]
        expected = all_gathered(tensors, wire) if wire.quantized and sum(counts) else torch.cat(tensors)
        options["counts"] = counts if told else None
        self._call(name, tw.all_gather_v, tensors[comm.rank], comm, options, expected)

    def all_to_all_v(
        self, name: str, seed: int, tail: list[int], dtype: str, of: str, told: bool, into: str, **options: Any
    ) -> None:
        comm, (wire, *_) = self.comms[of], _wires(options)
        rng, world, me = random.Random(seed), comm.size, comm.rank
        most = rng.choice((2, 9, 40)) * (1 if tail else 100)
        counts = [[rng.choice((0, rng.randint(0, most))) for _ in range(world)] for _ in range(world)]
        inputs = []
        for rank in range(world):
            shape = [sum(counts[rank]), *tail]
            exact = getattr(torch, dtype) not in DTYPES
            inputs.append(_anything(seed, rank, shape, dtype) if exact else _floats(seed, rank, shape, dtype))
        places, position = [0] * world, rng.randint(0, 2)
        for source in rng.sample(range(world), world):
            places[source] = position
            position += counts[source][me] + rng.randint(0, 2)
        rows = max(place + counts[source][me] for source, place in enumerate(places))
        expected = torch.full((rows + 1, *tail), 3).to(inputs[0].dtype)
        if not into:
            expected = torch.zeros(rows, *tail, dtype=inputs[0].dtype)
        out = expected.clone() if into else None
        for source, place in enumerate(places):
            start = sum(counts[source][:me])
            segment = inputs[source][start : start + counts[source][me]]
            expected[place : place + len(segment)] = _arrived(segment, wire)
        options |= {"recv_displs": places, "send_counts": counts[me], "out": out}
        options["recv_counts"] = [row[me] for row in counts] if told else None
        self._call(name, tw.all_to_all_v, inputs[me], comm, options, expected)

    def int8_reduce(self, seed: int, shape: list[int], dtype: str, of: str, transport: str) -> None:
        comm = self.comms[of]
        generator = torch.Generator().manual_seed(seed)
        tensors = torch.randint(-128, 128, (comm.size, *shape), generator=generator).to(torch.int8)
        scales = torch.rand(shape[-1], generator=generator)
        expected = (tensors.sum(0, dtype=torch.int32).float() * scales).to(getattr(torch, dtype))
        x, out = tensors[comm.rank], getattr(torch, dtype)
        got = self.call(lambda: tw.int8_all_to_all_reduce(x, scales, dtype=out, comm=comm, transport=transport))
        assert_same_bits("int8_all_to_all_reduce", expected, got)
        self.seen["int8_reduce"] += 1

    def exact_reduce(self, name: str, seed: int, shape: list[int], dtype: str, op: str, of: str, later: bool) -> None:
        comm = self.comms[of]
        tensors = [_anything(seed, rank, shape, dtype) for rank in range(comm.size)]
        x = tensors[comm.rank].clone()
        expected = torch.from_numpy(np.asarray(_NUMPY_REDUCTIONS[op]([tensor.numpy() for tensor in tensors])))
        work = self.call(lambda: comm.all_reduce(x, op, async_op=later))
        self._keep(f"exact {name}", work.wait, lambda _: _same(f"all_reduce {op}", expected.to(x.dtype), x), later)

    def exact_move(self, name: str, seed: int, shape: list[int], dtype: str, kind: str, of: str, later: bool) -> None:
        comm, me = self.comms[of], self.comms[of].rank
        tensors = [_anything(seed, rank, shape, dtype) for rank in range(comm.size)]
        root = seed % comm.size
        got = [torch.zeros_like(tensor) for tensor in tensors]
        expected: list[torch.Tensor] = tensors
        if kind == "broadcast":
            got, expected = [tensors[me].clone()], [tensors[root]]
            work = self.call(lambda: comm.broadcast(got[0], root, async_op=later))
        elif kind == "all_gather":
            work = self.call(lambda: comm.all_gather(got, tensors[me], async_op=later))
        elif kind == "gather":
            work = self.call(lambda: comm.gather(tensors[me], got if me == root else None, root, async_op=later))
            expected = tensors if me == root else got
        elif kind == "scatter":
            got, expected = got[:1], [tensors[me]]
            work = self.call(lambda: comm.scatter(got[0], tensors if me == root else None, root, async_op=later))
        else:
            expected = [_anything(seed + me, rank, shape, dtype) for rank in range(comm.size)]
            mine = [_anything(seed + peer, me, shape, dtype) for peer in range(comm.size)]
            work = self.call(lambda: comm.all_to_all(got, mine, async_op=later))

        def check(_: Any) -> None:
            for want, tensor in zip(expected, got, strict=True):
                _same(kind, want, tensor)

        self._keep(f"exact {name}", work.wait, check, later)

    def host(self, kind: str, of: str, seed: int) -> None:
        comm = self.comms[of]
        if kind == "barrier":
            self.call(comm.barrier)
        elif kind == "counts":
            mine = [seed + 10 * comm.rank + peer for peer in range(comm.size)]
            received = self.call(lambda: comm.exchange_counts(mine))
            assert received == [seed + 10 * peer + comm.rank for peer in range(comm.size)]
        else:
            objects = self.call(lambda: comm.all_gather_object((seed, comm.rank)))
            assert objects == [(seed, rank) for rank in range(comm.size)]
        self.seen[kind] += 1

    def make_ep(self, name: str, of: str, seed: int, lanes: int) -> None:
        comm, rng = self.comms[of], random.Random(seed)
        schedule = Schedule("", comm.size, "thread", "none", lanes=lanes)
        settings = replace(Settings.draw(schedule, rng), first_epoch=rng.choice((0, 2**31 - 3, -2)))
        self.eps[name] = settings.make(comm, 20.0), settings

    def dispatch(self, name: str, ep: str, lane: int, seed: int) -> None:
        made, settings = self.eps[ep]
        drawn = RandomRound(made, settings, f"{seed}", name)
        drawn.dispatch(lane)
        drawn.read()
        self.rounds[name] = drawn
        self.seen["dispatch"] += 1

    def end(self, name: str, leaving: int | None = None) -> None:
        """Ends a round; or some ranks leave it open, drawn with `leaving`, and all dispatch the next one after this."""
        ended = self.rounds.pop(name)
        without = frozenset() if leaving is None else _some(leaving, ended.ep.comm.size)
        if ended.me not in without:
            ended.end(without=without)
        self.seen["left open" if without else "combine or abandon"] += 1

    def backward(self, name: str, kind: str, seed: int, of: str, transport: str) -> None:
        """A collective of whole numbers, which floats hold exactly; its backward comes with the wait."""
        comm, rng, me = self.comms[of], random.Random(seed), self.comms[of].rank
        world, tail = comm.size, rng.choice(([3], [130]))
        counts = [rng.randint(0, 4) for _ in range(world)] if kind == "all_gather_v" else [2 * world] * world
        xs = [_whole(seed, rank, [count, *tail]).requires_grad_() for rank, count in enumerate(counts)]
        plain: dict[str, Callable[[int], torch.Tensor]] = {
            "all_reduce": lambda rank: torch.stack(xs).sum(0),
            "reduce_scatter": lambda rank: torch.stack(xs).sum(0)[2 * rank : 2 * rank + 2],
            "all_gather": lambda rank: torch.cat(xs),
            "all_gather_v": lambda rank: torch.cat(xs),
            "all_to_all_v": lambda rank: torch.cat([x[2 * rank : 2 * rank + 2] for x in xs]),
        }
        ys = [plain[kind](rank) for rank in range(world)]
        targets = [_whole(seed + 1, rank, list(y.shape)) for rank, y in enumerate(ys)]
        plain_loss = torch.stack([(y * t).sum() for y, t in zip(ys, targets, strict=True)]).sum()
        x = xs[me].detach().clone().requires_grad_()
        y = self.call(lambda: getattr(tw, kind)(x, comm=comm, wire="none", transport=transport))
        _same(f"{name} on rank {me}", ys[me].detach(), y.detach())
        graph = Graph({"y": ((y * targets[me]).sum(), plain_loss)}, {"x": (x, [xs[me]], slice(None))})
        self._backward_later(name, kind, graph)

    def make_trainer(self, name: str, of: str, seed: int, lanes: int, transport: str, wire: str = "none") -> None:
        hidden, experts = 3 + seed % 30, 1 + seed % 7
        self.trainers[name] = ExpertParallel(
            self.comms[of], experts, 1 + seed % min(3, experts), hidden, 40, wire=wire, grad_wire=wire,
            transport=transport, lanes=lanes, timeout=self.timeout,
        ), seed  # fmt: skip

    def train(
        self, name: str, trainer: str, lane: int, seed: int, halves: bool, faults: list[tuple[str, int]],
        routed: bool = True,
    ) -> None:  # fmt: skip
        """A round of whole numbers; its backward comes with the wait. Before it, rounds that go wrong at some ranks."""
        ep, of_scales = self.trainers[trainer]
        world, me, experts, hidden = ep.comm.size, ep.comm.rank, ep.num_experts, ep.hidden_size
        rng = random.Random(seed)
        counts = [rng.choice((0, 1, 2, 7, 17, 40)) for _ in range(world)]
        scales = _whole(of_scales, 0, [experts, hidden]).requires_grad_()
        of_tokens = _whole(seed + 3, 0, [experts, hidden])  # by which the loss of tokens multiplies
        xs = [_whole(seed, rank, [count, hidden]).requires_grad_() for rank, count in enumerate(counts)]
        weights = [_whole(seed + 1, rank, [count, ep.top_k]).requires_grad_() for rank, count in enumerate(counts)]
        targets = [_whole(seed + 2, rank, [count, hidden]) for rank, count in enumerate(counts)]
        generator = torch.Generator().manual_seed(seed)
        ids = [torch.randint(-1, experts, (count, ep.top_k), generator=generator) for count in counts]
        rows, losses, ys = [list[torch.Tensor]() for _ in range(experts)], list[torch.Tensor](), list[torch.Tensor]()
        for x, w, i, target in zip(xs, weights, ids, targets, strict=True):
            named = torch.nn.functional.one_hot(i + 1, experts + 1)[:, :, 1:]
            y = torch.zeros_like(x)
            for expert in range(experts):
                tokens = named[:, :, expert].any(1).nonzero()[:, 0]
                rows[expert].append(x[tokens])
                weight = (w * named[:, :, expert]).sum(1, keepdim=True)[tokens]
                y = y.index_add(0, tokens, weight * scales[expert] * rows[expert][-1])
            ys.append(y)
            losses.append((y * target).sum())
        plain_tokens = torch.stack([(x * of_tokens[e]).sum() for e, pieces in enumerate(rows) for x in pieces]).sum()
        own = slice(ep.local_experts.start, ep.local_experts.stop)
        inputs = [tensor.detach().clone().requires_grad_() for tensor in (xs[me], weights[me], scales[own])]
        inputs[1].requires_grad_(routed)
        given = inputs[0], ids[me], inputs[1]
        for kind, drawn in faults:
            self._fail(kind, _some(drawn, world, kind == "another layer"), ep, given, lane, drawn % 60_000)
        d = self._dispatch(ep, given, lane, 1, halves)
        tokens = self.call(lambda: d.tokens)
        out = tokens * inputs[2].repeat_interleave(d.expert_counts, 0, output_size=len(tokens))
        of_own = of_tokens[own].repeat_interleave(d.expert_counts, 0, output_size=len(tokens))
        y = self._combine(ep, out, d, halves)
        error = 0.25 * hidden**0.5 if ep.wire.quantized else 0.0
        assert _near(ys[me].detach(), y.detach(), error), (f"{name} on rank {me}", ys[me], y)
        graph = Graph(
            {
                "y": ((y * targets[me]).sum(), torch.stack(losses).sum()),
                "d.tokens": ((tokens * of_own).sum(), plain_tokens),
            },
            {
                "x": (inputs[0], [xs[me]], slice(None)),
                **({"weights": (inputs[1], [weights[me]], slice(None))} if routed else {}),
                "scales": (inputs[2], [scales], own),
                "d.tokens": (tokens, [piece for pieces in rows[own] for piece in pieces], slice(None)),
            },
            error,
        )
        self._backward_later(name, "round", graph)

    def _dispatch(
        self, ep: ExpertParallel, given: tuple[torch.Tensor, ...], lane: int, layer: int, halves: bool = False
    ) -> Dispatched:
        if not halves:
            return self.call(lambda: ep.dispatch(*given, lane=lane, layer=layer))
        started = self.call(lambda: ep.dispatch_start(*given, lane=lane, layer=layer))
        return self.call(lambda: ep.dispatch_finish(started))

    def _combine(self, ep: ExpertParallel, out: torch.Tensor, d: Dispatched, halves: bool = False) -> torch.Tensor:
        if not halves:
            return self.call(lambda: ep.combine(out, d))
        started = self.call(lambda: ep.combine_start(out, d))
        return self.call(lambda: ep.combine_finish(started))

    def _fail(
        self,
        kind: str,
        ranks: frozenset[int],
        ep: ExpertParallel,
        given: tuple[torch.Tensor, ...],
        lane: int,
        layer: int,
    ) -> None:
        """A round that goes wrong at some ranks, which the others are told."""
        at_fault = ep.comm.rank in ranks
        self.seen[f"rounds of {kind}"] += 1
        if kind == "another layer":  # who has left out the one is in the next one
            both = [f"of layer {layer}", f"of layer {layer + 1}"] if layer else ["of layer 1"]
            if ranks:
                _raises(RoutingError, lambda: self._dispatch(ep, given, lane, layer + at_fault), *both)
            return
        d = self._dispatch(ep, given, lane, layer)
        if not at_fault:
            told = f"{name_ranks(ranks)} left this round open"
            _raises(RoutingError, lambda: self._combine(ep, d.tokens, d), told)
        elif kind == "a refused combine":
            _raises(RoutingError, lambda: self._combine(ep, torch.ones(1, 1), d), "expert_out is")

    def part(self, name: str, loss: str, of: list[str]) -> None:
        """Differentiates a part of a graph that is differentiated again later."""
        graph = self.graphs[name]
        inputs = [graph.tensors[tensor][0] for tensor in of]
        grads = self.call(
            lambda: torch.autograd.grad(graph.losses[loss][0], inputs, retain_graph=True, allow_unused=True)
        )
        graph.compare(name, loss, of, list(grads))
        self.seen[f"parts by {loss}"] += 1

    def _backward_later(self, name: str, kind: str, graph: Graph) -> None:
        leaves = [tensor for tensor, (mine, *_) in graph.tensors.items() if mine.is_leaf]
        losses = [graph.losses["y"][0]]
        self.graphs[name] = graph

        def run() -> None:
            while losses:
                for leaf in leaves:  # an interrupt may have come when some were there
                    graph.tensors[leaf][0].grad = None
                losses[0].backward(retain_graph=self.interrupts is not None)
                losses.pop()

        def check(_: Any) -> None:
            graph.compare(name, "y", leaves, [graph.tensors[leaf][0].grad for leaf in leaves])

        self.seen[f"backward of {kind}"] += 1
        self.pending[name] = run, check

    def refused(self, kind: str, rank: int, of: str) -> None:
        """A call that one rank alone makes, and that must be refused before peers hear of it."""
        comm = self.comms[of]
        if self.comms["world"].rank != rank:
            return
        calls: dict[str, Callable[[], object]] = {
            "scalar": lambda: tw.all_reduce(torch.ones(()), comm=comm),
            "counts": lambda: tw.all_to_all_v(torch.ones(4, 2), [9] * comm.size, comm=comm),
            "wire": lambda: tw.all_gather(torch.ones(4, dtype=torch.int64), wire="int8", comm=comm),
            "op": lambda: comm.all_reduce(torch.ones(3), "median"),
            "transport": lambda: tw.reduce_scatter(torch.ones(comm.size, 2), comm=comm, transport="pigeon"),
            "rank": lambda: comm.broadcast(torch.ones(3), comm.size),
        }
        try:
            calls[kind]()
        except (ThinwireError, ValueError, TypeError):
            self.seen["refused"] += 1
            return
        raise AssertionError(f"{kind} was not refused")

    def wait(self, name: str) -> None:
        """Ends a call that was begun; a second wait gives the same."""
        wait, check = self.pending.pop(name)
        check(self.call(wait))
        check(self.call(wait))
        self.seen["waits"] += 1

    def close(self) -> None:
        for made, _ in [*self.eps.values(), *self.trainers.values()]:
            made.close()
        for name, comm in self.comms.items():
            if name != "world":
                comm.close()

    def _call(
        self,
        name: str,
        function: Callable[..., Any],
        x: torch.Tensor,
        comm: Communicator,
        options: dict[str, Any],
        expected: torch.Tensor,
    ) -> None:
        later = options.pop("later")
        got = self.call(lambda: function(x, comm=comm, async_op=later, **options))

        def check(result: torch.Tensor) -> None:
            _same(f"{name} on rank {comm.rank}", expected, result)

        self._keep(name, got.wait if later else lambda: got, check, later)

    def _keep(self, name: str, wait: Callable[[], Any], check: Callable[[Any], None], later: bool) -> None:
        self.seen[name.rstrip("0123456789")] += 1
        self.pending[name.removeprefix("exact ")] = wait, check
        if not later:
            self.wait(name.removeprefix("exact "))


def _run_line(ground: Ground, line: str) -> None:
    try:
        exec(line, {"g": ground})
    except Exception as error:
        error.add_note(f"in the line: {line}")
        raise


def _raises(kind: type[ThinwireError], call: Callable[[], object], *words: str) -> None:
    """Raises AssertionError unless the call raises an error that says all that; PeerTimeout goes through."""
    try:
        call()
    except kind as error:
        if isinstance(error, PeerTimeout):
            raise
        assert all(word in str(error) for word in words), (words, str(error))
    else:
        raise AssertionError(f"no error said {words}")


def _some(seed: int, size: int, not_all: bool = False) -> frozenset[int]:
    """Some of so many ranks; none only if one rank is all."""
    rng = random.Random(seed)
    return frozenset(rng.sample(range(size), rng.randint(1, max(1, size - not_all)) if size > not_all else 0))


def _wires(options: dict[str, Any]) -> list[WireFormat]:
    return [WireFormat.parse(options[name]) for name in ("wire", "gather_wire") if name in options]


def _floats(seed: int, rank: int, shape: list[int], dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    rows = torch.randn(shape, generator=generator) * 2.0 ** (seed % 9 - 4)
    return rows.to(getattr(torch, dtype))


def _whole(seed: int, rank: int, shape: list[int]) -> torch.Tensor:
    """Whole numbers so small that float32 holds all sums of their products, in any order."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-3, 4, shape, generator=generator).float()


def _anything(seed: int, rank: int, shape: list[int], dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randint(0, 4, shape, generator=generator)
    return values > 1 if dtype == "bool" else values.to(getattr(torch, dtype))


def _arrived(rows: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """What rows, or a segment of a flat tensor, are when they have travelled."""
    if not wire.quantized or not rows.numel():
        return rows
    if rows.dim() == 1:
        return round_reference(through(rows, FLAT_ROW, wire, rows.dtype), rows.dtype, saturate=True)
    flat = rows.reshape(len(rows), -1)
    return dequantize_reference(quantize_reference(flat, wire), wire, flat.shape[1], rows.dtype).view(rows.shape)


def _near(expected: torch.Tensor, got: torch.Tensor, error: float) -> bool:
    """Whether results are equal; or differ by so much of an element, and a little more where it is large."""
    if not error or expected.shape != got.shape or not expected.numel():
        return torch.equal(expected, got)
    return float((expected - got).abs().max()) <= error + 0.05 * float(expected.abs().max())


def _same(name: str, expected: torch.Tensor, got: torch.Tensor) -> None:
    if expected.dtype in DTYPES:
        assert_same_bits(name, expected, got)
    else:
        assert expected.dtype == got.dtype and torch.equal(expected, got), (name, expected, got)


# ---------------------------------------------------------------------------------------------------------------------
# Programs


def draw_autocast_program(seed: int, world: int) -> list[str]:
    """The lines of a program of rounds and backward alone, under autocast."""
    rng = random.Random(f"autocast {seed} {world}")
    lines = [
        f"g.autocast = {rng.choice(AUTOCAST)!r}",
        f"g.split('two', [{[*range(world)]}], {rng.choice(HOSTS[world])!r})",
    ]
    trainers = [(f"trainer{number}", rng.choice((1, 2))) for number in range(rng.randint(1, 2))]
    for name, lanes in trainers:
        transport, wire = rng.choice(("direct", "staged", "two_level")), rng.choice(("none", "none", "int8"))
        lines.append(
            f"g.make_trainer({name!r}, {'two' if transport == 'two_level' else 'world'!r}, {rng.randrange(1 << 20)}, "
            f"{lanes}, {transport!r}, {wire!r})"
        )
    pending = []
    for number in range(rng.randint(2, 4)):
        (trainer, lanes), name, routed = rng.choice(trainers), f"train{number}", rng.random() < 0.7
        kind = rng.choice(("train", "train", "train", "backward"))
        if kind == "train":
            lane, halves, draw = rng.randrange(lanes), rng.random() < 0.3, rng.randrange(1 << 20)
            lines.append(f"g.train({name!r}, {trainer!r}, {lane}, {draw}, {halves}, [], {routed})")
            lines += [_draw_part(rng, name) for _ in range(rng.randint(0, 1)) if routed]
        else:
            name, what = f"backward{number}", rng.choice(("all_reduce", "reduce_scatter", "all_gather", "all_to_all_v"))
            transport = rng.choice(("direct", "staged"))
            lines.append(f"g.backward({name!r}, {what!r}, {rng.randrange(1 << 20)}, 'world', {transport!r})")
        pending.append(name)
        if rng.random() < 0.4:
            lines.append(f"g.wait({pending.pop(rng.randrange(len(pending)))!r})")
    return lines + [f"g.wait({name!r})" for name in rng.sample(pending, len(pending))]


def draw_program(seed: int, world: int, interrupted: bool = False) -> list[str]:
    """The lines of a program for so many ranks; `interrupted` is one of those that such a program holds."""
    rng = random.Random(f"{seed} {world}")
    comms, lines, pending = ["world"], list[str](), list[str]()
    rounds, eps, trainers = dict[tuple[str, int], str](), dict[str, int](), dict[str, int]()
    if interrupted:
        lines.append(f"g.make_trainer('trainer', 'world', {seed}, 2, {rng.choice(('direct', 'staged'))!r})")
        trainers["trainer"] = 2
    for number in range(rng.randint(2, 5) if interrupted else rng.randint(6, 16)):
        if pending and rng.random() < 0.35:
            lines.append(f"g.wait({pending.pop(rng.randrange(len(pending)))!r})")
        if rounds and rng.random() < 0.5:
            lines.append(f"g.end({rounds.pop(rng.choice(list(rounds)))!r})")
        graphs = [name for name in pending if name.startswith(("backward", "train"))]
        if graphs and rng.random() < 0.5:
            name = rng.choice(graphs)
            lines += [_draw_part(rng, name) for _ in range(rng.randint(1, 3))]
        draw, of = rng.randrange(1 << 20), rng.choice(comms)
        later = rng.random() < 0.4
        transport, dtype = rng.choice(("direct", "staged", "auto")), rng.choice(("float32", "float16", "bfloat16"))
        wire = rng.choice((*WIRES, "int10+h64", "int8", "none"))
        shape = rng.choice(([7], [3000], [4, 130], [33, 5, 3], [1, 1], [9000]))
        through_ = f"wire={wire!r}, transport={transport!r}, later={later}"
        kind = rng.choice((
            "split", "all_reduce", "all_reduce", "reduce_scatter", "all_gather", "all_gather_v", "all_to_all_v",
            "all_to_all_v", "exact_to_all", "int8_reduce", "exact_reduce", "exact_move", "host", "ep", "dispatch",
            "dispatch", "refused", "backward", "trainer", "train", "train", "interrupt",
        ))  # fmt: skip
        if interrupted and kind in ("split", "refused", "trainer", "interrupt", "ep", "dispatch"):
            kind = "train"
        name = f"{kind}{number}"
        if kind == "split":
            ranks = rng.sample(range(world), world)
            cut = rng.randint(1, world)
            groups = [sorted(group) for group in (ranks[:cut], ranks[cut:]) if group]
            lines.append(f"g.split({name!r}, {groups})")
            comms.append(name)
        elif kind == "all_reduce":
            gather = rng.choice(("none", "int8", wire))
            lines.append(f"g.{kind}({name!r}, {draw}, {shape}, {dtype!r}, {of!r}, gather_wire={gather!r}, {through_})")
        elif kind in ("reduce_scatter", "all_gather"):
            lines.append(f"g.{kind}({name!r}, {draw}, {shape}, {dtype!r}, {of!r}, {through_})")
        elif kind in ("all_gather_v", "all_to_all_v", "exact_to_all"):
            tail, told = rng.choice(([], [5], [130], [2, 3])), rng.random() < 0.5
            into = f"into={rng.choice(('', '', 'a tensor'))!r}, " if kind != "all_gather_v" else ""
            if kind == "exact_to_all":
                kind, dtype, wire = "all_to_all_v", rng.choice(EXACT_DTYPES), "none"
                through_ = f"wire='none', transport={transport!r}, later={later}"
            lines.append(f"g.{kind}({name!r}, {draw}, {tail}, {dtype!r}, {of!r}, told={told}, {into}{through_})")
        elif kind == "int8_reduce":
            lines.append(f"g.int8_reduce({draw}, {rng.choice(([3, 8], [40, 130]))}, {dtype!r}, {of!r}, {transport!r})")
        elif kind == "exact_reduce":
            op, exact = rng.choice(("sum", "min", "max", "prod")), rng.choice(("int64", "int32", "float64"))
            shape = rng.choice(([5], [3, 4], [20_000]))
            lines.append(f"g.{kind}({name!r}, {draw}, {shape}, {exact!r}, {op!r}, {of!r}, {later})")
        elif kind == "exact_move":
            move = rng.choice(("broadcast", "all_gather", "gather", "scatter", "all_to_all"))
            exact = rng.choice(EXACT_DTYPES)
            lines.append(f"g.{kind}({name!r}, {draw}, {shape}, {exact!r}, {move!r}, {of!r}, {later})")
        elif kind == "host":
            lines.append(f"g.host({rng.choice(('barrier', 'counts', 'object'))!r}, {of!r}, {draw})")
        elif kind == "ep" and len(eps) < 2:
            lanes = rng.choice((1, 2))
            lines.append(f"g.make_ep({name!r}, {of!r}, {draw}, {lanes})")
            eps[name] = lanes
        elif kind == "dispatch" and eps:
            ep = rng.choice(list(eps))
            lane = rng.randrange(eps[ep])
            if (ep, lane) in rounds:  # a dispatch would close the open round
                lines.append(f"g.end({rounds.pop((ep, lane))!r}, {rng.choice((None, draw))})")
            lines.append(f"g.dispatch({name!r}, {ep!r}, {lane}, {draw})")
            rounds[ep, lane] = name
        elif kind == "backward":
            what = rng.choice(("all_reduce", "reduce_scatter", "all_gather", "all_gather_v", "all_to_all_v"))
            lines.append(f"g.backward({name!r}, {what!r}, {draw}, {of!r}, {transport!r})")
            pending.append(name)
        elif kind == "trainer" and len(trainers) < 2:
            lanes = rng.choice((1, 2))
            lines.append(f"g.make_trainer({name!r}, {of!r}, {draw}, {lanes}, {transport!r})")
            trainers[name] = lanes
        elif kind == "train" and trainers:
            trainer = rng.choice(list(trainers))
            kinds = rng.choices(("an open round", "a refused combine", "another layer"), k=rng.choice((0, 0, 1, 2)))
            faults = [(kind, rng.randrange(1 << 20)) for kind in kinds]
            lane, halves = rng.randrange(trainers[trainer]), rng.random() < 0.3
            lines.append(f"g.train({name!r}, {trainer!r}, {lane}, {draw}, {halves}, {faults})")
            pending.append(name)
        elif kind == "interrupt":
            rank, at = rng.randrange(world), int(EVENTS ** rng.random())
            inner = draw_program(draw, world, interrupted=True)
            lines.append(f"g.interrupt({rank}, {at}, {rng.choice(('KeyboardInterrupt', 'Interrupted'))!r}, {inner})")
        elif kind == "refused":
            what = rng.choice(("scalar", "counts", "wire", "op", "transport", "rank"))
            lines.append(f"g.refused({what!r}, {rng.randrange(world)}, {of!r})")
        if later and kind in _LATER:
            pending.append(name)
    lines += [f"g.wait({name!r})" for name in rng.sample(pending, len(pending))]
    lines += [f"g.end({name!r})" for name in rounds.values()]
    return lines


def _draw_part(rng: random.Random, name: str) -> str:
    """A line that differentiates a part of a graph."""
    if name.startswith("backward"):
        return f"g.part({name!r}, 'y', ['x'])"
    loss = rng.choice(("y", "d.tokens"))
    among = ("x", "weights", "scales", "d.tokens") if loss == "y" else ("x", "weights")
    return f"g.part({name!r}, {loss!r}, {rng.sample(among, rng.choice((1, 1, 2)))})"


def run_program(comm: Communicator, lines: list[str]) -> Counter[str]:
    """One rank's run of a program; returns how often what was called."""
    ground = Ground(comm)
    for line in lines:
        _run_line(ground, line)
    ground.close()
    return ground.seen


def run_programs(
    comm: Communicator, seeds: list[int], draw: Callable[[int, int], list[str]] = draw_program
) -> Counter[str]:
    """One rank's run of several; what fails names its seed."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen += run_program(comm, draw(seed, comm.size))
        except Exception as error:
            error.add_note(f"in the program of seed {seed}")
            raise
    return seen


def script(seed: int, world: int, mode: str, draw: Callable[[int, int], list[str]] = draw_program) -> str:
    """A program as a script."""
    lines = "\n".join(f"    {line}" for line in draw(seed, world))
    return (
        "from verification.soak.programs import Ground\nfrom thinwire.testing import run_ranks\n\n\n"
        f"def program(comm):\n    g = Ground(comm)\n{lines}\n    g.close()\n\n\n"
        f'if __name__ == "__main__":\n    run_ranks(program, {world}, mode={mode!r})'
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="programs in all")
    parser.add_argument("--seed", type=int, default=1, help="of the first")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="to begin new ones for")
    parser.add_argument("--autocast", action="store_true", help="rounds under autocast alone")
    parser.add_argument("--json", help="write what was run there")
    arguments = parser.parse_args()
    stored = read_json(arguments.json, seed=arguments.seed)
    draw, worlds = (draw_autocast_program, WORLDS[:3]) if arguments.autocast else (draw_program, WORLDS)
    seen, failed = Counter[str](stored.get("calls", {})), list(stored.get("failed", ()))
    done, before, start = stored.get("programs", 0), stored.get("seconds", 0.0), time.monotonic()
    while done < arguments.count and time.monotonic() < start + arguments.seconds:
        world, mode = worlds[done // BATCH % len(worlds)]
        chosen = [arguments.seed + number for number in range(done, min(done + BATCH, arguments.count))]
        try:
            seen += run_ranks(run_programs, world, chosen, draw, mode=mode, timeout=300)[0]
        except (RankError, RanksTimeout) as error:
            text = str(error)
            wrong = next((seed for seed in chosen if f"in the program of seed {seed}\n" in text + "\n"), chosen[0])
            failed.append({"seed": wrong, "world": world, "mode": mode, "error": text})
            print(f"{text}\n\n# seed {wrong}\n{script(wrong, world, mode, draw)}\n", flush=True)
        done += len(chosen)
        seconds = round(before + time.monotonic() - start, 1)
        figures = {"programs": done, "seconds": seconds, "failed": failed, "calls": dict(sorted(seen.items()))}
        if arguments.json:
            command = shlex.join(["python", "-m", "verification.soak.programs", *sys.argv[1:]])
            where = machine(torch.device("cpu"))
            write_json(arguments.json, command=command, machine=where, seed=arguments.seed, **figures)
    print(f"{done} programs, {sum(seen.values())} calls on rank 0, {len(failed)} batches failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
