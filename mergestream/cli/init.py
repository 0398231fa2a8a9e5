"""``mergestream init``: create an empty store for a base model."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.options import MethodOptions, RunningOptions, argument, arguments_of
from mergestream.cli.printing import answer, counts_text, say
from mergestream.cli.status import status_json


@dataclass(frozen=True)
class Init(MethodOptions, RunningOptions):
    EXAMPLES = """
        mergestream init store --base path/to/base
        mergestream init store --base org/model@main --method ties --set density=0.1 --set mode=streaming
        mergestream init store --base bert --heads 'classifier.*' --not-linear '*.pooler.*'
        mergestream init s3://bucket/store --base s3://models/llama
        mergestream init store --base org/model --config-only    # for adapters only
        """
    store: str = argument("STORE", "the new store: a directory or s3://BUCKET/PATH")
    heads: list[str] = argument("--heads GLOB", "tensors to keep per expert instead of merging them")
    keep: int = argument("--keep N", "earlier steps to keep for undo (1)", type=int, default=1)
    verbose: bool = argument("--verbose", "with --json: list every tensor, as status does")
    config_only: bool = argument("--config-only", "fetch the base's weights only when they are needed")

    def run(self) -> None:
        from mergestream.store.store import Store

        made = {"path": self.store, "method": self.make_method(), **self.running}
        store = Store.create(**arguments_of(Store.create, self, **made))
        status = status_json(store)
        if not self.verbose:
            del status["tensors"]
        answer(status)
        say(f"{store.storage}: {store.manifest.method_text} on {store.manifest.base.source}")
        say(f"tensors: {counts_text(status['counts'])}")
        say(f"next: mergestream add {store.storage} EXPERT …")
