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
        methods = [describe_method(name) for name in METHODS if name in names]
        readouts = [describe_readout(name) for name in READOUTS if name in names]
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


def describe_method(name: str) -> dict[str, Any]:
    """Describe a method: origin, summary, parameters, and whether the order of experts matters."""
    from mergestream.methods import METHODS

    found, method = _describe(METHODS, name)
    if method is None:
        return {**found, "commutative": None, "parameters": []}
    parameters = [
        {"name": item.name, "default": item.default, "help": item.metadata.get("help", "")}
        | {"choices": list(item.metadata.get("choices", ()))}
        for item in fields(method)
    ]
    return {**found, "commutative": method().commutative, "parameters": parameters}


def describe_readout(name: str) -> dict[str, Any]:
    """Describe a readout: origin, summary, and whether it reads the entries of a ledger."""
    from mergestream.ledger.readouts import READOUTS
    from mergestream.ledger.readouts.base import EntriesReadout

    found, readout = _describe(READOUTS, name)
    return {**found, "of_ledgers": readout is not None and issubclass(readout, EntriesReadout)}


def _describe(registry: Registry[Any], name: str) -> tuple[dict[str, Any], Any]:
    """A plug-in and what all kinds have; None for one that cannot be loaded, which must not hide the others."""
    found = {"name": name, "origin": registry.origin(name)}
    try:
        item = registry[name]
    except UsageError as error:
        return {**found, "summary": str(error)}, None
    return {**found, "summary": (getdoc(item) or "").partition("\n")[0]}, item


def _print_item(item: dict[str, Any]) -> None:
    origin = "" if item["origin"] == "mergestream" else f" (from {item['origin']})"
    lines = [f"  {item['name']}: {item['summary']}{origin}"]
    for parameter in item.get("parameters", ()):
        choices = f" ({', '.join(parameter['choices'])})" if parameter["choices"] else ""
        lines.append(f"    --set {parameter['name']}={parameter['default']}   {parameter['help']}{choices}")
    for line in lines:
        print_text(fill(one_line(line, MAX_SENTENCE), WIDTH, subsequent_indent=" " * 8))
