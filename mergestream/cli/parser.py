"""From the words of a command line to a command and its options.

Every command is a module of the same shape: what it is (``HELP``, ``EXAMPLES``), what it is told (``Options``,
``add_arguments``) and what it does (``run``). Help is to answer at once: what takes time to import is imported by
``run``, and the other commands' modules are only imported to list them.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn, Protocol, cast

from mergestream import __version__
from mergestream.errors import UsageError

DESCRIPTION = """\
Merge fine-tuned models into one model as they arrive.

A store keeps the merged state of all models absorbed so far, at a size that does not grow:

  mergestream init store --base path/to/base
  mergestream add store expert-1 expert-2
  mergestream export store merged
"""


COMMANDS = (
    *("init", "add", "inspect", "status", "log", "verify", "undo", "report", "diff"),
    *("export", "merge", "watch", "bench", "methods"),
)
"""In the order of the help; each is the module of its name beside this one."""


class Command(Protocol):
    """The shape of a command's module."""

    HELP: str
    EXAMPLES: str

    @property
    def Options(self) -> type[Any]:  # noqa: N802
        """A dataclass with a field for every argument."""

    def add_arguments(self, parser: ArgumentParser) -> None: ...

    def run(self, options: Any) -> int: ...


def load(name: str) -> Command:
    return cast(Command, import_module(f"mergestream.cli.{name}"))


def parse(words: Sequence[str]) -> tuple[Command, Any]:
    """The command that is meant, and its ``Options``. Wrong usage exits, as does help."""
    parser = _make_parser(words[:1] if words and words[0] in COMMANDS else COMMANDS)
    values = vars(parser.parse_args(words))
    command = load(values.pop("command"))
    return command, command.Options(**values)


def _make_parser(names: Iterable[str]) -> Parser:
    """The parser of the whole command line, with the named commands."""
    parser = Parser(prog="mergestream", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"mergestream {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name in names:
        command = load(name)
        of_command = commands.add_parser(
            name,
            help=command.HELP,
            description=command.HELP[0].upper() + command.HELP[1:] + ".",
            epilog="\n  ".join(["examples:", *command.EXAMPLES.strip().splitlines()]),
            formatter_class=RawDescriptionHelpFormatter,
        )
        command.add_arguments(of_command)
    return parser


class Parser(ArgumentParser):
    """Prints wrong usage like every other error, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(UsageError.exit_code, f"error: {message} (see: {self.prog} --help)\n")
