"""``mergestream gc``: delete what interrupted commands left behind in a store."""

from __future__ import annotations

from mergestream.cli.options import StoreOptions
from mergestream.cli.printing import answer, say
from mergestream.sizes import format_size

EXAMPLES = """
mergestream gc store                # interrupted steps can then no longer be resumed
mergestream gc s3://bucket/store    # other writers of this store fail
"""

Options = StoreOptions


def run(options: Options) -> None:
    store = options.open_store()
    removed = store.gc()
    answer({"store": str(store.storage), "removed": removed})
    say(f"{store.storage}: {format_size(removed)} deleted")
