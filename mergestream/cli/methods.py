"""The methods command."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import dataclass, fields
from typing import Any

from mergestream.cli.printing import print_json

HELP = "list the methods and their parameters"
EXAMPLES = "mergestream methods"


@dataclass(frozen=True)
class Options:
    json: bool


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(options: Options) -> int:
    from mergestream.methods import METHODS

    described = [_describe(name) for name in METHODS]
    if options.json:
        print_json(described)
        return 0
    for method in described:
        print(f"{method['name']}: {method['summary']}")
        for parameter in method["parameters"]:
            choices = f" ({', '.join(parameter['choices'])})" if parameter["choices"] else ""
            print(f"    --set {parameter['name']}={parameter['default']}   {parameter['help']}{choices}")
    return 0


def _describe(name: str) -> dict[str, Any]:
    import inspect

    from mergestream.methods import METHODS

    method = METHODS[name]
    return {
        "name": name,
        "summary": (inspect.getdoc(method) or "").splitlines()[0],
        "commutative": method().commutative,
        "parameters": [
            {
                "name": field.name,
                "default": field.default,
                "help": field.metadata["help"],
                "choices": list(field.metadata["choices"]),
            }
            for field in fields(method)
        ],
    }
