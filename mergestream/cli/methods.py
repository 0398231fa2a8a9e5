"""The methods command."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.described import described_methods, described_readouts
from mergestream.cli.printing import answer, say

HELP = "list the methods and readouts, their parameters, and who brings them"
EXAMPLES = "mergestream methods"


@dataclass(frozen=True)
class Options:
    """There is nothing to choose."""


def run(options: Options) -> int:
    methods = described_methods()
    answer(methods)
    for method in methods:
        say(f"{method['name']}: {method['summary']} (from {method['origin']})")
        for parameter in method["parameters"]:
            choices = f" ({', '.join(parameter['choices'])})" if parameter["choices"] else ""
            say(f"    --set {parameter['name']}={parameter['default']}   {parameter['help']}{choices}")
    say("readouts of a ledger, for export --readout:")
    for readout in described_readouts():
        if readout["of_ledgers"]:
            say(f"    {readout['name']}: {readout['summary']} (from {readout['origin']})")
    return 0
