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
    from thinwire.errors import *  # noqa: F403
    from thinwire.fused.all_to_all import all_to_all_v as all_to_all_v
    from thinwire.fused.codec import WireRows as WireRows
    from thinwire.fused.codec import dequantize as dequantize
    from thinwire.fused.codec import quantize as quantize
    from thinwire.fused.ddp import AllReduceState as AllReduceState
    from thinwire.fused.ddp import all_reduce_hook as all_reduce_hook
    from thinwire.fused.exchange_plan import ExchangePlan as ExchangePlan
    from thinwire.fused.int8_reduce import int8_all_to_all_reduce as int8_all_to_all_reduce
    from thinwire.fused.ops import all_gather as all_gather
    from thinwire.fused.ops import all_gather_v as all_gather_v
    from thinwire.fused.ops import all_reduce as all_reduce
    from thinwire.fused.ops import reduce_scatter as reduce_scatter
    from thinwire.fused.redistribute import redistribute as redistribute
    from thinwire.moe.checkpoint import load_checkpoint as load_checkpoint
    from thinwire.moe.checkpoint import save_checkpoint as save_checkpoint
    from thinwire.moe.dispatched import Dispatched as Dispatched
    from thinwire.moe.distributed import clip_grad_norm_ as clip_grad_norm_
    from thinwire.moe.distributed import distributed as distributed
    from thinwire.moe.distributed import expert_parameter_names as expert_parameter_names
    from thinwire.moe.experts import GroupedExperts as GroupedExperts
    from thinwire.moe.int8_experts import Int8Experts as Int8Experts
    from thinwire.moe.layer import LocalExperts as LocalExperts
    from thinwire.moe.layer import MoELayer as MoELayer
    from thinwire.moe.memory import plan_memory as plan_memory
    from thinwire.moe.parallel import ExpertParallel as ExpertParallel
    from thinwire.moe.pretrained import load_moe_layer as load_moe_layer
    from thinwire.moe.pretrained import save_moe_layers as save_moe_layers
    from thinwire.moe.training_state import TrainingState as TrainingState
    from thinwire.wire import WireFormat as WireFormat

_MODULES = {
    "comm": "Communicator Work init",
    "comm.layout": "Layout",
    "errors": "ArgumentError CapacityError CheckpointError ConfigMismatch CountsError LaneError "
    "LayoutError PeerTimeout RankTableError RoutingError ThinwireError TransportUnavailable WireFormatError",
    "fused.all_to_all": "all_to_all_v",
    "fused.codec": "WireRows dequantize quantize",
    "fused.ddp": "AllReduceState all_reduce_hook",
    "fused.exchange_plan": "ExchangePlan",
    "fused.int8_reduce": "int8_all_to_all_reduce",
    "fused.ops": "all_gather all_gather_v all_reduce reduce_scatter",
    "fused.redistribute": "redistribute",
    "moe.checkpoint": "load_checkpoint save_checkpoint",
    "moe.dispatched": "Dispatched",
    "moe.distributed": "clip_grad_norm_ distributed expert_parameter_names",
    "moe.experts": "GroupedExperts",
    "moe.int8_experts": "Int8Experts",
    "moe.layer": "LocalExperts MoELayer",
    "moe.memory": "plan_memory",
    "moe.parallel": "ExpertParallel",
    "moe.pretrained": "load_moe_layer save_moe_layers",
    "moe.training_state": "TrainingState",
    "wire": "WireFormat",
}
_PUBLIC = {name: f"thinwire.{module}" for module, names in _MODULES.items() for name in names.split()}

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
