"""Whose clocks are one, and how far apart others are.

The ranks of one host read the same CLOCK_MONOTONIC. Between hosts it begins anywhere, so each rank asks rank 0 for its
time, a few times, and takes the answer that came fastest: rank 0 read its clock between question and answer, so their
middle is wrong by half the round trip at most (Cristian, "Probabilistic clock synchronization", 1989).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns

import torch

from thinwire.comm.exchange import Buffers, Exchange
from thinwire.comm.recorder.trace_events import Clock

_QUESTIONS = 16


def clock_name() -> str:
    """The same in processes whose monotonic clocks are one, and in no others."""
    try:
        # A namespace of time has an offset of its own.
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return platform.node()


def compare_clocks(exchange: Exchange, device: torch.device, now: Callable[[], int] = monotonic_ns) -> Clock:
    """How this rank's clock is read as rank 0's. Collective; blocks the host for some round trips a rank.

    Args:
        device: whose memory the exchange moves.
        now: this rank's clock, in nanoseconds.

    Raises:
        PeerTimeout: a rank did not answer.
    """
    own = Clock(0, 0, "rank 0's monotonic clock")
    for asking in range(1, exchange.size):
        samples = []
        for _ in range(_QUESTIONS if exchange.rank in (0, asking) else 0):
            if exchange.rank == 0:
                _receive(exchange, asking, device)
                _send(exchange, asking, device, now())
            else:
                start = now()
                _send(exchange, 0, device, start)
                told, end = _receive(exchange, 0, device), now()
                samples.append((end - start, told - (start + end) // 2))
        if samples:
            trip, offset = min(samples)
            own = Clock(offset, -(-trip // 2), f"rank 0's monotonic clock, asked {_QUESTIONS} times")
    return own


def _send(exchange: Exchange, peer: int, device: torch.device, value: int) -> None:
    words = torch.tensor([value], dtype=torch.int64, device="cpu").view(torch.uint8).to(device)
    exchange.post(_for(exchange, peer, words), [None] * exchange.size, "clocks").wait_on_host()


def _receive(exchange: Exchange, peer: int, device: torch.device) -> int:
    words = torch.zeros(8, dtype=torch.uint8, device=device)
    exchange.post([None] * exchange.size, _for(exchange, peer, words), "clocks").wait_on_host()
    return int(words.cpu().view(torch.int64))


def _for(exchange: Exchange, peer: int, words: torch.Tensor) -> Buffers:
    return [words if rank == peer else None for rank in range(exchange.size)]
