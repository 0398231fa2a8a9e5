"""``mergestream undo``: take back the last add, remove or calibrate."""

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
    step = store.manifest.step
    what = "is in the store again" if step > before else "taken back"
    say(
        f"{f'the inputs of {undone.name}' if step == before else undone.name} {what}; {store.storage} is at step {step}"
    )
