"""What only those can import who have the framework in question."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("transformers") else ["families.py", "models.py"]
