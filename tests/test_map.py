"""The map of tests is true: every module has some, and the page says which."""

from __future__ import annotations

from tests.helpers.map_of_tests import PAGE, lines, page


def test_every_module_has_tests_and_the_map_names_them() -> None:
    for module, chosen in lines():
        assert chosen and all(path.exists() for path in chosen), f"no test of {module}"
    assert PAGE.read_text() == page(), "run python -m tests.helpers.map_of_tests"
