"""What all tests share: the server that their ranks are forked from."""

from __future__ import annotations

import signal

import pytest

from thinwire import testing


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts pytest in the background has it ignore Ctrl-C, and all that it starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Each process of pytest has a server of its own, from its first test that starts processes on.
    testing.preload("tests.helpers.warm")
