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

import json
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.comm.shaped_json import unique_keys
from thinwire.comm.tensors import is_int
from thinwire.errors import RankTableError
from thinwire.files import read_regular

#: Where the ranks of a rank table meet if MASTER_PORT does not say so. It is torchrun's default, too.
DEFAULT_PORT = 29500

_VERSIONS = ("1.0", "1.2")
_NUMBER = re.compile("[0-9]{1,10}")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


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
        source = f"rank table {os.fspath(table)}"
        try:
            text = read_regular(os.fsdecode(table))
        except OSError as error:
            raise RankTableError(f"{source} cannot be read: {error.strerror}") from error
        except ValueError as error:  # a path that no file can have
            raise RankTableError(f"{source} cannot be read: {error}") from error
        try:
            content = json.loads(text, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, nested without end, or a key twice
            raise RankTableError(f"{source} is not JSON: {error}") from error
        return _parse(content, source)


def _parse(content: object, source: str) -> RankTable:
    table = _as_object(content, source)
    version = table.get("version", "1.0")
    if not isinstance(version, str | float) or str(version) not in _VERSIONS:
        raise RankTableError(f"{source}: version is {_shown(version)}, expected one of {', '.join(_VERSIONS)}")
    status = table.get("status", "completed")
    if not isinstance(status, str) or status != "completed":
        raise RankTableError(f"{source}: status is {_shown(status)}, expected 'completed': it is not ready to be used")
    if "server_list" not in table and "group_list" in table:
        raise RankTableError(f"{source}: has a group_list, expected the template with a server_list")
    servers = _as_list(table, "server_list", source)
    if "server_count" in table and _as_number(table, "server_count", source) != len(servers):
        raise RankTableError(
            f"{source}: server_count is {table['server_count']}, but server_list has {len(servers)} entries"
        )
    by_rank: dict[int, RankEntry] = {}
    seen: set[str] = set()
    for number, server in enumerate(servers):
        for entry in _parse_server(server, f"{source}: server_list[{number}]", seen):
            if entry.rank in by_rank:
                others = f"server {by_rank[entry.rank].server}, device {by_rank[entry.rank].device_id}"
                raise RankTableError(
                    f"{source}: rank_id {entry.rank} appears twice, as {others}, and as server {entry.server}, device "
                    f"{entry.device_id}"
                )
            by_rank[entry.rank] = entry
    missing = [str(rank) for rank in range(len(by_rank)) if rank not in by_rank]
    if missing:
        raise RankTableError(
            f"{source}: has {len(by_rank)} ranks, expected rank_id 0 to {len(by_rank) - 1}; missing: "
            f"{', '.join(missing)}; found: {', '.join(map(str, sorted(by_rank)))}"
        )
    return RankTable(tuple(by_rank[rank] for rank in range(len(by_rank))), source)


def _parse_server(content: object, where: str, seen: set[str]) -> list[RankEntry]:
    server = _as_object(content, where)
    name = _as_text(server, "server_id", where)
    if name in seen:
        raise RankTableError(f"{where}: server_id {name!r} appears twice, expected one entry a server")
    seen.add(name)
    named = next((field for field in ("host_ip", "server_ip") if server.get(field)), "server_id")
    address = _as_text(server, named, where)
    found: dict[int, tuple[int, str | None]] = {}
    for number, content_of_device in enumerate(_as_list(server, "device", where)):
        place = f"{where}.device[{number}]"
        device = _as_object(content_of_device, place)
        device_id = _as_number(device, "device_id", place)
        if device_id in found:
            raise RankTableError(f"{place}: device_id {device_id} appears twice on server {name}")
        device_ip = _as_text(device, "device_ip", place) if device.get("device_ip") else None
        found[device_id] = (_as_number(device, "rank_id", place), device_ip)
    return [
        RankEntry(rank, name, address, device_id, device_ip, local_rank)
        for local_rank, (device_id, (rank, device_ip)) in enumerate(sorted(found.items()))
    ]


def _as_object(content: object, where: str) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise RankTableError(f"{where}: is {_kind(content)}, expected an object")
    return content


def _as_list(content: Mapping[str, Any], field: str, where: str) -> Sequence[Any]:
    found = _field(content, field, where)
    if not isinstance(found, list | tuple) or not found:
        empty = "empty" if isinstance(found, list | tuple) else _kind(found)
        raise RankTableError(f"{where}: {field} is {empty}, expected a list with at least one entry")
    return found


def _as_text(content: Mapping[str, Any], field: str, where: str) -> str:
    found = _field(content, field, where)
    if not isinstance(found, str) or not found.strip():
        raise RankTableError(f"{where}: {field} is {_shown(found)}, expected a string that is not empty")
    return found.strip()


def _as_number(content: Mapping[str, Any], field: str, where: str) -> int:
    found = _field(content, field, where)
    digits = found.strip() if isinstance(found, str) else ""  # of more than what int() strips
    number = int(digits) if _NUMBER.fullmatch(digits) else found
    if not is_int(number, 0):
        raise RankTableError(f"{where}: {field} is {_shown(found)}, expected a whole number of at least 0, below 2**31")
    return number


def _field(content: Mapping[str, Any], field: str, where: str) -> Any:
    if field not in content:
        names = ", ".join(key if isinstance(key, str) else _shown(key) for key in content)
        raise RankTableError(f"{where}: has no {field}; it has {names or 'nothing'}")
    return content[field]


def _shown(value: object) -> str:
    """A value for people, who may have passed anything: not nested deeply, nor a number too long to be printed."""
    try:
        return _SHORT.repr(value)
    except ValueError:
        return f"a {type(value).__name__}"


def _kind(content: object) -> str:
    return "null" if content is None else f"a {type(content).__name__}"
