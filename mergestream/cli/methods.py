"""``mergestream methods``: list the merging methods and readouts, or describe one of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from inspect import getdoc
from textwrap import fill
from typing import TYPE_CHECKING, Any

from mergestream.cli.options import argument
from mergestream.cli.printing import answer, print_text, say
from mergestream.errors import UsageError, did_you_mean
from mergestream.escaping import MAX_SENTENCE, one_line

if TYPE_CHECKING:
    from mergestream.registry import Registry

WIDTH = 80


@dataclass(frozen=True)
class Methods:
    EXAMPLES = """
        mergestream methods
        mergestream methods ties
        mergestream methods agree --json
        """
    name: str | None = argument("NAME", "describe only this method or readout", nargs="?")

    def run(self) -> None:
        from mergestream.ledger.readouts import READOUTS
        from mergestream.methods import METHODS

        names = [self.name] if self.name else [*METHODS, *READOUTS]
        methods = [describe(METHODS, name) for name in METHODS if name in names]
        readouts = [describe(READOUTS, name) for name in READOUTS if name in names]
        if not (methods or readouts):
            suggestion = did_you_mean(names[0], [*METHODS, *READOUTS])
            raise UsageError(f"there is no method or readout {self.name}{suggestion}")
        answer([*methods, *readouts] if self.name else methods)
        for item in methods:
            _print_item(item)
        if readouts:
            say("readouts, for export --readout:")
        for item in readouts:
            _print_item(item)


def describe(kind: Registry[Any], name: str) -> dict[str, Any]:
    """Describe a method or a readout: its origin, its summary and what only methods, or readouts, have.

    A plug-in that cannot be loaded has its error as summary, so that it does not hide the others.
    """
    from mergestream.ledger.readouts.base import EntriesReadout
    from mergestream.methods.base import Method

    found = {"name": name, "origin": kind.origin(name)}
    try:
        item = kind[name]
    except UsageError as error:
        return {**found, "summary": str(error)}
    found["summary"] = (getdoc(item) or "").partition("\n")[0]
    if not issubclass(item, Method):
        return {**found, "of_ledgers": issubclass(item, EntriesReadout)}
    parameters = [
        {"name": field.name, "default": field.default, "help": field.metadata.get("help", "")}
        | {"choices": list(field.metadata.get("choices", ()))}
        for field in fields(item)
    ]
    return {**found, "commutative": item().commutative, "parameters": parameters}


def _print_item(item: dict[str, Any]) -> None:
    origin = "" if item["origin"] == "mergestream" else f" (from {item['origin']})"
    lines = [f"  {item['name']}: {item['summary']}{origin}"]
    for parameter in item.get("parameters", ()):
        choices = f" ({', '.join(parameter['choices'])})" if parameter["choices"] else ""
        lines.append(f"    --set {parameter['name']}={parameter['default']}   {parameter['help']}{choices}")
    for line in lines:
        print_text(fill(one_line(line, MAX_SENTENCE), WIDTH, subsequent_indent=" " * 8))
