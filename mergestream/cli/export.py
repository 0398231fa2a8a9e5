"""``mergestream export``: write the merged model as a directory that from_pretrained loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergestream.cli.options import (
    OutputOptions,
    WorkingStoreOptions,
    argument,
    arguments_of,
    at_least,
    command_line,
)
from mergestream.cli.printing import answer, say
from mergestream.errors import MergestreamError, UsageError
from mergestream.escaping import shell_command
from mergestream.sizes import counted

if TYPE_CHECKING:
    from mergestream.store.store import Store


EXACT = 1e-12
"""Share of the energy that an adapter may lose to rounding and still be called exact"""
WHOLE = 1 - 1e-6
"""Share of each expert that the entries of a ledger must hold for that; singular values of float32 are rounded more"""


@dataclass(frozen=True)
class Export(WorkingStoreOptions, OutputOptions):
    EXAMPLES = """
        mergestream export store merged
        mergestream export store merged --dtype bfloat16 --max-shard-size 2GB --overwrite
        mergestream export store merged-for-spam --task spam
        mergestream export store merged-gently --scale 0.2
        mergestream export store merged --readout tsv --without legal --weight medical=0.5
        mergestream export store legal-again --readout expert:legal
        mergestream export store merged-adapter --format lora --rank 32
        mergestream export store adapters --format loras --for vllm
        mergestream export store style --format lora --layout kohya
        mergestream export store served --format routed --with-base
        mergestream export store merged --push org/name --private
        """
    out: str = argument("OUT", "the output directory, or s3://BUCKET/PATH")
    task: str | None = argument("--task NAME", "include the head of this expert; --readout expert:NAME implies it")
    files_from: str | None = argument(
        "--files-from NAME", "take chat template, special tokens and generation settings from this expert, or from base"
    )
    format: str = argument(
        "--format",
        "a full model, one PEFT adapter (lora), one adapter per expert of a ledger (loras), or these with a router "
        "that chooses one for each input (routed) (full)",
        choices=("full", "lora", "loras", "routed"),
        default="full",
    )
    rank: int | None = argument(
        "--rank K", "one rank for all modules of the adapter, cut or padded (default: exact)", type=at_least(1)
    )
    server: str | None = argument(
        "--for SERVER", "make an adapter that this server takes, and say what is left out", choices=("vllm",)
    )
    layout: str = argument(
        "--layout",
        "names of an adapter's tensors: PEFT's, or those of diffusers or kohya's scripts (A1111, ComfyUI) (peft)",
        choices=("peft", "diffusers", "kohya"),
        default="peft",
    )
    with_base: bool = argument("--with-base", "with --format routed: add a copy of the base")
    readout: str | None = argument(
        "--readout R",
        "how to combine experts; ledger: agree (the default), tempered (the default for adapters), outputs, regress, "
        "tsv, iso, sum or expert:NAME; other methods: plain (the default) or iso",
    )
    only: str | None = argument("--only A,B", "merge only these experts of a ledger")
    without: str | None = argument("--without A,B", "leave these experts of a ledger out")
    weight: list[str] = argument("--weight NAME=X", "weight of an expert of a ledger (1)")
    balance: bool = argument("--balance", "choose weights that serve all experts of a ledger equally")
    scale: str | None = argument(
        "--scale X", "merged = base + X · readout: a number; adaptive, sqrt or mean where experts are summed"
    )
    push: str | None = argument("--push ORG/NAME", "upload the result to the Hugging Face hub")
    private: bool = argument("--private", "create a private repository")

    @property
    def selection(self) -> dict[str, Any]:
        """Arguments of ``Store.export`` that choose a readout and experts."""
        from mergestream.ledger.selection import parse_weights

        only, without = (tuple(filter(None, (names or "").split(","))) for names in (self.only, self.without))
        weights = parse_weights(self.weight)
        return {"readout": self.readout, "only": only, "without": without, "weights": weights, "balance": self.balance}

    def run(self) -> None:
        selection = self.selection
        _check(self, selection)
        store = self.open_store()
        if self.format == "routed":
            result = _export_routed(store, self, selection)
        elif self.format == "loras":
            result = _export_adapters(store, self)
        else:
            result = _export(store, self, selection)
        answer(result)
        if self.push:
            result["pushed"] = _push(self)
            say(f"{self.out} pushed to {result['pushed']}")


def _check(options: Export, selection: dict[str, Any]) -> None:
    """Refuse options that contradict each other, and a missing login, before any work."""
    if options.format == "full" and (options.rank is not None or options.server is not None):
        raise UsageError(f"--{'for' if options.rank is None else 'rank'} is for adapters: add --format lora")
    if options.layout != "peft" and (options.format not in ("lora", "loras") or options.server):
        raise UsageError("--layout is for --format lora or loras, without --for")
    if options.format != "full" and options.task is not None:
        raise UsageError("--task is for full models: an adapter has no head of its own")
    if options.format != "full" and options.files_from is not None:
        raise UsageError("--files-from is for full models: an adapter is used with the files of its base")
    if options.format == "loras" and (any(selection.values()) or options.scale is not None):
        raise UsageError("--format loras writes every expert unchanged; use --format lora with --readout, --only, …")
    if options.with_base and options.format != "routed":
        raise UsageError("--with-base is for --format routed")
    if options.private and not options.push:
        raise UsageError("--private needs --push ORG/NAME")
    if options.push:
        from mergestream.hub.transfer import check_login

        check_login(options.push)


def _export_adapters(store: Store, options: Export) -> dict[str, Any]:
    energies = store.export_adapters(**arguments_of(store.export_adapters, options, command=command_line()))
    lost = {name: energy.lost_share for name, energy in energies.items()}
    say(f"{options.out}: {counted(len(energies), 'adapter')}, {', '.join(energies)}")
    return {"out": options.out, "format": options.format, "experts": list(energies), "lost": lost}


def _export_routed(store: Store, options: Export, selection: dict[str, Any]) -> dict[str, Any]:
    others = {**selection, "scale": options.scale, "command": command_line()}
    written = store.export_routed(**arguments_of(store.export_routed, options, **others))
    lost = {name: energy.lost_share for name, energy in written.energies.items()}
    by = "their input directions" if written.without_inputs else "inputs"
    say(f"{options.out}: {counted(len(written.experts), 'expert')}, routed by {by}: {', '.join(written.experts)}")
    facts = {"experts": list(written.experts), "without_inputs": list(written.without_inputs), "lost": lost}
    return {"out": options.out, "format": options.format, **facts}


def _export(store: Store, options: Export, selection: dict[str, Any]) -> dict[str, Any]:
    others = {**selection, "command": command_line()}
    lost, loss_text = 0.0, ""
    if options.format == "lora":
        energy = store.export_adapter(**arguments_of(store.export_adapter, options, **others))
        lost = energy.lost_share
        loss_text = ", exactly" if lost < EXACT else f", {lost:.3%} of the energy left out"
        if energy.held < WHOLE:
            held_text = f"of entries that hold {energy.held:.1%} or more of each expert"
            loss_text = f", {held_text}" if lost < EXACT else f"{loss_text} {held_text}"
    else:
        store.export(**arguments_of(store.export, options, **others))
    method = store.manifest.method
    readout, experts = _describe_readout(store, selection)
    say(f"{options.out}: {_summary(readout, experts, method, options.balance)}{loss_text}")
    chosen = {"readout": readout, "balance": options.balance, "experts": experts}
    return {"out": options.out, "format": options.format, "method": method, **chosen, "lost": lost}


def _describe_readout(store: Store, selection: dict[str, Any]) -> tuple[str, list[str]]:
    """Find the name of the readout and the experts that it combined."""
    from mergestream.ledger.selection import Selection

    chosen = Selection(**selection)
    if not store.manifest.entries:
        return chosen.of_state(store.method).name, store.manifest.names
    readout, weights = chosen.of_entries(store.manifest.names, store.manifest.adapters)
    return readout.name, list(weights)


def _summary(readout: str, experts: Sequence[str], method: str, balanced: bool) -> str:
    """Format the result: ``3 experts merged by ledger, readout tsv``."""
    if readout == "expert":
        return f"{', '.join(experts)} as stored in the {method}"
    by = f", readout {readout}{', balanced' if balanced else ''}" if readout != "plain" else ""
    return f"{counted(len(experts), 'expert')} merged by {method}{by}"


def _push(options: Export) -> str:
    """Upload the result; if that fails, show how to upload it later."""
    from mergestream.hub.transfer import push_model

    assert options.push is not None
    try:
        return push_model(options.out, options.push, private=options.private)
    except MergestreamError as error:
        again = shell_command(["mergestream", "push", options.out, options.push, *(["--private"] * options.private)])
        raise MergestreamError(
            f"{options.out} was written but not pushed: {error}; to push it later: {again}"
        ) from error
