"""``mergestream push``: upload a store or an export to the Hugging Face hub."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.options import argument, switch
from mergestream.cli.printing import answer, make_progress, say

EXAMPLES = """
mergestream push store hf://org/name --private
mergestream push merged hf://org/name
"""


@dataclass(frozen=True)
class Options:
    place: str = argument("STORE", "a store, or a directory written by export")
    address: str = argument("hf://ORG/NAME", "the repository; it is created if it does not exist")
    private: bool = switch("--private", "create a private repository")


def run(options: Options) -> None:
    from mergestream.hub.transfer import push_model
    from mergestream.storage import open_storage
    from mergestream.store.manifest import is_store
    from mergestream.store.store import Store

    if is_store(open_storage(options.place)):
        store = Store(options.place, progress=make_progress())
        where = store.push(options.address, private=options.private)
    else:
        where = push_model(options.place, options.address, private=options.private)
    answer({"place": options.place, "pushed": where})
    say(f"{options.place} pushed to {where}")
