"""The verify command."""

from __future__ import annotations

from mergestream.cli.options import WorkingStoreOptions
from mergestream.cli.printing import answer, say

HELP = "recompute every digest of a store and its base"
EXAMPLES = "mergestream verify store"

Options = WorkingStoreOptions


def run(options: Options) -> int:
    store = options.open_store()
    store.verify()
    answer({"store": str(store.place), "step": store.manifest.step})
    say(f"{store.place}: all digests match")
    return 0
