"""Device code. Each file holds a kernel, its launcher, and the plain-torch reference that it must equal.

Nothing here knows of processes, groups or transports.
"""

import os

from thinwire.errors import ArgumentError

#: Environment variable: at which scope a launch's programs see each other's stores behind the last of them to arrive.
SCOPE_VARIABLE = "THINWIRE_ARRIVE_SCOPE"
SCOPES = ("gpu", "sys")


def arrive_scope() -> str:
    """The variable's value; "gpu" without.

    Raises:
        ArgumentError: it is another.
    """
    scope = os.environ.get(SCOPE_VARIABLE) or SCOPES[0]
    if scope not in SCOPES:
        raise ArgumentError(f"{SCOPE_VARIABLE} is {scope[:40]!r} in the environment; accepted: {', '.join(SCOPES)}")
    return scope
