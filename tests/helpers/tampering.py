"""What a faulty link or memory does to messages on their way, between ranks that are threads of this process."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from thinwire.comm.communicator import Communicator
from thinwire.comm.threads import ThreadWorld


class Arrival(NamedTuple):
    """A message, or the sums of one, uint8 [bytes], where it lies at its receiver."""

    label: str
    peer: int
    octets: torch.Tensor


#: What is done to the newest of all arrivals at a rank so far, which begin with the oldest; True: that is all.
Tamper = Callable[[list[Arrival]], None]


def tamper_with(comm: Communicator, tamper: Tamper) -> None:
    """Has all that arrives at a rank go through `tamper`, each message by itself, before anybody looks at it."""
    exchange: Any = comm._exchange
    start, complete = exchange._start, exchange.complete
    under_way: dict[Any, list[Arrival]] = {}
    seen: list[Arrival] = []

    def started(sends: Any, receives: Any, label: str, sizes: Any) -> Any:
        posted = start(sends, receives, label, sizes)
        arriving = ((peer, buffer) for peer, buffer in enumerate(receives) if isinstance(buffer, torch.Tensor))
        under_way[posted] = [Arrival(label, peer, buffer) for peer, buffer in arriving if buffer.numel()]
        return posted

    def completed(posted: Any, *, block_host: bool = False) -> None:
        complete(posted, block_host=block_host)
        for arrival in under_way.pop(posted, ()):
            seen.append(arrival)
            tamper(seen)
            seen[-1] = arrival._replace(octets=arrival.octets.clone())

    exchange._start, exchange.complete = started, completed


def flip_a_bit(rng: random.Random, octets: torch.Tensor) -> None:
    octets[rng.randrange(octets.numel())] ^= 1 << rng.randrange(8)


def swap_two_words(rng: random.Random, octets: torch.Tensor) -> None:
    size = rng.choice((1, 4, 8, 32))
    if octets.numel() >= 2 * size:
        words = octets[: octets.numel() // size * size].view(-1, size)
        words[rng.sample(range(len(words)), 2)] = words[rng.sample(range(len(words)), 2)].clone()


def zero_a_stretch(rng: random.Random, octets: torch.Tensor) -> None:
    first = rng.randrange(octets.numel())
    octets[first : first + rng.choice((1, 16, 256, 1 << 20))] = 0


def draw_anew(rng: random.Random, octets: torch.Tensor) -> None:
    octets.random_(0, 256, generator=torch.Generator().manual_seed(rng.getrandbits(30)))


#: What happens to one message.
CHANGES = (flip_a_bit, swap_two_words, zero_a_stretch, draw_anew)


def run_threads(size: int, work: Callable[[Communicator], Any], timeout: float = 20.0, **options: Any) -> list[Any]:
    """What each rank's `work` gives, or the exception that it raises, on communicators of threads that are closed."""
    comms = Communicator.of_threads(ThreadWorld(size), timeout=timeout, **options)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(comms[rank])
        except Exception as error:
            results[rank] = error
        finally:
            comms[rank].close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def same(results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors have the same bytes."""
    pairs = zip(results, others, strict=True)
    return all(torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)) for a, b in pairs)
