"""Rank tables: the JSON files that say which ranks a job has, and on which server and device each of them runs.

The form is that of HCCL's rank table, versions 1.0 and 1.2, in its `server_list` template:

    {"version": "1.0", "status": "completed", "server_count": "1",
     "server_list": [{"server_id": "10.0.0.1", "host_nic_ip": "reserve",
                      "device": [{"device_id": "0", "device_ip": "192.98.1.1", "rank_id": "0"},
                                 {"device_id": "1", "device_ip": "192.98.2.1", "rank_id": "1"}]}]}

Numbers may be written as strings, as HCCL wants them, or as numbers. What is read: `server_id`, `host_ip`, `server_ip`,
`device`, `device_id`, `device_ip`, `rank_id`; `version`, `status` and `server_count` are checked where they are there.
All else is ignored. Source: "Preparing the Ranktable Resource Configuration File", Huawei's CANN documentation.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.comm.tensors import is_int
from thinwire.errors import RankTableError
from thinwire.fields import Fields, Refused, just, list_of, one_of, parse_json, read_bytes

#: Where the ranks of a rank table meet if MASTER_PORT does not say so. It is torchrun's default, too.
DEFAULT_PORT = 29500

_MOST = 1 << 20  # servers, and devices of one


@dataclass(frozen=True)
class RankEntry:
    """One rank of a table.

    Attributes:
        rank: 0 to size - 1.
        server: its server's `server_id`, a name or an address.
        address: where that server is reached: its `host_ip` or `server_ip` if it has one, else its `server_id`.
        device_id: its device on that server.
        device_ip: that device's own address; None where the table has none. Not used.
        local_rank: its place among the ranks of its server, by device.
    """

    rank: int
    server: str
    address: str
    device_id: int
    device_ip: str | None
    local_rank: int


@dataclass(frozen=True)
class RankTable:
    """All ranks of a job.

    Attributes:
        entries: `entries[r]` is rank r's.
        source: where the table was read, for people.
    """

    entries: tuple[RankEntry, ...]
    source: str

    @property
    def size(self) -> int:
        """Ranks in all."""
        return len(self.entries)

    @property
    def servers(self) -> tuple[str, ...]:
        """The servers, in the order of their first ranks."""
        return tuple(dict.fromkeys(entry.server for entry in self.entries))

    def entry(self, rank: int) -> RankEntry:
        """One rank's.

        Raises:
            RankTableError: the table does not have it.
        """
        if not is_int(rank, 0, self.size - 1):
            raise RankTableError(f"{self.source} has no rank {rank!r}, it has ranks 0 to {self.size - 1}")
        return self.entries[rank]

    @classmethod
    def load(cls, table: RankTable | Mapping[str, object] | str | os.PathLike[str]) -> RankTable:
        """Reads a file, or what `json.load` has made of one.

        Raises:
            RankTableError: naming the file, the field and what it should be.

        >>> devices = [{"device_id": "3", "rank_id": "1"}, {"device_id": "2", "rank_id": "0"}]
        >>> table = RankTable.load({"server_list": [{"server_id": "10.0.0.1", "device": devices}]})
        >>> table.size, table.entry(1).device_id, table.entry(1).local_rank
        (2, 3, 1)
        """
        if isinstance(table, RankTable):
            return table
        if isinstance(table, Mapping):
            return _parse(table, "the rank table that was passed")
        if not isinstance(table, str | os.PathLike):
            raise RankTableError(f"rank_table is a {type(table).__name__}, expected a path or a dict")
        content, path = read_bytes(os.fsdecode(table), RankTableError)
        source = f"rank table {path}"
        return _parse(parse_json(content, source, RankTableError), source)


def _parse(content: object, source: str) -> RankTable:
    table = Fields(content, source, RankTableError)
    table.get("version", lambda value: one_of(("1.0", "1.2"))(str(value)), "1.0")
    table.get("status", just("completed"), "completed")
    servers = table.get("server_list", list_of(_server, _MOST, 1))
    count = table.get("server_count", _number, len(servers))
    if count != len(servers):
        raise RankTableError(f"{source}: server_count is {count}, but server_list has {len(servers)} entries")
    _require_unique(source, "server_id", [entries[0].server for entries in servers])
    found = sorted((entry for entries in servers for entry in entries), key=lambda entry: entry.rank)
    ranks = [entry.rank for entry in found]
    _require_unique(source, "rank_id", ranks)
    if missing := sorted(set(range(len(ranks))) - set(ranks)):
        raise RankTableError(
            f"{source}: has {len(ranks)} ranks, expected rank_id 0 to {len(ranks) - 1}; missing: "
            f"{', '.join(map(str, missing))}; found: {', '.join(map(str, ranks))}"
        )
    return RankTable(tuple(found), source)


def _server(value: object) -> list[RankEntry]:
    """The ranks of a server, by device."""
    server = Fields(value, "")
    name = server.get("server_id", _name)
    address = server.get("host_ip", _name_if_any, None) or server.get("server_ip", _name_if_any, None) or name
    devices = sorted(server.get("device", list_of(_device, _MOST, 1)), key=lambda device: device[0])
    _require_unique(f", server {name}", "device_id", [device_id for device_id, _, _ in devices])
    return [
        RankEntry(rank, name, address, device_id, device_ip, local_rank)
        for local_rank, (device_id, rank, device_ip) in enumerate(devices)
    ]


def _device(value: object) -> tuple[int, int, str | None]:
    device = Fields(value, "")
    device_ip = device.get("device_ip", _name_if_any, None)
    return device.get("device_id", _number), device.get("rank_id", _number), device_ip


def _require_unique(source: str, field: str, values: Sequence[object]) -> None:
    twice = next((value for value, count in Counter(values).items() if count > 1), None)
    if twice is not None:
        raise RankTableError(f"{source}: {field} {twice!r} appears twice")


def _name(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise Refused("a string that is not empty")
    return value.strip()


def _name_if_any(value: object) -> str | None:
    return _name(value) if value else None


def _number(value: Any) -> int:
    digits = value.strip() if isinstance(value, str) else ""
    number: int = int(digits) if re.fullmatch("[0-9]{1,10}", digits) else value
    if not is_int(number, 0):
        raise Refused("a whole number of at least 0, below 2**31")
    return number
