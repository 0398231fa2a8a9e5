"""The keep command."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.options import ChangedStoreOptions, argument, at_least

HELP = "change how many earlier steps are kept for undo (a ledger keeps all)"
EXAMPLES = """
mergestream keep store 3
mergestream keep store 0    # drops the steps before the last one
"""


@dataclass(frozen=True)
class Options(ChangedStoreOptions):
    steps: int = argument(type=at_least(0), metavar="N", help="earlier steps")


def run(options: Options) -> int:
    store = options.open_store()
    store.keep(options.steps)
    print(f"{store.path} keeps {options.steps} earlier steps from now on")
    return 0
