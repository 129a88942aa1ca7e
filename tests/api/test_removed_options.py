"""Removed options: refused by their name, with what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from kuberoll_api.cli import main
from kuberoll_api.removed_options import REMOVED, sentence


def command_of(path: str) -> click.Command:
    """The command of this path; the test fails if there is none."""
    found: click.Command = main
    for name in path.split():
        assert isinstance(found, click.Group)
        inner = found.get_command(click.Context(found), name)
        assert inner is not None, path
        found = inner
    return found


def options_of(command: click.Command) -> Iterator[str]:
    for given in command.params:
        if isinstance(given, click.Option):
            yield from given.opts


@pytest.mark.parametrize(("command", "option"), REMOVED)
def test_each_is_refused_with_its_name_and_what_to_write(command: str, option: str) -> None:
    for given in ([option], [option, "1"], [f"{option}=1"]):
        result = CliRunner().invoke(main, [*command.split(), *given])
        assert result.exit_code == 2
        said = sentence(command, option)
        assert result.stderr.endswith(f"Error: {said}\n")
        assert result.stdout == ""


@pytest.mark.parametrize(("command", "option"), REMOVED)
def test_no_option_is_removed_that_is_there_and_those_that_are_named_instead_are_there(
    command: str, option: str
) -> None:
    there = set(options_of(command_of(command)))
    assert option not in there
    assert set(re.findall(r"--[\w-]+", REMOVED[command, option])) <= there


def test_another_unknown_option_is_clicks_to_report() -> None:
    result = CliRunner().invoke(main, ["validate", "--sett", "a=1", "job.yaml"])
    assert result.exit_code == 2
    assert "No such option '--sett'" in result.stderr
    assert "--set" in result.stderr
    assert sentence("validate", "--kubeconfig") is None
