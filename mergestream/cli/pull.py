"""``mergestream pull``: download a store from the Hugging Face hub and verify it."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.options import RunningOptions, argument, arguments_of
from mergestream.cli.printing import answer, say

EXAMPLES = """
mergestream pull hf://org/name store
mergestream pull hf://org/name@main store --base path/to/base
"""


@dataclass(frozen=True)
class Options(RunningOptions):
    address: str = argument("hf://ORG/NAME", "the repository; add @REVISION for an older version")
    store: str = argument("STORE", "the new store, a directory")
    base: str | None = argument("--base MODEL", "location of the base (its digest is checked)")


def run(options: Options) -> None:
    from mergestream.store.store import Store

    made = {"path": options.store, "engine": options.make_engine(), "progress": options.make_progress()}
    store = Store.pull(**arguments_of(Store.pull, options, **made))
    answer({"store": options.store, "step": store.manifest.step})
    say(f"{options.store}: step {store.manifest.step}, all digests match")
