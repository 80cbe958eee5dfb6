"""Who talks to whom, and through what memory: bootstrap, communicators, bounded exchanges, symmetric memory.

>>> from thinwire.comm import discover
>>> discover({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}).rank
1
"""

from thinwire.comm.communicator import Communicator
from thinwire.comm.exchange import Posted
from thinwire.comm.launch.bootstrap import (
    Group,
    as_communicator,
    communicator_or_default,
    default_communicator,
    init,
    on_communicator,
)
from thinwire.comm.launch.launchers import RankInfo, discover
from thinwire.comm.launch.rank_table import RankTable
from thinwire.comm.layout import Layout, TensorLayout
from thinwire.comm.memory.symmetric import SymmetricMemory, allocate
from thinwire.comm.work import Work

__all__ = [
    "Communicator",
    "Group",
    "Layout",
    "Posted",
    "RankInfo",
    "RankTable",
    "SymmetricMemory",
    "TensorLayout",
    "Work",
    "allocate",
    "as_communicator",
    "communicator_or_default",
    "default_communicator",
    "discover",
    "init",
    "on_communicator",
]
