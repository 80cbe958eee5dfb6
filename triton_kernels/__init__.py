"""Device code. Each file holds a kernel, its launcher, and the plain-torch reference that it must equal.

Nothing here knows of processes, groups or transports.
"""

import os

from thinwire.errors import ArgumentError

#: Environment variable: at which scope a launch's programs see each other's stores behind the last of them to arrive.
SCOPE_VARIABLE = "THINWIRE_ARRIVE_SCOPE"
SCOPES = ("gpu", "sys")
#: Environment variable: whether collectives of little data are one launch on an NVIDIA GPU.
LAUNCHES_VARIABLE = "THINWIRE_COLLECTIVE_LAUNCHES"
LAUNCHES = ("several", "one")


def arrive_scope() -> str:
    """The variable's value; "gpu" without.

    Raises:
        ArgumentError: it is another.
    """
    return _chosen(SCOPE_VARIABLE, SCOPES)


def collective_launches() -> str:
    """What THINWIRE_COLLECTIVE_LAUNCHES says, or "several"; raises likewise."""
    return _chosen(LAUNCHES_VARIABLE, LAUNCHES)


def _chosen(variable: str, accepted: tuple[str, ...]) -> str:
    value = os.environ.get(variable) or accepted[0]
    if value not in accepted:
        raise ArgumentError(f"{variable} is {value[:40]!r} in the environment; accepted: {', '.join(accepted)}")
    return value
