"""Options that are given several times, of every command."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from microtome.cli import main


def options() -> Iterator[tuple[str, click.Option]]:
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        yield from ((name, one) for one in command.params if isinstance(one, click.Option) and not one.is_flag)


ONE_VALUE = [(name, opt) for name, option in options() if not option.multiple for opt in option.opts]
#: The options of lists, besides --input of every command.
LISTS = {
    ("profile", "--columns"),
    ("profile", "--energy-model"),
    ("generate", "--ids"),
    ("sweep", "--cuts"),
    ("plan", "--codec"),
    ("diff", "--fail-over"),
}


@pytest.mark.parametrize(("command", "option"), ONE_VALUE)
def test_an_option_of_one_value_that_is_given_twice_is_refused(command: str, option: str) -> None:
    ran = CliRunner().invoke(main, [command, option, "a", option, "b"])
    assert ran.exit_code == 2
    name = {"-o": "--output"}.get(option, option)
    assert f"Error: {name} was given twice" in ran.output


def test_every_option_of_a_list_may_be_repeated() -> None:
    lists = [one for command, one in options() if "--input" in one.opts or (command, one.opts[0]) in LISTS]
    assert len(lists) > len(LISTS)
    assert all(one.multiple for one in lists)


def test_repeated_lists_are_joined() -> None:
    words = ["profile", "zoo:tiny-vit", "--columns", "params", "--columns", "macs,flops", "--depth", "0", "--csv", "-"]
    assert CliRunner().invoke(main, words).output.split()[0] == "address,params,macs,flops"


def test_repeated_inputs_are_joined() -> None:
    words = ["track", "zoo:tiny-decoder", "--json", "-"]
    ran = CliRunner().invoke(main, [*words, "--input", "input_ids=1x4:int64", "--input", "nothing=1x2"])
    assert "has no parameter 'nothing'" in ran.output


def test_help_is_shown_also_if_an_option_is_given_twice() -> None:
    ran = CliRunner().invoke(main, ["plan", "--help", "--edge", "a", "--edge", "b"])
    assert ran.exit_code == 0
    assert "Usage:" in ran.output


def test_an_argument_of_the_model_that_is_set_twice_is_refused() -> None:
    ran = CliRunner().invoke(main, ["profile", "zoo:tiny-vit", "--arg", "depth=2", "--arg", "depth=3"])
    assert "Invalid value for '--arg': depth is set twice" in ran.output
