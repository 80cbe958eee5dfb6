"""What all tests share: the server that their ranks are forked from, and the choice of a part of them."""

from __future__ import annotations

import signal

import pytest

from tests.helpers.speeds import part_of
from thinwire import testing


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts pytest in the background has it ignore Ctrl-C, and all that it starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Each process of pytest has a server of its own, from its first test that starts processes on.
    testing.preload("tests.helpers.warm")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", metavar="K/N", help="of the chosen tests every Nth, from the Kth on")


@pytest.hookimpl(trylast=True)  # behind what -m and -k leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = part_of(len(items), config.getoption("--part"))
    others = sorted(set(range(len(items))) - set(chosen))
    config.hook.pytest_deselected(items=[items[number] for number in others])
    items[:] = [items[number] for number in chosen]
