"""What running a kernel can find wrong with it."""

from __future__ import annotations


class PtxError(Exception):
    """A kernel does what a GPU does not define, or something that is not built here; the message says where."""
