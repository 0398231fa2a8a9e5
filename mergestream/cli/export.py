"""The export command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergestream.cli.options import (
    ComputingOptions,
    OutputOptions,
    WorkingStoreOptions,
    argument,
    at_least,
    command_line,
    repeated,
    switch,
)
from mergestream.cli.printing import say
from mergestream.errors import UsageError

if TYPE_CHECKING:
    from mergestream.api import Store

HELP = "write the merged model as a directory that from_pretrained loads"
EXAMPLES = """
mergestream export store merged
mergestream export store merged --dtype bfloat16 --max-shard-size 2GB --overwrite
mergestream export store merged-for-spam --task spam
mergestream export store merged-gently --scale 0.2
mergestream export store merged --readout tsv --without legal --weight medical=0.5
mergestream export store legal-again --readout expert:legal
mergestream export store merged-adapter --format lora --rank 32
mergestream export store adapters --format loras --rank 16
"""


@dataclass(frozen=True)
class Options(WorkingStoreOptions, ComputingOptions, OutputOptions):
    out: str = argument(metavar="OUT")
    task: str | None = argument("--task", metavar="NAME", help="with the head of this expert")
    format: str = argument(
        "--format",
        choices=("full", "lora", "loras"),
        default="full",
        help="a model, a PEFT adapter, or one of every expert of a ledger (full)",
    )
    rank: int | None = argument("--rank", type=at_least(1), metavar="K", help="the adapter's rank (exact without)")
    readout: str | None = argument(
        "--readout",
        metavar="R",
        help="of a ledger: agree (the default), tempered (that of adapters), tsv, iso, sum or expert:NAME; "
        "of the others: plain or iso",
    )
    only: str | None = argument("--only", metavar="A,B", help="merge these experts of a ledger")
    without: str | None = argument("--without", metavar="A,B", help="leave these experts of a ledger out")
    weight: list[str] = repeated("--weight", "NAME=X", "the weight of an expert of a ledger (1)")
    balance: bool = switch("--balance", "weights by which all experts of a ledger are served alike")
    scale: str | None = argument(
        "--scale",
        metavar="X",
        help="merged = base + X · readout: a number, or adaptive, sqrt or mean where it adds up (the readout's own)",
    )

    @property
    def selection(self) -> dict[str, Any]:
        from mergestream.ledger.selection import parse_weights

        only, without = (tuple(filter(None, (names or "").split(","))) for names in (self.only, self.without))
        weights = parse_weights(self.weight)
        return {"readout": self.readout, "only": only, "without": without, "weights": weights, "balance": self.balance}


def run(options: Options) -> int:
    if options.format == "full" and options.rank is not None:
        raise UsageError("--rank is for adapters: add --format lora")
    if options.format != "full" and options.task is not None:
        raise UsageError("--task is for full models: an adapter has no head of its own")
    chosen = options.selection
    if options.format == "loras" and (any(chosen.values()) or options.scale is not None):
        raise UsageError("--format loras writes every expert as it is; --readout, --only and the like go with lora")
    store = options.open_store()
    common: dict[str, Any] = {"dtype": options.dtype, "overwrite": options.overwrite, "command": command_line()}
    if options.format == "loras":
        energies = store.export_adapters(options.out, rank=options.rank, **common)
        say(f"{options.out}: {len(energies)} adapters, {', '.join(energies)}")
        return 0
    if options.format == "lora":
        energy = store.export_adapter(options.out, **chosen, rank=options.rank, scale=options.scale, **common)
        exact = ", exactly" if energy.lost_share < 1e-12 else f", {energy.lost_share:.3%} of the energy left out"
    else:
        size = options.max_shard_size
        store.export(options.out, **chosen, scale=options.scale, task=options.task, max_shard_size=size, **common)
        exact = ""
    say(f"{options.out}: {_what_was_written(store, chosen)}{exact}")
    return 0


def _what_was_written(store: Store, chosen: dict[str, Any]) -> str:
    """``3 experts merged by ledger, read out by tsv``"""
    from mergestream.ledger.selection import Selection

    selection, method = Selection(**chosen), store.manifest.method
    if not store.method.remembers_experts:
        readout, count = selection.of_state(store.method).name, store.manifest.step
    else:
        found, weights = selection.of_entries(store.manifest.names, store.manifest.adapters)
        readout, count = found.name, len(weights)
        if readout == "expert":
            return f"{', '.join(weights)}, as the {method} remembers it"
    experts = "1 expert" if count == 1 else f"{count} experts"
    by = f", read out by {readout}{', balanced' if selection.balance else ''}" if readout != "plain" else ""
    return f"{experts} merged by {method}{by}"
