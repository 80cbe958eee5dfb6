"""What is planned before is what an ExpertParallel holds then, and what its rounds send, to the byte."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.helpers.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.fused.staged import StagedExchange
from thinwire.moe.config import ParallelSettings
from thinwire.moe.memory import plan_memory
from thinwire.moe.routing import expert_range
from thinwire.testing import run_ranks
from thinwire.tools.planning.plan import RoundMemory, plan_traffic, reach, staged_memory

WIRES = ("none", "int8", "int8:row", "int8:32", "int4", "fp8")

# ---------------------------------------------------------------------------------------------------------------------
# Memory


def configuration(generator: random.Random) -> tuple[int, dict[str, Any]]:
    num_experts = generator.randint(1, 37)
    dtype = generator.choice((None, torch.float32, torch.float16, torch.bfloat16))
    return generator.randint(1, 4), {
        "num_experts": num_experts,
        "top_k": generator.randint(1, min(9, num_experts)),
        "hidden_size": generator.randint(1, 700),
        "max_tokens": generator.randint(0, 90),
        "wire": generator.choice(WIRES),
        "combine_wire": generator.choice((None, *WIRES)),
        "grad_wire": generator.choice(("none", "int8")),
        "transport": generator.choice(("auto", "direct", "direct", "staged")),
        "lanes": generator.randint(1, 3),
        "align": generator.choice((1, 16, 100)),
        "invariant": generator.random() < 0.3,
        "dtype": dtype,
    }


def tensors_in(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors that an object holds, through its attributes; nothing that belongs to its communicator."""
    if id(value) in seen or isinstance(value, Communicator | type):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple | set):
        held = value.values() if isinstance(value, dict) else value
        yield from (found for each in held for found in tensors_in(each, seen))
    elif type(value).__module__.startswith("thinwire.") and hasattr(value, "__dict__"):
        yield from tensors_in(vars(value), seen)


def bytes_held(ep: tw.ExpertParallel) -> int:
    """Of all storages that the object's tensors have, each once; peers' buffers are the peers'."""
    memories = [rounds.memory for rounds in ep._assembly.all_rounds if hasattr(rounds, "memory")]
    peers = {int(at) for memory in memories for at in memory.buffer_ptrs} - {m.local.data_ptr() for m in memories}
    storages = {found.untyped_storage() for found in tensors_in(vars(ep), set())}
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
    return sum(size for at, size in sizes.items() if at not in peers)


def measure(comm: Communicator, settings: dict[str, Any]) -> tuple[int, int, int, int, str]:
    with tw.ExpertParallel(comm, **settings) as ep:
        made = ep.memory_bytes
        count = min(3, ep.max_tokens)
        x = torch.randn(count, ep.hidden_size, dtype=settings["dtype"] or torch.float32, requires_grad=True)
        ids = torch.randint(-1, ep.num_experts, (count, ep.top_k))
        for lane in range(ep.lanes):
            with torch.no_grad():
                d = ep.dispatch(x[:1], ids[:1], torch.rand(ids[:1].shape), lane=lane)
                ep.combine(d.tokens, d)
        held = bytes_held(ep)
        for lane in range(ep.lanes):
            d = ep.dispatch(x, ids, torch.rand(ids.shape), lane=lane)
            ep.combine(d.tokens, d).sum().backward()
            d = None
        return made, held, ep.memory_bytes, bytes_held(ep), ep.transport


@pytest.mark.parametrize("seed", exhaustive_but(range(4), range(44)))
def test_what_is_planned_is_what_is_held(seed: int) -> None:
    ranks, settings = configuration(random.Random(seed))
    for rank, found in enumerate(run_ranks(measure, ranks, settings, mode="thread")):
        plan = plan_memory(ranks, rank=rank, heap="threads", **settings)
        planned = [plan.forward_bytes] * 2 + [plan.training_bytes] * 2 + [plan.transport]
        assert planned == list(found), (seed, rank, settings)


def _of_processes(comm: Communicator) -> tuple[int, int, int]:
    settings: dict[str, Any] = {"num_experts": 5, "top_k": 2, "hidden_size": 96, "max_tokens": 33, "lanes": 2}
    with tw.ExpertParallel(comm, **settings, transport="direct") as ep:
        plan = plan_memory(comm.size, rank=comm.rank, heap="posix", **settings)
        assert plan.forward_bytes == ep.memory_bytes
        maps = Path("/proc/self/maps").read_text().splitlines()
        ranges = [line.split()[0].split("-") for line in maps if "memfd:thinwire" in line]
        own, peers = (int(end, 16) - int(start, 16) for start, end in ranges)
        return plan.symmetric_bytes, own, peers


def test_ranks_that_are_processes_hold_whole_pages() -> None:
    for planned, own, peers in run_ranks(_of_processes, 2):
        assert own == peers == planned - 2 * 8  # and two addresses


# ---------------------------------------------------------------------------------------------------------------------
# Traffic


@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(7, 3, 3), (5, 1, 4), (6, 6, 2), (3, 2, 5), (8, 2, 1)])
def test_the_fan_out_is_that_of_counting_all_sets(experts: int, top_k: int, ranks: int) -> None:
    owner = {expert: rank for rank in range(ranks) for expert in expert_range(experts, ranks, rank)}
    sets = [{owner[expert] for expert in chosen} for chosen in itertools.combinations(range(experts), top_k)]
    counted = [sum(rank in owners for owners in sets) / len(sets) for rank in range(ranks)]
    assert reach(experts, top_k, ranks) == pytest.approx(counted, rel=1e-12)


