"""Argument parsing: find the command's class and create it from the command line.

Each command is a dataclass with one field per argument, ``EXAMPLES``, and ``run``, which raises an error if the command
fails. Only the module of the chosen command is imported, and modules import slow libraries inside ``run``, so that help
appears at once.
"""

from __future__ import annotations

from argparse import Action, ArgumentError, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Container, Iterable, Sequence
from importlib import import_module
from itertools import takewhile
from typing import Any, NoReturn

from mergestream import __version__
from mergestream.errors import UsageError, did_you_mean

DESCRIPTION = """\
Merge fine-tuned models (experts) into one model as they arrive.

A store keeps the merged state of all experts added so far:

  mergestream init store --base path/to/base
  mergestream add store path/to/expert-1 path/to/expert-2
  mergestream export store merged
"""

COMMANDS = {
    "init": "create an empty store for a base model",
    "add": "add experts to a store, each as one step",
    "inspect": "show what adding an expert would do, without changing the store",
    "status": "show the state of a store and the role of each tensor",
    "log": "list the experts of a store in the order they were added",
    "verify": "recompute all digests of a store and its base, and compare them",
    "undo": "take back the last add, remove or calibrate",
    "keep": "set how many earlier steps a store keeps for undo",
    "gc": "delete what interrupted commands left behind in a store",
    "remove": "remove any one expert from a store",
    "calibrate": "give an expert a few unlabelled inputs, for a better merge",
    "report": "write a report on a store as HTML, Markdown or JSON",
    "diff": "compare two steps of a store, or a step and a checkpoint",
    "export": "write the merged model as a directory that from_pretrained loads",
    "merge": "merge experts in one go, without a store",
    "push": "upload a store or an export to the Hugging Face hub",
    "pull": "download a store from the Hugging Face hub and verify it",
    "from-mergekit": "run a merge recipe that was written for mergekit",
    "watch": "add experts as they appear in a directory or bucket, until interrupted",
    "bench": "merge the experts of a suite by several methods and score every task",
    "methods": "list the merging methods and readouts with their parameters",
}
"""What each command does, in the order of the help"""
_SHARED = {
    "add": ("inspect",),
    "maintain": ("verify", "undo", "remove", "calibrate", "keep", "gc"),
    "merge": ("from-mergekit",),
    "report": ("diff",),
    "status": ("init", "log"),
    "transfer": ("push", "pull"),
}
"""Modules of several commands. Every other command has a module of its name."""


def load(name: str) -> type[Any]:
    """Import a command: ``from-mergekit`` is the class ``FromMergekit`` of ``merge.py``."""
    shared = (module for module, names in _SHARED.items() if name in names)
    module = import_module(f"mergestream.cli.{next(shared, name)}")
    command: type[Any] = getattr(module, name.title().replace("-", ""))
    return command


def parse(words: Sequence[str]) -> Any:
    """Parse the command line into a command. No words mean ``--help``, which exits."""
    words = words or ["--help"]
    first, *others = words
    parser, parsers = make_parser({first})
    if first in COMMANDS:
        parsers[first].refuse_unknown_options(others)
    else:
        parser.refuse_unknown_options([first])
    values = vars(parser.parse_args(words))
    del values["json"]
    return load(values.pop("command"))(**values)


def wants_json(words: Iterable[str]) -> bool:
    """Check for ``--json`` or an abbreviation of it before parsing, because parse errors are reported as JSON too."""
    return any(len(word) > 2 and "--json".startswith(word) for word in _options_part(words))


def _options_part(words: Iterable[str]) -> Iterable[str]:
    return takewhile(lambda word: word != "--", words)


def make_parser(loaded: Container[str]) -> tuple[Parser, dict[str, Parser]]:
    """Build the parser of the command line and of each command, with arguments only for the ``loaded`` ones."""
    parser = Parser(prog="mergestream", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"mergestream {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    parsers: dict[str, Parser] = {}
    for name, summary in COMMANDS.items():
        description = f"{summary[0].upper()}{summary[1:]}."
        parsers[name] = commands.add_parser(
            name, help=summary, description=description, formatter_class=RawDescriptionHelpFormatter
        )
        if name in loaded:
            from mergestream.cli.options import add_arguments

            command = load(name)
            add_arguments(parsers[name], command)
            parsers[name].add_argument("--json", action="store_true", help="print result, notes and any error as JSON")
            parsers[name].epilog = "\n  ".join(["examples:", *map(str.strip, command.EXAMPLES.strip().splitlines())])
    return parser, parsers


class Parser(ArgumentParser):
    """An argument parser that raises `UsageError` and suggests the closest known word."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see: {self.prog} --help)")

    def refuse_unknown_options(self, words: Iterable[str]) -> None:
        """Refuse a misspelt option before parsing; argparse would only report that a required one is missing."""
        known = self._option_string_actions
        for word in _options_part(words):
            option = word.partition("=")[0]
            is_option = word.startswith("--") and " " not in word  # the same rule as in argparse
            if is_option and not any(name.startswith(option) for name in known):
                self.error(f"there is no option {option}{did_you_mean(option, known)}")

    def _check_value(self, action: Action, value: Any) -> None:
        """Refuse a command or a value that is not among its choices (overrides argparse)."""
        if action.choices is not None and value not in action.choices:
            suggestion = did_you_mean(value, action.choices)
            raise ArgumentError(action, f"there is no {value}{suggestion} (there are: {', '.join(action.choices)})")
