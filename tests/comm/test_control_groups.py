"""Control groups: the groups of this process from the innermost out, and nothing where Linux says nothing readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.comm.resources.available import control_groups

ROOT = Path("/sys/fs/cgroup")


@pytest.fixture
def memberships(monkeypatch):
    """A function that sets what /proc/self/cgroup says, or raises."""

    def say(text):
        def read_text(path, encoding=None, errors=None):
            assert path == Path("/proc/self/cgroup")
            if isinstance(text, OSError):
                raise text
            return text

        monkeypatch.setattr(Path, "read_text", read_text)

    return say


def test_groups_are_those_of_the_controller_and_all_above_them(memberships):
    memberships("5:cpu,cpuacct:/d\n4:memory:/m\n1:name=systemd:/x\n0::/a/b\n")
    assert list(control_groups("cpu")) == [
        (ROOT / "cpu/d", False),
        (ROOT / "cpu", False),
        (ROOT / "a/b", True),
        (ROOT / "a", True),
        (ROOT, True),
    ]


def test_lines_that_name_no_group_are_left_out(memberships):
    memberships("\ngarbage\n5:cpu\n0::/\n")
    assert list(control_groups("cpu")) == [(ROOT, True)]


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), FileNotFoundError(2, "no such file")])
def test_where_it_cannot_be_read_there_are_none(error, memberships):
    memberships(error)
    assert list(control_groups("cpu")) == []
