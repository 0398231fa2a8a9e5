"""The methods command."""

from __future__ import annotations

from dataclasses import dataclass, fields
from inspect import getdoc
from typing import Any

from mergestream.cli.options import switch
from mergestream.cli.printing import print_json
from mergestream.errors import UsageError

HELP = "list the methods, their parameters, and who brings them"
EXAMPLES = "mergestream methods"


@dataclass(frozen=True)
class Options:
    json: bool = switch("--json", "as JSON")


def run(options: Options) -> int:
    from mergestream.methods import METHODS

    described = [_describe(name) for name in METHODS]
    if options.json:
        print_json(described)
        return 0
    for method in described:
        print(f"{method['name']}: {method['summary']} (from {method['origin']})")
        for parameter in method["parameters"]:
            choices = f" ({', '.join(parameter['choices'])})" if parameter["choices"] else ""
            print(f"    --set {parameter['name']}={parameter['default']}   {parameter['help']}{choices}")
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
        "summary": (getdoc(method) or "").splitlines()[0],
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
