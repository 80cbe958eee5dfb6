"""DeepEP's Python API over thinwire, for programs that import `deep_ep`; it needs no CUDA build, NVLink or RDMA.

    import thinwire.integrations.deep_ep as deep_ep
    deep_ep.install()  # before what imports deep_ep

docs/integrations-deep-ep.md has what differs from DeepEP, and what was run.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from thinwire.fused.codec import resolve_wire
from thinwire.integrations.deep_ep import events as utils
from thinwire.integrations.deep_ep.elastic import ElasticBuffer, EPHandle
from thinwire.integrations.deep_ep.events import EventHandle, EventOverlap
from thinwire.integrations.deep_ep.legacy import Buffer, Config
from thinwire.integrations.deep_ep.routes import AnyBuffer, topk_idx_t
from thinwire.log import LOGGER

__version__ = "2.1.0"  # of the API
__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "install", "topk_idx_t"]


def install(
    *, wire: str | None = None, combine_wire: str | None = None, grad_wire: str | None = None, replace: bool = False
) -> Any:
    """Makes this package what `import deep_ep` finds, and returns it. Call it before anything imports `deep_ep`.

    Args:
        wire, combine_wire, grad_wire: formats of tokens, sums and gradients, of all buffers made from now on. What is
            not passed is taken from THINWIRE_DEEP_EP_WIRES, such as "int8,int8,none". Else tokens travel in
            THINWIRE_WIRE or int8+h64, sums in the format of tokens, and gradients in `none`.
        replace: also where DeepEP itself is installed. Else that stays in use, and a warning is logged.
    """
    for each in (wire, combine_wire, grad_wire):
        resolve_wire(each)
    present, ours = sys.modules.get("deep_ep"), sys.modules[__name__]
    if present is not ours and not replace and importlib.util.find_spec("deep_ep") is not None:
        LOGGER.warning("DeepEP is installed and stays in use: install(replace=True) puts thinwire in its place")
        return importlib.import_module("deep_ep")
    AnyBuffer.installed = wire, combine_wire, grad_wire
    sys.modules |= {"deep_ep": ours, "deep_ep.utils": utils, "deep_ep.utils.event": utils}
    return ours
