"""Three network namespaces on one switch, which loses packets between chosen ranks while a cut lasts.

The switch is a bridge in a fourth namespace. It reaches rank r through `port{r}`, where a filter takes a sender's
packets out: nobody hears of it, as with a broken cable. All worlds use the same devices and addresses, as none of them
is in the host's own namespace. Needs Linux, root, iproute2, and a kernel with `cls_u32` and `act_mirred`.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from benchmarks.link import burst_bytes

INTERFACE = "eth0"  # of each rank
_NAMES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


class Network:
    """Namespaces of one world and the switch between them. A context manager, which removes them.

    Args:
        size: ranks.
        number: of this world, among all of this process.
    """

    def __init__(self, size: int, number: int) -> None:
        self.size, self._switch = size, f"cuts-{os.getpid()}-{number}-switch"
        self.namespaces = [f"cuts-{os.getpid()}-{number}-{rank}" for rank in range(size)]

    def __enter__(self) -> Network:
        """Makes the namespaces and joins them."""
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        _run("ip", [f"netns add {name}" for name in [self._switch, *self.namespaces]])
        # What is taken out goes into a pair of devices whose far end nobody reads.
        devices = ["link add bridge type bridge", "link add void type veth peer name end"]
        for rank, namespace in enumerate(self.namespaces):
            peer = f"name {INTERFACE} address {_hardware_address(rank)} netns {namespace}"
            devices += [f"link add port{rank} type veth peer {peer}", f"link set port{rank} master bridge"]
            devices += [f"link set port{rank} up"]
        _run("ip", [*devices, *(f"link set {device} up" for device in ("bridge", "void", "end"))], self._switch)
        _run("tc", [f"qdisc add dev port{rank} clsact" for rank in range(self.size)], self._switch)
        for rank, namespace in enumerate(self.namespaces):
            own = f"address add {address(rank)}/24 dev {INTERFACE}"
            _run("ip", [own, "link set lo up", f"link set {INTERFACE} up"], namespace)

    def __exit__(self, *exception: object) -> None:
        """Removes them, and devices with them, as far as they were made."""
        remove(name for name in [self._switch, *self.namespaces] if (_NAMES / name).exists())

    def limit(self, rate: str) -> None:
        """Lets each rank send no more than so many bits a second, such as "50mbit"."""
        limit = f"qdisc add dev {INTERFACE} root tbf rate {rate} burst {burst_bytes(rate)} latency 50ms"
        for namespace in self.namespaces:
            _run("tc", [limit], namespace)

    def cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Loses every packet from the first to the second rank of each pair until `heal`."""
        what = "filter add dev port{} egress protocol all u32 match ether src {} action mirred egress redirect dev void"
        _run("tc", [what.format(target, _hardware_address(source)) for source, target in pairs], self._switch)

    def heal(self) -> None:
        """Loses no more packets."""
        _run("tc", [f"filter del dev port{rank} egress" for rank in range(self.size)], self._switch)


def address(rank: int) -> str:
    """The rank's address.

    >>> address(0)
    '10.0.0.1'
    """
    return f"10.0.0.{rank + 1}"


def enter(namespace: str) -> None:
    """Moves this thread, and threads that it starts from now on, into a namespace."""
    with (_NAMES / namespace).open() as file:
        if _LIBC.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns into {namespace}")


def remove(names: Iterable[str]) -> None:
    """Removes namespaces."""
    _run("ip", [f"netns del {name}" for name in names])


def left_behind() -> list[str]:
    """Names of namespaces whose harness was killed before it could remove them."""
    names = sorted(path.name for path in _NAMES.glob("cuts-*-*-*"))
    return [name for name in names if not Path(f"/proc/{name.split('-')[1]}").exists()]


def _hardware_address(rank: int) -> str:
    return f"02:00:00:00:00:{rank + 1:02x}"


def _run(tool: str, lines: Iterable[str], namespace: str | None = None) -> None:
    """Has one process run all lines, so that a cut begins, and ends, for all pairs within milliseconds."""
    command = [tool, *(["-n", namespace] if namespace else []), "-batch", "-"]
    # In a session of its own: Ctrl-C is for the harness, which then removes what was made.
    done = subprocess.run(
        command, input="\n".join(lines) + "\n", capture_output=True, text=True, start_new_session=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