def settings_of(**changed: Any) -> ParallelSettings:
    given: dict[str, Any] = {
        "num_experts": 8, "top_k": 3, "hidden_size": 200, "max_tokens": 64, "wire": "int8", "combine_wire": "int8:row",
        "grad_wire": "none", "transport": "auto", "lanes": 1, "align": 1, "invariant": False,
        "num_programs": None, "timeout": None, "dtype": None,
    }  # fmt: skip
    return ParallelSettings.of(**given | changed)


def _every_set(comm: Communicator, transport: str, invariant: bool) -> list[tuple[int, int]]:
    """Rows and bytes of both legs, for one token of each set of 3 experts of 8: uniform routing, exactly."""
    ids = torch.tensor(list(itertools.combinations(range(8), 3)))
    wires: dict[str, Any] = {"wire": "int8", "combine_wire": "int8:row"}
    with tw.ExpertParallel(comm, 8, 3, 200, 64, **wires, transport=transport, invariant=invariant) as ep:
        d = ep.dispatch(torch.randn(len(ids), 200, dtype=torch.bfloat16), ids, torch.rand(ids.shape))
        legs = [d.dispatch_traffic, d.combine_traffic]
        ep.combine(d.tokens, d)
        return [(leg.rows, leg.wire_bytes) for leg in legs]


@pytest.mark.parametrize("transport", ["direct", "staged"])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_planned_bytes_are_those_that_a_round_sends(transport: str, invariant: bool, ranks: int) -> None:
    planned = plan_traffic(settings_of(invariant=invariant), ranks, 56, torch.bfloat16, transport)  # 8 choose 3
    for sent in run_ranks(_every_set, ranks, transport, invariant, mode="thread"):
        for leg, (rows, wire_bytes) in zip(planned, sent, strict=True):
            assert (leg.rows, leg.wire_bytes) == pytest.approx((rows, wire_bytes), rel=1e-12)
            alone = invariant and leg.name == "combine"
            assert leg.own_rows == pytest.approx(56 * (3 / ranks if alone else reach(8, 3, ranks)[0]))


def _staged_round(comm: Communicator, ids: torch.Tensor, settings: dict[str, Any]) -> None:
    with tw.ExpertParallel(comm, transport="staged", **settings) as ep:
        x = torch.randn(len(ids), settings["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
        d = ep.dispatch(x, ids, torch.rand(ids.shape, requires_grad=True))
        ep.combine(d.tokens, d).sum().backward()


def _messages(monkeypatch: pytest.MonkeyPatch, ids: torch.Tensor, settings: dict[str, Any]) -> RoundMemory:
    """What rank 0's messages take in a round of three ranks that dispatch `ids`; as `most_bytes` and so on."""
    sizes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    post = StagedExchange.post.__func__  # type: ignore[attr-defined]

    def watched(cls: Any, comm: Communicator, sends: Any, receives: Any, record: int, *rest: Any, **more: Any) -> Any:
        sizes[comm.rank].append((record * sum(sends), record * sum(receives)))
        return post(cls, comm, sends, receives, record, *rest, **more)

    monkeypatch.setattr(StagedExchange, "post", classmethod(watched))
    run_ranks(_staged_round, 3, ids, settings, mode="thread")
    (leave, arrive), combine, *backward = sizes[0]
    assert len(backward) == 2
    forward = max(leave + arrive, arrive + sum(combine))
    return RoundMemory(forward, forward, max(forward, *map(sum, backward)))


@pytest.mark.parametrize("wire", ["int8", "none"])
@pytest.mark.parametrize(
    ("top_k", "ids", "invariant"),
    # The last are both experts of rank 0: the most sums, not the most tokens.
    [(4, [0, 1, 2, 4], False), (2, [0, 2], False), (2, [0, 1], True)],
)
def test_no_round_takes_more_than_the_most_that_is_planned(
    top_k: int, ids: list[int], invariant: bool, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"num_experts": 6, "top_k": top_k, "hidden_size": 200, "max_tokens": 40, "wire": wire}
    planned = staged_memory(settings_of(**settings, combine_wire=None, invariant=invariant), 3, torch.bfloat16)
    found = _messages(monkeypatch, torch.tensor([ids]).expand(40, -1), settings | {"invariant": invariant})
    assert found.most_bytes == planned.most_bytes
    assert invariant or found.training_bytes == planned.training_bytes


@pytest.mark.parametrize("invariant", [False, True])
def test_the_messages_of_uniform_routing_are_those_of_every_set(
    invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor(list(itertools.combinations(range(8), 3)))
    settings: dict[str, Any] = {"num_experts": 8, "top_k": 3, "hidden_size": 200, "max_tokens": 56, "wire": "int8"}
    one, three = (
        staged_memory(settings_of(**settings, combine_wire=None, invariant=invariant, lanes=lanes), 3, torch.bfloat16)
        for lanes in (1, 3)
    )
    found = _messages(monkeypatch, ids, settings | {"invariant": invariant})
    assert found.uniform_bytes == one.uniform_bytes
    assert three.uniform_bytes == pytest.approx(3 * found.uniform_bytes, abs=3)
