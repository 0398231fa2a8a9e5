"""The parser: all commands have one shape."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
from argparse import ArgumentParser

import pytest

from mergestream.cli.options import ComputingOptions
from mergestream.cli.parser import COMMANDS, load, parse


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_same_shape(name):
    command = load(name)
    assert command.HELP and "\n" not in command.HELP and not command.HELP.endswith(".")
    assert callable(command.run)
    parser = ArgumentParser(add_help=False)
    command.add_arguments(parser)
    destinations = [action.dest for action in parser._actions]
    assert sorted(destinations) == sorted(field.name for field in dataclasses.fields(command.Options))
    assert command.Options.__dataclass_params__.frozen


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_parses(name):
    examples = load(name).EXAMPLES.strip().splitlines()
    assert examples
    for example in examples:
        program, *words = shlex.split(example, comments=True)
        assert program == "mergestream" and words[0] == name
        command, options = parse(words)
        assert command is load(name) and isinstance(options, command.Options)


def test_options_are_what_was_said():
    _, options = parse(["add", "store", "a", "b", "--max-memory", "4GB", "--gate", "kept>=0.6", "--workers", "3"])
    assert (options.store, options.experts, options.gate) == ("store", ["a", "b"], ["kept>=0.6"])
    assert isinstance(options, ComputingOptions)
    engine = options.make_engine()
    assert (engine.workers, engine.max_memory, engine.device) == (3, 4_000_000_000, "cpu")


def test_no_command_imports_what_takes_long_before_it_runs():
    code = """
import sys
from mergestream.cli.parser import COMMANDS, parse
for name in COMMANDS:
    try:
        parse([name, "--help"])
    except SystemExit as exit:
        assert exit.code == 0
slow = {"torch", "transformers", "numpy", "huggingface_hub", "rich", "mergestream.store"} & sys.modules.keys()
assert not slow, slow
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
