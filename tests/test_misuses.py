"""What newcomers do wrong: each is answered at once, with what was passed, what is accepted and what to do instead."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("numba", reason="CPU ranks need numba")

import torch

import thinwire as tw
from thinwire.testing import RankError, run_ranks

EXPERTS, TOP_K, HIDDEN, MOST = 8, 2, 256, 64


class Ground(NamedTuple):
    """What a misuse starts from: a rank of two, and arguments that would be right."""

    comm: tw.Communicator
    ep: tw.ExpertParallel
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def make(self, **changed: Any) -> tw.ExpertParallel:
        sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "max_tokens": MOST}
        return tw.ExpertParallel(self.comm, **sizes | changed)


def _combine_twice(g: Ground) -> None:
    d = g.ep.dispatch(g.x, g.ids, g.weights)
    rows = d.tokens
    g.ep.combine(rows, d)
    g.ep.combine(rows, d)


def _dispatch_twice(g: Ground) -> None:
    first = g.ep.dispatch(g.x, g.ids, g.weights)
    g.ep.dispatch(g.x, g.ids, g.weights).abandon()
    g.ep.combine(first.tokens, first)


def _other_rows(g: Ground) -> None:
    d = g.ep.dispatch(g.x, g.ids, g.weights)
    try:
        g.ep.combine(d.tokens[1:], d)
    finally:
        d.abandon()


def _after_close(g: Ground) -> None:
    part = g.comm.split(groups=[[0, 1]])
    ep = tw.ExpertParallel(part, EXPERTS, TOP_K, HIDDEN, MOST)
    part.close()
    ep.dispatch(g.x, g.ids, g.weights)


def _drop(g: Ground) -> None:
    """A forgotten combine, which a warning tells of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        g.ep.dispatch(g.x.clone().requires_grad_(), g.ids, g.weights)
        d = g.ep.dispatch(g.x, g.ids, g.weights)
    d.abandon()
    for warning in caught:
        raise warning.message


def _two_threads(g: Ground) -> None:
    """One of them is in a call that no peer has come to."""
    waiting = threading.Thread(target=g.comm.barrier)
    g.comm.barrier()
    with g.comm.call("another call", numbered=False):
        refused: list[BaseException] = []
        caller = threading.Thread(target=lambda: _catch(lambda: g.comm.all_reduce(g.x), refused))
        caller.start()
        caller.join()
    waiting.start()
    waiting.join()  # and then it is another thread's turn
    raise refused[0]


def _catch(call: Callable[[], object], caught: list[BaseException]) -> None:
    try:
        call()
    except BaseException as error:
        caught.append(error)


def _no_module(g: Ground) -> None:
    tw.LocalExperts(g.ep, torch.nn.Linear(8, 8))  # type: ignore[arg-type]


def _much_memory(g: Ground) -> None:
    with warnings.catch_warnings(record=True) as caught:
        g.make(max_tokens=10**9).close()
    for warning in caught:
        raise warning.message


