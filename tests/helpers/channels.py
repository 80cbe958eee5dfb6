"""Calls on a channel by itself, without a communicator and without the checks of `all_to_all_v`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from thinwire.fused.channel import RecvBuffer, Transfer
from thinwire.fused.counts import Segments
from thinwire.fused.device_channel import DeviceChannel
from thinwire.wire import WireFormat


def send_rows(
    channel: DeviceChannel,
    x: torch.Tensor,
    tail: torch.Size,
    sends: Segments,
    recv_buffer: RecvBuffer | None,
    place: Callable[[list[int]], RecvBuffer] | None,
    wire: WireFormat,
    *,
    wait: bool,
) -> Transfer:
    """Begins a call, as `DeviceChannel.begin` does for rows of shape `tail`; with `wait` it is over on return."""
    call: Any = SimpleNamespace(tail=tail, sends=sends, receives=None, wire=wire, route=None)
    comm: Any = SimpleNamespace(num_programs=None)
    end: Any = channel.begin(comm, call, x, recv_buffer, place, wait)
    transfer: Transfer = end.__self__
    return transfer
