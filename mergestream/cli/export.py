"""The export command."""

from __future__ import annotations

from collections.abc import Sequence
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
from mergestream.cli.printing import add_to_answer, answer, say
from mergestream.errors import MergestreamError, UsageError
from mergestream.escaping import shell_command
from mergestream.sizes import counted

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
mergestream export store merged --push org/name --private
"""


@dataclass(frozen=True)
class Options(WorkingStoreOptions, ComputingOptions, OutputOptions):
    out: str = argument(metavar="OUT", help="the directory to be")
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
    push: str | None = argument("--push", metavar="ORG/NAME", help="upload it to the Hugging Face hub, with its card")
    private: bool = switch("--private", "to a repository that only you and your organisation see")

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
    if options.private and not options.push:
        raise UsageError("--private is for the repository that --push ORG/NAME names")
    if options.push:
        from mergestream.hub.repository import check_login, repository_name

        repository_name(options.push)
        check_login()  # before the work
    chosen = options.selection
    if options.format == "loras" and (any(chosen.values()) or options.scale is not None):
        raise UsageError("--format loras writes every expert as it is; --readout, --only and the like go with lora")
    store = options.open_store()
    common: dict[str, Any] = {"dtype": options.dtype, "overwrite": options.overwrite, "command": command_line()}
    if options.format == "loras":
        energies = store.export_adapters(options.out, rank=options.rank, **common)
        each = {name: energy.lost_share for name, energy in energies.items()}
        answer({"out": options.out, "format": options.format, "experts": list(energies), "lost": each})
        say(f"{options.out}: {counted(len(energies), 'adapter')}, {', '.join(energies)}")
        _push(options)
        return 0
    if options.format == "lora":
        energy = store.export_adapter(options.out, **chosen, rank=options.rank, scale=options.scale, **common)
        lost = energy.lost_share
        exact = ", exactly" if lost < 1e-12 else f", {lost:.3%} of the energy left out"
    else:
        size = options.max_shard_size
        store.export(options.out, **chosen, scale=options.scale, task=options.task, max_shard_size=size, **common)
        lost, exact = 0.0, ""
    readout, experts = _what_was_read(store, chosen)
    answer(
        {
            **{"out": options.out, "format": options.format, "method": store.manifest.method},
            **{"readout": readout, "balance": options.balance, "experts": experts, "lost": lost},
        }
    )
    say(f"{options.out}: {_in_words(readout, experts, store.manifest.method, options.balance)}{exact}")
    _push(options)
    return 0


def _push(options: Options) -> None:
    """Upload what was written, where that was asked for."""
    if not options.push:
        return
    from mergestream.hub.models import push_model

    try:
        where = push_model(options.out, options.push, private=options.private)
    except MergestreamError as error:
        again = shell_command(["mergestream", "push", options.out, options.push, *(["--private"] * options.private)])
        raise MergestreamError(
            f"{options.out} is written, but not pushed: {error}; to push it later: {again}"
        ) from error
    add_to_answer({"pushed": where})
    say(f"{options.out} pushed to {where}")


def _what_was_read(store: Store, chosen: dict[str, Any]) -> tuple[str, list[str]]:
    """By which readout, and which experts."""
    from mergestream.ledger.selection import Selection

    selection = Selection(**chosen)
    if not store.method.remembers_experts:
        return selection.of_state(store.method).name, store.manifest.names
    readout, weights = selection.of_entries(store.manifest.names, store.manifest.adapters)
    return readout.name, list(weights)


def _in_words(readout: str, experts: Sequence[str], method: str, balanced: bool) -> str:
    """``3 experts merged by ledger, read out by tsv``"""
    if readout == "expert":
        return f"{', '.join(experts)}, as the {method} remembers it"
    by = f", read out by {readout}{', balanced' if balanced else ''}" if readout != "plain" else ""
    return f"{counted(len(experts), 'expert')} merged by {method}{by}"
