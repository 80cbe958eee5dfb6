"""What all tests share: the server that their ranks are forked from."""

from __future__ import annotations

import pytest

from thinwire import testing


def pytest_configure(config: pytest.Config) -> None:
    # Each process of pytest has a server of its own, from its first test that starts processes on.
    testing.preload("tests.warm")
