"""The methods command."""

from __future__ import annotations

from dataclasses import dataclass, fields
from inspect import getdoc
from typing import Any

from mergestream.cli.printing import answer, say
from mergestream.errors import UsageError

HELP = "list the methods and readouts, their parameters, and who brings them"
EXAMPLES = "mergestream methods"


@dataclass(frozen=True)
class Options:
    """There is nothing to choose."""


def run(options: Options) -> int:
    from mergestream.ledger.readouts import READOUTS
    from mergestream.ledger.readouts.base import EntriesReadout
    from mergestream.methods import METHODS

    described = [_describe(name) for name in METHODS]
    answer(described)
    for method in described:
        say(f"{method['name']}: {method['summary']} (from {method['origin']})")
        for parameter in method["parameters"]:
            choices = f" ({', '.join(parameter['choices'])})" if parameter["choices"] else ""
            say(f"    --set {parameter['name']}={parameter['default']}   {parameter['help']}{choices}")
    say("readouts of a ledger, for export --readout:")
    for name, readout in READOUTS.items():
        if issubclass(readout, EntriesReadout):
            say(f"    {name}: {_summary(readout)} (from {READOUTS.origin(name)})")
    return 0


def _describe(name: str) -> dict[str, Any]:
    from mergestream.methods import METHODS

    described: dict[str, Any] = {"name": name, "origin": METHODS.origin(name)}
    try:
        method = METHODS[name]
    except UsageError as error:  # of another package: the others are still there
        return {**described, "summary": str(error), "commutative": None, "parameters": []}
    return {
        **described,
        "summary": _summary(method),
        "commutative": method().commutative,
        "parameters": [
            {
                "name": field.name,
                "default": field.default,
                "help": field.metadata.get("help", ""),
                "choices": list(field.metadata.get("choices", ())),
            }
            for field in fields(method)
        ],
    }


def _summary(described: type) -> str:
    return (getdoc(described) or "").partition("\n")[0]
