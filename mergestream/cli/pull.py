"""The pull command."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.options import RunningOptions, argument
from mergestream.cli.printing import answer, say

HELP = "download a store from the Hugging Face hub, and verify it"
EXAMPLES = """
mergestream pull hf://org/name store
mergestream pull hf://org/name@main store --base path/to/base
"""


@dataclass(frozen=True)
class Options(RunningOptions):
    address: str = argument(metavar="hf://ORG/NAME", help="the repository, with @revision for another than the newest")
    store: str = argument(metavar="STORE", help="the directory to be")
    base: str | None = argument("--base", metavar="MODEL", help="where its base is here (its digest is checked)")


def run(options: Options) -> int:
    from mergestream.api import Store
    from mergestream.checkpoints.location import hub_name, locate_here
    from mergestream.objects import url_of

    progress = options.make_progress()
    store = Store.pull(
        options.address, options.store, base=options.base, engine=options.make_engine(), progress=progress
    )
    answer({"store": options.store, "step": store.manifest.step})
    say(f"{options.store}: step {store.manifest.step}, all digests match")
    base = store.manifest.base.source
    if not hub_name(base) and not url_of(base) and locate_here(base) is None:
        progress.note(f"its base, {base}, is not on this machine: pass --base MODEL to the next command that needs it")
    return 0
