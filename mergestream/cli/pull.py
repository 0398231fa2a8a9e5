"""``mergestream pull``: download a store from the Hugging Face hub and verify it."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.options import RunningOptions, argument
from mergestream.cli.printing import answer, say

EXAMPLES = """
mergestream pull hf://org/name store
mergestream pull hf://org/name@main store --base path/to/base
"""


@dataclass(frozen=True)
class Options(RunningOptions):
    address: str = argument(metavar="hf://ORG/NAME", help="the repository; add @REVISION for an older version")
    store: str = argument(metavar="STORE", help="the new store, a directory")
    base: str | None = argument("--base", metavar="MODEL", help="location of the base (its digest is checked)")


def run(options: Options) -> None:
    from mergestream.checkpoints.location import hub_name, locate_here
    from mergestream.storage import parse_url
    from mergestream.store.store import Store

    progress = options.make_progress()
    store = Store.pull(
        options.address, options.store, base=options.base, engine=options.make_engine(), progress=progress
    )
    answer({"store": options.store, "step": store.manifest.step})
    say(f"{options.store}: step {store.manifest.step}, all digests match")
    base = store.manifest.base.source
    if not hub_name(base) and not parse_url(base) and locate_here(base) is None:
        progress.note(f"the base {base} is not on this machine; pass --base MODEL to the next command that needs it")
