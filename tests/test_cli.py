"""The command line: help, examples, and what is meant by a word that is none of its own."""

from __future__ import annotations

import shlex

import pytest

from thinwire.tools.cli import COMMANDS, main, make_parser

#: Whose help is held to this.
_HELPFUL = COMMANDS


def _help(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """As a wide terminal shows it."""
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return capsys.readouterr().out


def test_without_a_command_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == make_parser().format_help() and shown.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bnech"], "thinwire: error: 'bnech' is no command; did you mean bench?; accepted: demo, bench, doctor"),
        (["qqq", "--json", "x"], "thinwire: error: 'qqq' is no command; accepted: demo, bench, doctor"),
        (["demo", "--rnks", "2"], "thinwire demo: error: unrecognized arguments: --rnks 2; did you mean --ranks?"),
        (["doctor", "--jsno=x"], "thinwire doctor: error: unrecognized arguments: --jsno=x; did you mean --json?"),
        (["doctor", "--qqq"], "thinwire doctor: error: unrecognized arguments: --qqq\n"),
    ],
)
def test_a_typing_error_is_told_what_was_meant(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("command", _HELPFUL)
def test_help_fits_into_a_hundred_columns_and_has_examples_that_can_be_typed(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _help(command, monkeypatch, capsys).splitlines()
    assert [line for line in lines if len(line) > 100] == []
    examples = [line for line in lines if line.startswith(f"  thinwire {command}")]
    assert examples
    for example in examples:
        assert make_parser().parse_args(shlex.split(example)[1:]).command == command
