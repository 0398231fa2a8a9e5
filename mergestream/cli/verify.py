"""``mergestream verify``: recompute all digests of a store and its base, and compare them."""

from __future__ import annotations

from mergestream.cli.options import WorkingStoreOptions
from mergestream.cli.printing import answer, say

EXAMPLES = "mergestream verify store"

Options = WorkingStoreOptions


def run(options: Options) -> None:
    store = options.open_store()
    store.verify()
    answer({"store": str(store.storage), "step": store.manifest.step})
    say(f"{store.storage}: all digests match")
