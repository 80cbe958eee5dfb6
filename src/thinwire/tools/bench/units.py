"""Numbers and names as texts, on terminals, pages and pictures alike. Needs nothing."""

from __future__ import annotations

import math


def significant(value: float | None, digits: int = 4) -> str:
    """So many digits, but two below 0.001, so that a column of 7 holds them; None is a dash.

    >>> significant(6706.4), significant(41.953), significant(0.0015, 3), significant(4.56e-7, 3), significant(None)
    ('6706', '41.95', '0.00150', '4.6e-07', '-')
    """
    if value is None or value == 0:
        return "-" if value is None else "0"
    rounded = float(f"{value:.{digits - 1}e}")
    if rounded < 1e-3:
        return f"{value:.1e}"
    return f"{rounded:.{max(0, digits - 1 - math.floor(math.log10(rounded)))}f}"


def token_text(tokens: float) -> str:
    """
    >>> token_text(4096), token_text(1 << 23)
    ('4,096', '8 Mi')
    """
    millions, rest = divmod(tokens, 1 << 20)
    return f"{tokens:,.0f}" if rest or not millions else f"{millions:,.0f} Mi"


def size_text(size: float) -> str:
    """
    >>> size_text(512), size_text(1 << 20), size_text(1536)
    ('512 B', '1 MiB', '1.5 KiB')
    """
    power = max((k for k in range(5) if size >= 1024**k), default=0)
    return f"{size / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def name_text(implementation: str, wire: str, transport: str | None) -> str:
    """An implementation in words; that a peer quantises nothing goes without saying.

    >>> name_text("thinwire", "none", "direct"), name_text("gloo", "none", None)
    ('thinwire none direct', 'gloo')
    """
    wire = "" if implementation != "thinwire" and wire == "none" else wire
    return " ".join(filter(None, (implementation, wire, transport)))
