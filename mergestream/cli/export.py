"""``mergestream export``: write the merged model as a directory that from_pretrained loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergestream.cli.options import (
    OutputOptions,
    WorkingStoreOptions,
    argument,
    arguments_of,
    at_least,
    command_line,
    names,
    weight,
)
from mergestream.cli.printing import answer, say
from mergestream.errors import MergestreamError, UsageError
from mergestream.escaping import shell_command
from mergestream.sizes import counted

if TYPE_CHECKING:
    from mergestream.export.adapter import Energy
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
    only: tuple[str, ...] = argument("--only A,B", "merge only these experts of a ledger", type=names, default=())
    without: tuple[str, ...] = argument("--without A,B", "leave these experts of a ledger out", type=names, default=())
    weights: list[tuple[str, float]] = argument("--weight NAME=X", "weight of an expert of a ledger (1)", type=weight)
    scale: str | None = argument(
        "--scale X", "merged = base + X · readout: a number; adaptive, sqrt or mean where experts are summed"
    )
    push: str | None = argument("--push ORG/NAME", "upload the result to the Hugging Face hub")
    private: bool = argument("--private", "create a private repository")

    def run(self) -> None:
        _check(self)
        store = self.open_store()
        methods: dict[str, Callable[..., Any]] = {
            "full": store.export,
            "lora": store.export_adapter,
            "loras": store.export_adapters,
            "routed": store.export_routed,
        }
        export = methods[self.format]
        written = export(**arguments_of(export, self, weights=dict(self.weights), command=command_line()))
        facts, text = _describe(store, self, written)
        result = {"out": self.out, "format": self.format, **facts}
        answer(result)
        say(f"{self.out}: {text}")
        if self.push:
            result["pushed"] = _push(self)
            say(f"{self.out} pushed to {result['pushed']}")


def _check(options: Export) -> None:
    """Refuse options that contradict each other, and a missing login, before any work."""
    form, is_adapter = options.format, options.format != "full"
    chosen = options.readout or options.only or options.without or options.weights or options.scale
    refusals = [
        (not is_adapter and options.rank, "--rank is for adapters: add --format lora"),
        (not is_adapter and options.server, "--for is for adapters: add --format lora"),
        (
            options.layout != "peft" and (options.server or form not in ("lora", "loras")),
            "--layout is for --format lora or loras, without --for",
        ),
        (is_adapter and options.task, "--task is for full models: an adapter has no head of its own"),
        (is_adapter and options.files_from, "--files-from is for full models: an adapter has the files of its base"),
        (
            form == "loras" and chosen,
            "--format loras writes every expert unchanged; use --format lora with --readout, --only, …",
        ),
        (form != "routed" and options.with_base, "--with-base is for --format routed"),
        (options.private and not options.push, "--private needs --push ORG/NAME"),
    ]
    for is_met, sentence in refusals:
        if is_met:
            raise UsageError(sentence)
    if options.push:
        from mergestream.hub.transfer import check_login

        check_login(options.push)


def _describe(store: Store, options: Export, written: Any) -> tuple[dict[str, Any], str]:
    """What was written, as JSON and as text."""
    if options.format == "full":
        facts, text = _describe_model(store, options)
        return {**facts, "lost": 0.0}, text
    if options.format == "lora":
        facts, text = _describe_model(store, options)
        return {**facts, "lost": written.lost_share}, f"{text}, {_loss_text(written, store, options.dtype)}"
    energies = written if options.format == "loras" else written.energies
    lost = {name: energy.lost_share for name, energy in energies.items()}
    if options.format == "loras":
        return {"experts": list(lost), "lost": lost}, f"{counted(len(lost), 'adapter')}, {', '.join(lost)}"
    experts, missing = written.experts, written.without_inputs
    by = "their input directions" if missing else "inputs"
    text = f"{counted(len(experts), 'expert')}, routed by {by}: {', '.join(experts)}"
    return {"experts": list(experts), "without_inputs": list(missing), "lost": lost}, text


def _describe_model(store: Store, options: Export) -> tuple[dict[str, Any], str]:
    """What was merged, as JSON and as text: ``3 experts merged by ledger, readout tsv``."""
    from mergestream.ledger.selection import Selection

    manifest = store.manifest
    chosen = Selection(options.readout, options.only, options.without, dict(options.weights))
    if manifest.entries:
        found, weights = chosen.of_entries(manifest.names, manifest.adapters)
        readout, experts = found.name, list(weights)
    else:
        readout, experts = chosen.of_state(store.method).name, manifest.names
    facts = {"method": manifest.method, "readout": readout, "experts": experts}
    if readout == "expert":
        return facts, f"{', '.join(experts)} as stored in the {manifest.method}"
    by = f", readout {readout}" if readout != "plain" else ""
    return facts, f"{counted(len(experts), 'expert')} merged by {manifest.method}{by}"


def _loss_text(energy: Energy, store: Store, dtype: str | None) -> str:
    """What the merged adapter lacks: what was cut off or is not held, how it is rounded, or ``exactly`` if nothing."""
    from mergestream.checkpoints import float_name

    lost = "" if energy.lost_share < EXACT else f"{energy.lost_share:.3%} of the energy left out"
    held = "" if energy.held >= WHOLE else f"of entries that hold {energy.held:.1%} or more of each expert"
    types = (store.manifest.parameters.get("entries"), dtype and float_name(dtype))
    rounded = next((f"in full rank, rounded to {each}" for each in types if each in ("bfloat16", "float16")), "exactly")
    return " ".join(filter(None, (lost, held))) or rounded


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
