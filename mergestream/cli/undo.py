"""The undo command."""

from __future__ import annotations

from mergestream.cli.options import ChangedStoreOptions
from mergestream.cli.printing import say

HELP = "go back to before the last expert"
EXAMPLES = "mergestream undo store"

Options = ChangedStoreOptions


def run(options: Options) -> int:
    store = options.open_store()
    undone = store.undo()
    say(f"{undone.name} taken back; {store.path} is at step {store.manifest.step}")
    return 0
