"""The keep command."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.options import StoreOptions, argument, at_least
from mergestream.cli.printing import answer, say
from mergestream.sizes import counted

HELP = "change how many earlier steps are kept for undo (a ledger keeps all)"
EXAMPLES = """
mergestream keep store 3
mergestream keep store 0    # drops the steps before the last one
"""


@dataclass(frozen=True)
class Options(StoreOptions):
    steps: int = argument(type=at_least(0), metavar="N", help="earlier steps")


def run(options: Options) -> int:
    store = options.open_store()
    store.keep(options.steps)
    answer({"store": str(store.place), "keep": options.steps})
    say(f"{store.place} keeps {counted(options.steps, 'earlier step')} from now on")
    return 0
