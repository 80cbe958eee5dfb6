"""Who talks to whom, and how: process bootstrap, communicators, bounded exchanges of bytes.

>>> from thinwire.comm import discover
>>> discover({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}).rank
1
"""

from thinwire.comm.bootstrap import RankInfo, default_communicator, discover, init
from thinwire.comm.communicator import Communicator
from thinwire.comm.exchange import Pending

__all__ = ["Communicator", "Pending", "RankInfo", "default_communicator", "discover", "init"]
