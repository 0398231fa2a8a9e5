"""The gc command."""

from __future__ import annotations

from mergestream.cli.options import StoreOptions
from mergestream.cli.printing import answer, say
from mergestream.sizes import format_size

HELP = "remove what killed commands have left in a store, also what could be resumed"
EXAMPLES = """
mergestream gc store
mergestream gc s3://bucket/store    # whoever is writing there loses
"""


Options = StoreOptions


def run(options: Options) -> int:
    store = options.open_store()
    removed = store.gc()
    answer({"store": str(store.place), "removed": removed})
    say(f"{store.place}: {format_size(removed)} removed")
    return 0
