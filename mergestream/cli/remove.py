"""``mergestream remove``: remove any one expert from a store."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.log import entry_json
from mergestream.cli.options import MODEL, ComputingOptions, WorkingStoreOptions, argument
from mergestream.cli.printing import answer, say
from mergestream.sizes import counted

EXAMPLES = """
mergestream remove store legal
mergestream remove average-store legal --expert path/to/legal    # average and task_arithmetic
"""


@dataclass(frozen=True)
class Options(WorkingStoreOptions, ComputingOptions):
    name: str = argument("NAME", "name of the expert, as shown by mergestream log")
    expert: str | None = argument(
        "--expert MODEL", f"the expert itself, which average and task_arithmetic subtract: {MODEL}"
    )


def run(options: Options) -> None:
    store = options.open_store()
    removed = store.remove(options.name, options.expert)
    answer(entry_json(removed))
    say(f"{removed.name} removed; {store.storage} has {counted(store.manifest.step, 'expert')}")
