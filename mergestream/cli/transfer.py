"""``mergestream push`` and ``mergestream pull``: stores and exports on the Hugging Face hub."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.options import RunningOptions, argument, arguments_of
from mergestream.cli.printing import answer, make_progress, say


@dataclass(frozen=True)
class Push:
    EXAMPLES = """
        mergestream push store hf://org/name --private
        mergestream push merged hf://org/name
        """
    place: str = argument("STORE", "a store, or a directory written by export")
    address: str = argument("hf://ORG/NAME", "the repository; it is created if it does not exist")
    private: bool = argument("--private", "create a private repository")

    def run(self) -> None:
        from mergestream.hub.transfer import push_model
        from mergestream.storage import open_storage
        from mergestream.store.manifest import is_store
        from mergestream.store.store import Store

        if is_store(open_storage(self.place)):
            where = Store(self.place, progress=make_progress()).push(self.address, private=self.private)
        else:
            where = push_model(self.place, self.address, private=self.private)
        answer({"place": self.place, "pushed": where})
        say(f"{self.place} pushed to {where}")


@dataclass(frozen=True)
class Pull(RunningOptions):
    EXAMPLES = """
        mergestream pull hf://org/name store
        mergestream pull hf://org/name@main store --base path/to/base
        """
    address: str = argument("hf://ORG/NAME", "the repository; add @REVISION for an older version")
    store: str = argument("STORE", "the new store, a directory")
    base: str | None = argument("--base MODEL", "location of the base (its digest is checked)")

    def run(self) -> None:
        from mergestream.store.store import Store

        store = Store.pull(**arguments_of(Store.pull, self, path=self.store, **self.running))
        answer({"store": self.store, "step": store.manifest.step})
        say(f"{self.store}: step {store.manifest.step}, all digests match")
