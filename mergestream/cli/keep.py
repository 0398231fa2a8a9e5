"""``mergestream keep``: set how many earlier steps a store keeps for undo."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.options import StoreOptions, argument, at_least
from mergestream.cli.printing import answer, say
from mergestream.sizes import counted

EXAMPLES = """
mergestream keep store 3
mergestream keep store 0    # deletes all steps before the last one; a ledger keeps all
"""


@dataclass(frozen=True)
class Options(StoreOptions):
    steps: int = argument("N", "number of earlier steps", type=at_least(0))


def run(options: Options) -> None:
    store = options.open_store()
    store.keep(options.steps)
    answer({"store": str(store.storage), "keep": options.steps})
    say(f"{store.storage} now keeps {counted(options.steps, 'earlier step')}")
