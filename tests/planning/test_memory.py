"""What `plan_memory` says before is what an ExpertParallel holds then, to the byte."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire.comm.communicator import Communicator
from thinwire.moe.memory import plan_memory
from thinwire.testing import run_ranks

WIRES = ("none", "int8", "int8:row", "int8:32", "int4", "fp8")


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
    elif isinstance(value, dict):
        yield from (found for held in value.values() for found in tensors_in(held, seen))
    elif isinstance(value, list | tuple | set):
        yield from (found for held in value for found in tensors_in(held, seen))
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


def compare(seed: int) -> None:
    ranks, settings = configuration(random.Random(seed))
    for rank, found in enumerate(run_ranks(measure, ranks, settings, mode="thread")):
        made, held, training, held_training, transport = found
        plan = plan_memory(ranks, rank=rank, heap="threads", **settings)
        assert plan.transport == transport
        assert plan.forward_bytes == made, (seed, rank, settings)
        assert (plan.forward_bytes, plan.training_bytes) == (held, training), (seed, rank, settings)
        assert plan.training_bytes == held_training, (seed, rank, settings)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_planned_is_what_is_held(seed: int) -> None:
    compare(seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4, 44))
def test_what_is_planned_is_what_is_held_with_many_settings(seed: int) -> None:
    compare(seed)


def _of_processes(comm: Communicator) -> tuple[int, int, int]:
    settings: dict[str, Any] = {"num_experts": 5, "top_k": 2, "hidden_size": 96, "max_tokens": 33, "lanes": 2}
    with tw.ExpertParallel(comm, **settings, transport="direct") as ep:
        plan = plan_memory(comm.size, rank=comm.rank, heap="posix", **settings)
        assert plan.forward_bytes == ep.memory_bytes
        ranges = [
            line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:thinwire" in line
        ]
        own, peers = (int(end, 16) - int(start, 16) for start, end in (each.split("-") for each in ranges))
        return plan.symmetric_bytes, own, peers


def test_ranks_that_are_processes_hold_whole_pages() -> None:
    for planned, own, peers in run_ranks(_of_processes, 2):
        assert own == peers == planned - 2 * 8  # and two addresses


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ranks": 0}, "ranks is 0"),
        ({"rank": 2}, "rank is 2, expected an int from 0 to 1"),
        ({"heap": "shm"}, "heap is 'shm', expected one of threads, posix, cuda"),
        ({"top_k": 33}, "top_k is 33"),
        ({"wire": "int9"}, "int9"),
        ({"ranks": 80, "transport": "direct"}, "up to 72 ranks"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(changed: dict[str, Any], said: str) -> None:
    settings: dict[str, Any] = {"ranks": 2, "num_experts": 4, "top_k": 2, "hidden_size": 8, "max_tokens": 8}
    with pytest.raises(tw.ThinwireError, match=said):
        plan_memory(**settings | changed)
