"""The remove command."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.log import entry_json
from mergestream.cli.options import A_MODEL, ComputingOptions, WorkingStoreOptions, argument
from mergestream.cli.printing import answer, say
from mergestream.sizes import counted

HELP = "take any one expert out of a store, as if it had never come"
EXAMPLES = """
mergestream remove store legal
mergestream remove average-store legal --expert path/to/legal    # methods that add up need the model itself
"""


@dataclass(frozen=True)
class Options(WorkingStoreOptions, ComputingOptions):
    name: str = argument(metavar="NAME", help="of the expert, as mergestream log has it")
    expert: str | None = argument(
        "--expert", metavar="MODEL", help=f"{A_MODEL}: to be subtracted by average and task_arithmetic"
    )


def run(options: Options) -> int:
    store = options.open_store()
    removed = store.remove(options.name, options.expert)
    answer(entry_json(removed))
    say(f"{removed.name} removed; {store.place} has {counted(store.manifest.step, 'expert')}")
    return 0
