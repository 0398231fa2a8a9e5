"""The parser: all commands have one shape, misspelt words get suggestions, and help imports nothing slow."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from typing import Any

import pytest

from mergestream.cli.options import RunningOptions, add_arguments
from mergestream.cli.parser import COMMANDS, load, parse
from mergestream.engine import LocalEngine
from tests.conftest import RunCommand


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_same_shape(name: Any, mergestream: RunCommand) -> None:
    command, summary = load(name), COMMANDS[name]
    assert summary and "\n" not in summary and not summary.endswith(".")
    assert callable(command.run)
    parser = ArgumentParser(add_help=False)
    add_arguments(parser, command)
    destinations = [action.dest for action in parser._actions]
    assert sorted(destinations) == sorted(field.name for field in dataclasses.fields(command))
    assert command.__dataclass_params__.frozen
    assert all(action.help for action in parser._actions), "every argument has a help text"
    text = mergestream(name, "--help").out
    assert "--json" in text and "examples:" in text
    assert f"{summary[0].upper()}{summary[1:]}.\n" in text, "the description is a sentence"
    source = inspect.getsource(sys.modules[command.__module__])
    assert "answer(" in source or "emit(" in source, "the command supports --json"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_parses(name: Any) -> None:
    examples = load(name).EXAMPLES.strip().splitlines()
    assert examples
    for example in examples:
        program, *words = shlex.split(example, comments=True)
        assert program == "mergestream" and words[0] == name
        assert type(parse(words)) is load(name)


def test_options_have_the_parsed_values() -> None:
    options = parse(["add", "store", "a", "b", "--max-memory", "4GB", "--gate", "kept>=0.6", "--workers", "3"])
    assert (options.store, options.experts, options.gates) == ("store", ["a", "b"], ["kept>=0.6"])
    assert isinstance(options, RunningOptions)
    engine = options.make_engine()
    assert isinstance(engine, LocalEngine)
    assert (engine.workers, engine.max_memory, engine.device) == (3, 4_000_000_000, "cpu")


def test_no_arguments_mean_help(mergestream: RunCommand) -> None:
    asked, alone = mergestream("--help"), mergestream()
    assert alone == asked and alone.code == 0 and alone.err == ""
    for name in COMMANDS:
        assert f"\n    {name}" in alone.out


@pytest.mark.parametrize(
    ("words", "right"),
    [
        ("expot store out", "export"),
        ("ad store expert --quiet", "add"),
        ("--verson", "--version"),
        ("export store out --overwite", "--overwrite"),
        ("export store out --max-shard-sise=2GB", "--max-shard-size"),
        ("init store --bse model", "--base"),
        ("merge --base model expert --otu merged", "--out"),
        ("bench vision --otput results", "--output"),
        ("export store out --format lroa", "lora"),
        ("report store --format htlm", "html"),
        ("add store expert --engine locl", "local"),
        ("merge --base model expert -o merged --method opmc", "opcm"),
        ("merge --base model expert -o merged --method opcm --set alhpa=0.5", "alpha"),
    ],
)
def test_a_misspelt_word_gets_a_suggestion(words: str, right: str, mergestream: RunCommand) -> None:
    result = mergestream(*words.split())
    assert result.code == 2 and result.out == ""
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
    assert f"; did you mean {right}?" in result.err


@pytest.mark.parametrize("words", ["xyzzy", "status store --xyzzy", "status store extra", "status store -x"])
def test_an_unknown_word_is_refused_without_a_suggestion(words: str, mergestream: RunCommand) -> None:
    result = mergestream(*words.split())
    assert result.code == 2 and result.err.startswith("error: ") and result.err.count("\n") == 1
    assert "did you mean" not in result.err


def test_abbreviations_and_quoted_dashes_are_accepted() -> None:
    assert parse(["export", "store", "out", "--over"]).overwrite, "options may be shortened as long as they are clear"
    assert parse(["add", "store", "--", "--expert"]).experts == ["--expert"]
    assert parse(["add", "store", "expert", "--name", "--an expert"]).name == "--an expert"
    assert parse(["add", "store", "expert", "--name=--x"]).name == "--x"


HEAVY = {"torch", "numpy", "msgspec", "rich", "transformers", "huggingface_hub", "obstore", "xxhash", "safetensors"}


def modules_after(*lines: list[str]) -> set[str]:
    """The modules that a fresh process has imported after these command lines."""
    code = f"""
import sys
from mergestream.cli import main
for words in {lines}:
    try:
        main(words)
    except SystemExit as exit:
        assert exit.code == 0
print(*sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split())


def test_help_imports_no_heavy_module_and_no_command() -> None:
    loaded = modules_after(["--help"], ["--version"], [])
    assert not HEAVY & loaded
    assert not {"importlib.metadata", "email", "concurrent.futures"} & loaded
    assert {name for name in loaded if name.startswith("mergestream.")} == {
        *("mergestream.cli", "mergestream.cli.parser", "mergestream.cli.printing"),
        *("mergestream.errors", "mergestream.escaping", "mergestream.interrupts", "mergestream.progress"),
    }


def test_the_help_of_commands_imports_no_heavy_module() -> None:
    loaded = modules_after(*([name, "--help"] for name in COMMANDS))
    assert not HEAVY & loaded
    assert not {"mergestream.store", "mergestream.methods", "mergestream.storage", "mergestream.engine"} & loaded
