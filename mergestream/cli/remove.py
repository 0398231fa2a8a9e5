"""``mergestream remove``: remove any one expert from a ledger."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.log import entry_json
from mergestream.cli.options import WorkingStoreOptions, argument
from mergestream.cli.printing import answer, say
from mergestream.sizes import counted

EXAMPLES = """
mergestream remove store legal
"""


@dataclass(frozen=True)
class Options(WorkingStoreOptions):
    name: str = argument("NAME", "name of the expert, as shown by mergestream log")


def run(options: Options) -> None:
    store = options.open_store()
    removed = store.remove(options.name)
    answer(entry_json(removed))
    say(f"{removed.name} removed; {store.storage} has {counted(store.manifest.step, 'expert')}")
