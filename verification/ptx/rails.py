"""Rounds over two levels on compiled kernels: each rank's launches in the order of `thinwire.moe.rails`.

The network is pretended: what is posted is copied when the sender's stream comes there, and the receiver's stream waits
for it. Copies are not looked at for races, and order nothing between ranks for who looks for them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from tests.helpers.rounds import arrivals, home_weight_grads
from tests.helpers.wires import assert_same_bits
from thinwire.comm.hosts import Hosts, forwarder, served_by
from thinwire.moe.rails import end_lines, layout_of, write_end_lines
from thinwire.triton_kernels import combine, dispatch, pack, permute, sums
from thinwire.triton_kernels.codec_reference import quantize_reference
from thinwire.triton_kernels.forward import forward_tokens
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH, Lane, RoundLayout
from thinwire.triton_kernels.signal import CONTROL_EPOCH, REPORT_STATUS, RUNNING, SIGNAL_FLAG, TIMED_OUT
from thinwire.triton_kernels.sums import pack_weighted_sums_reference, sum_records_reference
from thinwire.wire import EXACT, WireFormat
from verification.ptx.device import Device
from verification.ptx.rounds import Round, Rounds


@dataclass
class RailedRounds(Rounds):
    """Rounds of ranks on several hosts, of as many ranks each, one behind the other.

    Attributes:
        hosts: the ranks of each.
        home_bytes: of each rank's home at its forwarder.
        mail: what was sent from one rank to another and has not come, by leg.
        late: a rank that sends its sums once another one of its host, the second, has missed it, and before that one
            tells other hosts.
    """

    hosts: Hosts = ()
    home_bytes: int = 0
    mail: dict[tuple[int, int, str], deque[list[torch.Tensor]]] = field(default_factory=lambda: defaultdict(deque))
    late: tuple[int, int] | None = None

    @classmethod
    def on_hosts(
        cls, device: Device, hosts: Hosts, *, num_experts: int = 8, top_k: int = 3, hidden: int = 64,
        max_tokens: int = 3, wire: str = "int8", weight_grads: bool = False, seed: int = 0,
    ) -> RailedRounds:  # fmt: skip
        size, formats = sum(map(len, hosts)), WireFormat.parse(wire)
        known: dict[str, Any] = {
            "num_experts": num_experts, "top_k": top_k, "max_tokens": max_tokens, "wire": formats,
            "combine_wire": formats,
        }  # fmt: skip
        config: Any = SimpleNamespace(
            comm=SimpleNamespace(hosts=hosts, size=size), hidden_size=hidden, **known,
            lane_layout=lambda world, **more: RoundLayout.of(world=world, hidden=hidden, **known, **more),
        )  # fmt: skip
        layout = layout_of(config, weight_grads)
        home_bytes = (layout.NUM_BYTES - layout.SUMS) // len(hosts)
        buffers = [torch.zeros(layout.NUM_BYTES, dtype=torch.uint8) for _ in range(size)]
        lanes = []
        for rank, buffer in enumerate(buffers):
            here = next(number for number, members in enumerate(hosts) if rank in members)
            bases = torch.tensor([buffers[peer if peer in hosts[here] else rank].data_ptr() for peer in range(size)])
            takers = [forwarder(hosts, peer, here) for peer in range(size)]
            places = [served_by(hosts, taker).index(peer) for peer, taker in enumerate(takers)]
            message = torch.zeros(layout.MESSAGE_RECORDS + max_tokens * layout.RECORD_BYTES, dtype=torch.int8)
            lane = Lane.of(layout, formats, formats, rank, 1, buffer, bases)
            homes = bases[takers] + home_bytes * torch.tensor(places)
            lanes.append(replace(lane, home_ptrs=homes, message=message))
            for name, value in vars(lanes[-1]).items():
                if isinstance(value, torch.Tensor):
                    device.register(f"rank {rank}'s {name}", value)
        experts = torch.randn(num_experts, hidden, generator=torch.Generator().manual_seed(seed))
        return cls(device, lanes, experts, seed, hosts=hosts, home_bytes=home_bytes)

    def queue_given_up(self, rank: int) -> None:
        """A round of a rank whose lane has failed: it sends what messages hold, as others wait for them."""
        self.device.rank, lane = rank, self.lanes[rank]
        assert lane.message is not None
        records = torch.zeros(self._room()[0], lane.combine_wire.row_bytes(self._room()[1]), dtype=torch.uint8)
        near = next(members for members in self.hosts if rank in members)
        for peer in served_by(self.hosts, rank)[1:]:
            self._send(rank, peer, "tokens", [lane.message])
            grads = torch.zeros(self._room()[0], lane.layout.TOP_K)
            self._send(rank, peer, "sums", [records, grads, end_lines(lane)[list(near)]])

    def _queue_rank(self, lane: Lane, round_: Round) -> None:
        rank, gathered = lane.rank, round_.gathered[lane.rank]
        mine, dtype, layout = round_.tokens[rank], gathered.dtype, lane.layout
        here = next(number for number, members in enumerate(self.hosts) if rank in members)
        rails = {
            peer: next(n for n, host in enumerate(self.hosts) if peer in host) for peer in served_by(self.hosts, rank)
        }
        others = {peer: host for peer, host in rails.items() if peer != rank}
        grads = layout.WEIGHT_GRADS > 0
        assert lane.message is not None
        dispatch.send_tokens(lane, mine.x, mine.ids, mine.weights, self.num_programs)
        for peer in others:
            self._send(rank, peer, "tokens", [lane.message])
            arriving = torch.zeros_like(lane.message)
            self._receive(peer, rank, "tokens", [arriving])
            forward_tokens(lane, arriving, peer, dtype, self.num_programs)
        dispatch.wait(lane, DISPATCH, self.timeout, self.grace)
        permute.route(lane)
        permute.gather(lane, gathered, torch.tensor(False))
        self.device.call(lambda: self._apply_experts(lane, gathered))
        ends = replace(lane, combine_wire=EXACT)
        if self.late is not None and rank == self.late[0]:
            missing = self.lanes[self.late[1]]
            self._until(lambda: missing.report[REPORT_STATUS] == TIMED_OUT)
        if rank in round_.closing:
            dispatch.close_round(lane)
        else:
            weight_grads = round_.weight_grads[rank] if grads else None
            combine.send_sums(ends, gathered, torch.float32, self.num_programs, weight_grads)
        dispatch.wait(lane, COMBINE, self.timeout, self.grace)
        lines, first = end_lines(lane), self.hosts[here][0]
        if self.late is not None and rank == self.late[1]:
            flag = lines[self.late[0]].view(torch.int32)[SIGNAL_FLAG]
            self._until(lambda: flag == lane.control[CONTROL_EPOCH])
        row_bytes = lane.combine_wire.row_bytes(layout.HIDDEN, dtype)
        received = torch.zeros(len(self.hosts), layout.MAX_TOKENS, row_bytes, dtype=torch.uint8)
        received_grads = torch.zeros(len(self.hosts), layout.MAX_TOKENS, layout.TOP_K)
        near = torch.zeros_like(lines[: len(self.hosts[here])])
        self.device.call(lambda: write_end_lines(lane, first, near))
        for peer in others:
            leaving, of_tokens = torch.zeros_like(received[0]), torch.zeros_like(received_grads[0])
            self._sum(ends, peer, dtype, leaving, of_tokens if grads else None)
            self._send(rank, peer, "sums", [leaving, of_tokens, near])
        for peer, host in others.items():
            far = lines[self.hosts[host][0] :][: len(self.hosts[host])]
            self._receive(peer, rank, "sums", [received[host], received_grads[host], far])
        dispatch.wait(lane, COMBINE, self.timeout, self.grace)
        self._sum(ends, rank, dtype, received[here], received_grads[here] if grads else None)
        index = torch.arange(layout.MAX_TOKENS).unsqueeze(1) + layout.MAX_TOKENS * torch.arange(len(self.hosts))
        records = received.view(-1, row_bytes)
        sums.sum_records(records, index[: len(mine.x)].contiguous(), lane.combine_wire, round_.results[rank])
        self.device.call(lambda: _copy([round_.home[rank]], [received_grads.sum(0)[: len(mine.x)]]))

    def _sum(
        self, lane: Lane, rank: int, dtype: torch.dtype, records: torch.Tensor, of_tokens: torch.Tensor | None
    ) -> None:
        layout, shift = lane.layout, self.home_bytes * served_by(self.hosts, lane.rank).index(rank)
        grads = layout.WEIGHT_GRADS + shift if layout.WEIGHT_GRADS else 0
        home = replace(lane, rank=rank, layout=replace(layout, SUMS=layout.SUMS + shift, WEIGHT_GRADS=grads))
        rows, wire = torch.zeros(layout.MAX_TOKENS, layout.HIDDEN), self.lanes[0].combine_wire
        combine.sum_home(home, rows, of_tokens)
        rounded = rows if wire.quantized else rows.to(dtype)
        if not wire.quantized:
            self.device.call(lambda: _copy([rounded], [rows]))
        pack.pack_rows(rounded, wire, None, records)

    def _until(self, is_so: Callable[[], object]) -> None:
        def wait() -> Iterator[None]:
            while not is_so():
                yield

        self.device.call(wait)

    def _send(self, sender: int, receiver: int, leg: str, parts: list[torch.Tensor]) -> None:
        box = self.mail[sender, receiver, leg]
        self.device.call(lambda: box.append([part.clone() for part in parts]))

    def _receive(self, sender: int, receiver: int, leg: str, parts: list[torch.Tensor]) -> None:
        box = self.mail[sender, receiver, leg]

        def take() -> Iterator[None]:
            while not box:
                yield
            _copy(parts, box.popleft())

        self.device.call(take)

    def check(self) -> None:
        """Compares every round with plain torch, to the last bit."""
        for lane in self.lanes:
            assert lane.report[REPORT_STATUS] == RUNNING
        for round_ in self.rounds:
            sums_of_hosts: list[torch.Tensor] = []  # float32 [ranks, max_tokens, hidden], of each
            for members in self.hosts:
                total = torch.zeros(len(self.lanes), *self._room())
                for rank in members:
                    total = total + self._sums_of(self.lanes[rank], round_)
                sums_of_hosts.append(total)
            for lane, mine, result in zip(self.lanes, round_.tokens, round_.results, strict=True):
                hidden, wire = lane.layout.HIDDEN, lane.combine_wire
                mine_of_each = [total[lane.rank] for total in sums_of_hosts]
                if not wire.quantized:
                    mine_of_each = [total.to(mine.x.dtype) for total in mine_of_each]
                records = torch.cat([quantize_reference(total, wire) for total in mine_of_each])
                places = torch.arange(len(mine.x)).unsqueeze(1) + lane.layout.MAX_TOKENS * torch.arange(len(self.hosts))
                expected = sum_records_reference(records, places, wire, hidden, mine.x.dtype)
                assert_same_bits("combined", expected, result)
            if self.lanes[0].layout.WEIGHT_GRADS:
                came = home_weight_grads(self.lanes, round_.tokens, round_.weight_grads, round_.closing)
                for expected, got in zip(came, round_.home, strict=True):
                    assert_same_bits("weight gradients", expected.nan_to_num(0.0), got)

    def _room(self) -> tuple[int, int]:
        return self.lanes[0].layout.MAX_TOKENS, self.lanes[0].layout.HIDDEN

    def _sums_of(self, lane: Lane, round_: Round) -> torch.Tensor:
        """What a rank's experts add to each rank's tokens: float32 [ranks, max_tokens, hidden]."""
        total = torch.zeros(len(self.lanes) * self._room()[0], self._room()[1])
        if lane.rank not in round_.closing:
            slots, plan, rows = arrivals(lane, round_.tokens)
            out = self._expert_out(lane, plan, rows)
            records = pack_weighted_sums_reference(out, plan.positions, plan.weights, EXACT, torch.float32)
            total[slots] = records.view(torch.float32)[:, : self._room()[1]]
        return total.view(len(self.lanes), *self._room())


def _copy(parts: list[torch.Tensor], came: list[torch.Tensor]) -> None:
    for part, other in zip(parts, came, strict=True):
        part.copy_(other)
