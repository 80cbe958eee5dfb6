"""The logger `thinwire`: what was chosen and why, once for each choice. It is silent by default.

By the convention for libraries it has no output of its own: `logging.basicConfig(level="INFO")` shows it, and so does
THINWIRE_LOG=info, or another level, on standard error. INFO has the choices that `explain()` reports, DEBUG their
details. Nothing is logged while rows travel.
"""

from __future__ import annotations

import logging
import os

from thinwire.errors import ArgumentError

#: The environment's variable: a level, from which on messages go to standard error.
VARIABLE = "THINWIRE_LOG"
LOGGER = logging.getLogger("thinwire")
LOGGER.addHandler(logging.NullHandler())

_LEVELS = ("debug", "info", "warning", "error")


class _EnvironmentHandler(logging.StreamHandler):
    """That which the environment asked for."""


def follow_environment() -> None:
    """Shows messages as THINWIRE_LOG says. May be called again.

    Raises:
        ArgumentError: the variable names no level.
    """
    level = os.environ.get(VARIABLE, "")
    if not level or any(isinstance(handler, _EnvironmentHandler) for handler in LOGGER.handlers):
        return
    if level.lower() not in _LEVELS:
        raise ArgumentError(f"{VARIABLE} is {level!r} in the environment, expected one of {', '.join(_LEVELS)}")
    handler = _EnvironmentHandler()
    handler.setFormatter(logging.Formatter("thinwire %(levelname)s %(asctime)s %(message)s"))
    handler.setLevel(level.upper())
    LOGGER.addHandler(handler)
    if LOGGER.getEffectiveLevel() > handler.level:
        LOGGER.setLevel(handler.level)
