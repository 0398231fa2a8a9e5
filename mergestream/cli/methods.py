"""The methods command."""

from __future__ import annotations

import dataclasses
import inspect
from argparse import Namespace
from typing import Any

from mergestream.cli.common import print_json
from mergestream.methods import METHODS


def methods(arguments: Namespace) -> int:
    if arguments.json:
        print_json([_describe(name) for name in METHODS])
        return 0
    for name in METHODS:
        described = _describe(name)
        print(f"{name}: {described['summary']}")
        for parameter in described["parameters"]:
            choices = f" ({', '.join(parameter['choices'])})" if parameter["choices"] else ""
            print(f"    --set {parameter['name']}={parameter['default']}   {parameter['help']}{choices}")
    return 0


def _describe(name: str) -> dict[str, Any]:
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
            for field in dataclasses.fields(method)
        ],
    }
