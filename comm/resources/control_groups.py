"""Where Linux says what the control groups that this process is in may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def control_groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's group and of all above it, whose limits hold too, and whether they are version 2's.

    A container may see its own group as the root, under another path: a folder need not be there.
    """
    try:
        memberships = Path("/proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux, or not for us to read
        return
    for membership in memberships:
        if membership.count(":") < 2:
            continue
        _, controllers, path = membership.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _ROOT / controller if controllers else _ROOT
        folder = Path(f"{root}{path}")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(root):
                break
            yield group, not controllers