#: What is done, and what the error and its text match.
MISUSES: dict[str, tuple[Callable[[Ground], object], str]] = {
    "wrong hidden": (lambda g: g.ep.dispatch(g.x[:, 1:], g.ids, g.weights), r"\[4, 255\]; .*, 256\] is needed"),
    "wrong dtype": (lambda g: g.ep.dispatch(g.x.int(), g.ids, g.weights), r"RoutingError: .*x is torch.int32"),
    "float ids": (lambda g: g.ep.dispatch(g.x, g.ids.float(), g.weights), r"RoutingError: .*int32 or int64"),
    "an expert too many": (lambda g: g.ep.dispatch(g.x, g.ids + 99, g.weights), r"experts are 0 \.\.\. 7"),
    "ids and weights swapped": (lambda g: g.ep.dispatch(g.x, g.weights, g.ids), r"topk_ids is torch.float32"),
    "three experts a token": (
        lambda g: g.ep.dispatch(g.x, g.ids[:, [0, 1, 1]], g.weights), r"RoutingError: .*int64 \[4, 2\] is needed"),
    "batch and sequence": (
        lambda g: g.ep.dispatch(g.x[None], g.ids, g.weights), r"RoutingError: .*x\.flatten\(0, -2\) makes it so"),
    "too few rows": (_other_rows, r"expert_out is torch.float32 \[7, 256\]; .*\[8, 256\]"),
    "ranks' max_tokens differ": (lambda g: g.make(max_tokens=4 + g.comm.rank), r"ConfigMismatch: .*max_tokens"),
    "ranks' wires differ": (lambda g: g.make(wire=("int8", "int4")[g.comm.rank]), r"ConfigMismatch: .*int4"),
    "an unknown wire": (lambda g: g.make(wire="int7"), r"WireFormatError: .*'int7'; accepted: none, int8, int8\+h64,"),
    "negative max_tokens": (lambda g: g.make(max_tokens=-1), r"max_tokens is -1; an int of"),
    "more experts a token than there are": (
        lambda g: g.make(top_k=9), r"RoutingError: .*top_k is 9; expected 1 to 8: .* at most 32"),
    "a module for a function": (_no_module, r"ArgumentError: factory is a Linear; expected a function of an expert"),
    "two threads": (_two_threads, r"ThinwireError: another thread is in another call on .* from one thread at a time"),
    "a forgotten combine": (_drop, r"RuntimeWarning: lane 0: a round whose x .* not combined"),
    "numpy": (lambda g: g.ep.dispatch(np.zeros((4, 256)), g.ids, g.weights), r"x is a ndarray; a torch.Tensor is"),
    "meta": (
        lambda g: g.ep.dispatch(g.x.to("meta"), g.ids, g.weights), r"ArgumentError: x lives on meta, .* live on cpu"),
    "no group": (lambda g: tw.ExpertParallel(None, 8, 2, 256, 64), r"ArgumentError: .*None"),
    "counts that differ": (
        lambda g: tw.all_to_all_v(g.x, [2, 2], [2 - g.comm.rank, 1 + g.comm.rank], comm=g.comm), r"sends rank . 2"),
    "one count": (lambda g: tw.all_to_all_v(g.x, [4], [4], comm=g.comm), r"send_counts has 1 entries; this group has"),
    "integers in int8": (
        lambda g: tw.all_reduce(g.ids, wire="int8", comm=g.comm), r"WireFormatError: .*pass wire=.none."),
    "after close": (_after_close, r"LaneError: .*this ExpertParallel is closed, as this communicator is closed"),
    "memory that is not there": (_much_memory, r"takes the staged transport, which is slower: .* bytes"),
    "more tokens than there is room": (
        lambda g: g.ep.dispatch(*(each.repeat(25, 1) for each in g[2:])), r"CapacityError: .*max_tokens=100\)"),
    "combined twice": (_combine_twice, r"LaneError: .*is over: it was combined"),
    "a second dispatch before combine": (_dispatch_twice, r"LaneError: .*a later dispatch took its lane; .*lanes="),
}  # fmt: skip


def _answers(comm: tw.Communicator) -> dict[str, str]:
    answers = {}
    with tw.ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, MOST) as ep:
        ids = torch.tensor([[0, 7], [1, 6], [2, 5], [3, 4]])
        ground = Ground(comm, ep, torch.randn(4, HIDDEN), ids, torch.full((4, TOP_K), 0.5))
        for name, (misuse, _) in MISUSES.items():
            try:
                misuse(ground)
                answers[name] = "was accepted"
            except (tw.ThinwireError, RuntimeWarning) as error:
                answers[name] = f"{type(error).__name__}: {error}"
            comm.barrier()
        d = ep.dispatch(ground.x, ids, ground.weights)  # after all that it is as good as new
        y = ep.combine(d.tokens, d)
        assert (y - ground.x).norm() < 0.02 * ground.x.norm()
    return answers


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[str, str]]:
    first, second = run_ranks(_answers, 2, timeout=240)
    return {name: (first[name], second[name]) for name in MISUSES}


@pytest.mark.parametrize("name", MISUSES)
def test_every_rank_is_answered(name: str, answers: dict[str, tuple[str, str]]) -> None:
    for answer in answers[name]:
        assert re.search(MISUSES[name][1], answer, re.DOTALL), answer


def _told(code: str) -> str:
    """The last line of standard error of a program that fails."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0, done.stdout
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import torch; tw.all_reduce(torch.ones(4))", "there is no default communicator: call thinwire.init() first"),
        ("tw.init(); raise SystemExit(1)", "one rank, as no launcher was found: torchrun --nproc-per-node N starts N"),
        ("tw.init(rank=0, world_size=2)", "MASTER_ADDR"),
        ("tw.init(device='cuda')", "device is 'cuda', and no GPU is visible: pass device='cpu'"),
        ("tw.init(device='cuda:3')", "device is 'cuda:3', and no GPU is visible: pass device='cpu'"),
    ],
)
def test_joining_wrongly_is_answered(code: str, words: str) -> None:
    assert words in _told(f"import thinwire as tw; {code}")


def test_a_rank_that_calls_alone_is_told_who_did_not_come() -> None:
    with pytest.raises(RankError, match="PeerTimeout.*rank 1"):
        run_ranks(_calls_alone, 2)


def _calls_alone(comm: tw.Communicator) -> None:
    part = tw.Communicator(comm.group, timeout=1.0)
    if comm.rank == 0:
        part.barrier()
