"""``mergestream verify``, ``undo``, ``remove``, ``calibrate``, ``keep`` and ``gc``: look after a store."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.options import MODEL, InputsOptions, StoreOptions, WorkingStoreOptions, argument, at_least
from mergestream.cli.printing import answer, say
from mergestream.cli.status import entry_json
from mergestream.errors import UsageError
from mergestream.sizes import counted, format_size


@dataclass(frozen=True)
class Verify(WorkingStoreOptions):
    EXAMPLES = "mergestream verify store"

    def run(self) -> None:
        store = self.open_store()
        store.verify()
        answer({"store": str(store.storage), "step": store.manifest.step})
        say(f"{store.storage}: all digests match")


@dataclass(frozen=True)
class Undo(StoreOptions):
    EXAMPLES = "mergestream undo store"

    def run(self) -> None:
        store = self.open_store()
        before = store.manifest.step
        undone = store.undo()
        step = store.manifest.step
        answer({"store": str(store.storage), "step": step, "undone": entry_json(undone)})
        what = "is in the store again" if step > before else "taken back"
        name = f"the inputs of {undone.name}" if step == before else undone.name
        say(f"{name} {what}; {store.storage} is at step {step}")


@dataclass(frozen=True)
class Remove(WorkingStoreOptions):
    EXAMPLES = "mergestream remove store legal"
    name: str = argument("NAME", "name of the expert, as shown by mergestream log")

    def run(self) -> None:
        store = self.open_store()
        removed = store.remove(self.name)
        answer(entry_json(removed))
        say(f"{removed.name} removed; {store.storage} has {counted(store.manifest.step, 'expert')}")


@dataclass(frozen=True)
class Calibrate(WorkingStoreOptions, InputsOptions):
    EXAMPLES = """
        mergestream calibrate store legal --inputs prompts.jsonl
        mergestream calibrate store birds --inputs path/to/images --inputs-count 128
        mergestream calibrate store legal --inputs prompts.jsonl --expert new/path/to/legal
        """
    name: str = argument("NAME", "name of the expert, as shown by mergestream log")
    expert: str | None = argument("--expert MODEL", f"the expert itself, if it has moved: {MODEL}")

    def run(self) -> None:
        inputs = self.make_inputs()
        if inputs is None:
            raise UsageError("--inputs FILE is missing: a few unlabelled inputs of the expert")
        store = self.open_store()
        entry = store.calibrate(self.name, inputs, self.expert)
        answer(entry_json(entry))
        assert entry.inputs is not None
        say(f"{entry.name} was run on {entry.inputs.count} inputs; {store.storage} is at step {store.manifest.step}")


@dataclass(frozen=True)
class Keep(StoreOptions):
    EXAMPLES = """
        mergestream keep store 3
        mergestream keep store 0    # deletes all steps before the last one; a ledger keeps all
        """
    steps: int = argument("N", "number of earlier steps", type=at_least(0))

    def run(self) -> None:
        store = self.open_store()
        store.keep(self.steps)
        answer({"store": str(store.storage), "keep": self.steps})
        say(f"{store.storage} now keeps {counted(self.steps, 'earlier step')}")


@dataclass(frozen=True)
class Gc(StoreOptions):
    EXAMPLES = """
        mergestream gc store                # interrupted steps can then no longer be resumed
        mergestream gc s3://bucket/store    # other writers of this store fail
        """

    def run(self) -> None:
        store = self.open_store()
        removed = store.gc()
        answer({"store": str(store.storage), "removed": removed})
        say(f"{store.storage}: {format_size(removed)} deleted")
