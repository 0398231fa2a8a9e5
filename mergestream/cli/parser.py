"""From the words of a command line to a command and its options.

Every command is a module of the same shape: what it is (``HELP``, ``EXAMPLES``), what it is told (``Options``) and
what it does (``run``). Help is to answer at once: what takes time to import is imported by ``run``, and the other
commands' modules are only imported to list them.
"""

from __future__ import annotations

from argparse import Action, ArgumentError, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import takewhile
from typing import Any, NoReturn, Protocol, cast

from mergestream import __version__
from mergestream.cli.options import add_arguments
from mergestream.errors import UsageError, did_you_mean

DESCRIPTION = """\
Merge fine-tuned models into one model as they arrive.

A store keeps the merged state of all models absorbed so far, at a size that does not grow:

  mergestream init store --base path/to/base
  mergestream add store expert-1 expert-2
  mergestream export store merged
"""


COMMANDS = (
    *("init", "add", "inspect", "status", "log", "verify", "undo", "keep", "gc", "remove", "report", "diff"),
    *("export", "merge", "replay", "push", "pull", "from-mergekit", "watch", "bench", "methods"),
)
"""In the order of the help; each is the module of its name beside this one, with _ for -."""


class Command(Protocol):
    """The shape of a command's module."""

    HELP: str
    EXAMPLES: str

    @property
    def Options(self) -> type[Any]:  # noqa: N802
        """A dataclass with a field for every argument."""

    def run(self, options: Any) -> int: ...


def load(name: str) -> Command:
    return cast(Command, import_module(f"mergestream.cli.{name.replace('-', '_')}"))


def parse(words: Sequence[str]) -> tuple[Command, Any]:
    """The command that is meant, and its ``Options``. Help exits, and no words at all ask for it."""
    words = words or ["--help"]
    first, *others = words
    if first in COMMANDS:
        parser, parsers = make_parser([first])
        parsers[first].refuse_unknown_options(others)
    else:
        parser, _ = make_parser(COMMANDS)
        parser.refuse_unknown_options([first])
    values = vars(parser.parse_args(words))
    command = load(values.pop("command"))
    del values["json"]
    return command, command.Options(**values)


def asks_for_json(words: Sequence[str]) -> bool:
    """Whether ``--json`` is among them, however shortened; told before parsing, for what is wrong with the others is
    said in JSON as well."""
    return any(len(word) > 2 and "--json".startswith(word) for word in _before_dashes(words))


def _before_dashes(words: Iterable[str]) -> Iterable[str]:
    return takewhile(lambda word: word != "--", words)


def make_parser(names: Iterable[str]) -> tuple[Parser, dict[str, Parser]]:
    """The parser of the whole command line, and that of each of the named commands."""
    parser = Parser(prog="mergestream", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"mergestream {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    parsers: dict[str, Parser] = {}
    for name in names:
        command = load(name)
        parsers[name] = commands.add_parser(
            name,
            help=command.HELP,
            description=command.HELP[0].upper() + command.HELP[1:] + ".",
            epilog="\n  ".join(["examples:", *command.EXAMPLES.strip().splitlines()]),
            formatter_class=RawDescriptionHelpFormatter,
        )
        add_arguments(parsers[name], command.Options)
        parsers[name].add_argument("--json", action="store_true", help="answer in JSON, with the notes and any error")
    return parser, parsers


class Parser(ArgumentParser):
    """Wrong usage is an error like every other, with the nearest right word."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see: {self.prog} --help)")

    def refuse_unknown_options(self, words: Iterable[str]) -> None:
        """Before parsing, where argparse would say that a required option is missing when it is only misspelt."""
        known = self._option_string_actions
        for word in _before_dashes(words):
            option = word.partition("=")[0]
            is_option = word.startswith("--") and " " not in word  # as argparse sees it
            if is_option and not any(name.startswith(option) for name in known):
                self.error(f"there is no option {option}{did_you_mean(option, known)}")

    def _check_value(self, action: Action, value: Any) -> None:
        """Where argparse compares a command, or the value of an option, with its choices."""
        if action.choices is not None and value not in action.choices:
            choices = ", ".join(action.choices)
            raise ArgumentError(
                action, f"there is no {value}{did_you_mean(value, action.choices)} (there are: {choices})"
            )
