"""``mergestream calibrate``: give an expert of a ledger a few unlabelled inputs."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.log import entry_json
from mergestream.cli.options import MODEL, InputsOptions, WorkingStoreOptions, argument
from mergestream.cli.printing import answer, say
from mergestream.errors import UsageError


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
