"""``mergestream undo``: take back the last expert, or the last calibrate."""

from __future__ import annotations

from mergestream.cli.log import entry_json
from mergestream.cli.options import StoreOptions
from mergestream.cli.printing import answer, say

EXAMPLES = "mergestream undo store"

Options = StoreOptions


def run(options: Options) -> None:
    store = options.open_store()
    before = store.manifest.step
    undone = store.undo()
    answer({"store": str(store.storage), "step": store.manifest.step, "undone": entry_json(undone)})
    what = undone.name if store.manifest.step < before else f"the inputs of {undone.name}"
    say(f"{what} taken back; {store.storage} is at step {store.manifest.step}")
