"""Examples in docstrings are code on the site, where they do not stand under a heading of their own."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

#: A doctest: from its first prompt to the next empty line.
_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


class Examples(Extension):
    """Puts fences around doctests."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = _EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)
