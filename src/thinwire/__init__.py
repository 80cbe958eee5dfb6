"""thinwire: mixture-of-experts tokens between GPUs in int8, both ways.

The public names load on first use, so that importing one part pulls in nothing above it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from thinwire.version import VERSION as __version__

if TYPE_CHECKING:
    from thinwire import testing as testing
    from thinwire.comm import Communicator as Communicator
    from thinwire.comm import Work as Work
    from thinwire.comm import init as init
    from thinwire.comm.layout import Layout as Layout
    from thinwire.errors import ArgumentError as ArgumentError
    from thinwire.errors import CapacityError as CapacityError
    from thinwire.errors import CheckpointError as CheckpointError
    from thinwire.errors import ConfigMismatch as ConfigMismatch
    from thinwire.errors import CountsError as CountsError
    from thinwire.errors import LaneError as LaneError
    from thinwire.errors import LayoutError as LayoutError
    from thinwire.errors import PeerTimeout as PeerTimeout
    from thinwire.errors import RankTableError as RankTableError
    from thinwire.errors import RoutingError as RoutingError
    from thinwire.errors import ThinwireError as ThinwireError
    from thinwire.errors import TransportUnavailable as TransportUnavailable
    from thinwire.errors import WireFormatError as WireFormatError
    from thinwire.fused.all_gather import all_gather as all_gather
    from thinwire.fused.all_gather import all_gather_v as all_gather_v
    from thinwire.fused.all_reduce import all_reduce as all_reduce
    from thinwire.fused.all_to_all import all_to_all_v as all_to_all_v
    from thinwire.fused.codec import WireRows as WireRows
    from thinwire.fused.codec import dequantize as dequantize
    from thinwire.fused.codec import quantize as quantize
    from thinwire.fused.ddp import AllReduceState as AllReduceState
    from thinwire.fused.ddp import all_reduce_hook as all_reduce_hook
    from thinwire.fused.int8_reduce import int8_all_to_all_reduce as int8_all_to_all_reduce
    from thinwire.fused.redistribute import redistribute as redistribute
    from thinwire.fused.reduce_scatter import reduce_scatter as reduce_scatter
    from thinwire.moe.dispatched import Dispatched as Dispatched
    from thinwire.moe.layer import MoELayer as MoELayer
    from thinwire.moe.parallel import ExpertParallel as ExpertParallel
    from thinwire.wire import WireFormat as WireFormat

_PUBLIC = {
    "AllReduceState": "thinwire.fused.ddp",
    "Communicator": "thinwire.comm",
    "Dispatched": "thinwire.moe.dispatched",
    "ExpertParallel": "thinwire.moe.parallel",
    "Layout": "thinwire.comm.layout",
    "MoELayer": "thinwire.moe.layer",
    "WireFormat": "thinwire.wire",
    "WireRows": "thinwire.fused.codec",
    "Work": "thinwire.comm",
    "all_gather": "thinwire.fused.all_gather",
    "all_gather_v": "thinwire.fused.all_gather",
    "all_reduce": "thinwire.fused.all_reduce",
    "all_reduce_hook": "thinwire.fused.ddp",
    "all_to_all_v": "thinwire.fused.all_to_all",
    "dequantize": "thinwire.fused.codec",
    "init": "thinwire.comm",
    "int8_all_to_all_reduce": "thinwire.fused.int8_reduce",
    "quantize": "thinwire.fused.codec",
    "redistribute": "thinwire.fused.redistribute",
    "reduce_scatter": "thinwire.fused.reduce_scatter",
} | dict.fromkeys(
    (
        "ArgumentError",
        "CapacityError",
        "CheckpointError",
        "ConfigMismatch",
        "CountsError",
        "LaneError",
        "LayoutError",
        "PeerTimeout",
        "RankTableError",
        "RoutingError",
        "ThinwireError",
        "TransportUnavailable",
        "WireFormatError",
    ),
    "thinwire.errors",
)

__all__ = ["__version__", "testing", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("thinwire.testing")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
