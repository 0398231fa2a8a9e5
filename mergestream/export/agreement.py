"""What the configuration of a merged adapter tells: that on which the adapters agree which it is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from mergestream.base.model import BaseModel
from mergestream.checkpoints.location import hub_name, locate_here
from mergestream.errors import MergestreamError
from mergestream.experts.adapters.config import AdapterConfig
from mergestream.files import read_json
from mergestream.sizes import shorten_list
from mergestream.store.manifest import Expert
from mergestream.store.records import read_record
from mergestream.store.snapshot import Snapshot

_USUAL: AdapterConfig = {
    "revision": None,
    "task_type": None,
    "auto_mapping": None,
    "lora_dropout": 0.0,
    "megatron_config": None,
    "megatron_core": "megatron.core",
}
"""PEFT's own, where a configuration says nothing, or the adapters say different things"""
USUAL_RANK, LARGEST_RANK = 16, 512
"""What vLLM takes unless it is told otherwise (--max-lora-rank), and what it can be told"""


def agreement(snapshot: Snapshot, experts: Sequence[Expert]) -> tuple[AdapterConfig, list[str]]:
    """What is told of the adapter that is made of these experts, and sentences about what they do not agree on."""
    records = {entry.name: read_record(snapshot.place, entry).get("adapter") for entry in experts}
    theirs = {name: told for name, told in records.items() if told is not None}
    strangers = {entry.name for entry in experts if entry.options.get("allow_other_base")}
    agreed, sentences = _agreed(theirs)
    told = {**_USUAL, **agreed, **_base(snapshot.manifest.base, theirs, strangers)}
    if told["task_type"] is None and told["auto_mapping"] is None:
        told["auto_mapping"] = _auto_mapping(snapshot.manifest.base)
    return cast(AdapterConfig, told), sentences


def _agreed(theirs: Mapping[str, AdapterConfig]) -> tuple[dict[str, Any], list[str]]:
    agreed, sentences = {}, []
    for field, usual in _USUAL.items():
        said: dict[str, list[str]] = {}
        values = {name: told.get(field, usual) for name, told in theirs.items()}
        for name, value in values.items():
            said.setdefault(str(value), []).append(name)
        if len(said) == 1:
            agreed[field] = next(iter(values.values()))
        elif said and field not in ("revision", "auto_mapping"):  # of the base, which is known
            different = "; ".join(f"{value} in {', '.join(names)}" for value, names in said.items())
            sentences.append(f"the adapters do not agree on {field} ({different}): PEFT's default is written, {usual}")
    return agreed, sentences


def _base(base: BaseModel, theirs: Mapping[str, AdapterConfig], strangers: set[str]) -> dict[str, str | None]:
    """The base, by its name on the hub where it has one; ``strangers`` were made for another."""
    if name := hub_name(base.source):
        return {"base_model_name_or_path": name, "revision": base.source.partition("@")[2] or None}
    named = {told.get("base_model_name_or_path") for name, told in theirs.items() if name not in strangers}
    agreed = named.pop() if len(named) == 1 else None
    if agreed and hub_name(agreed):
        return {"base_model_name_or_path": agreed}
    return {"base_model_name_or_path": base.source, "revision": None}


def _auto_mapping(base: BaseModel) -> dict[str, str] | None:
    """The class of the base, by which PEFT's AutoPeftModel finds it where no task is told."""
    directory = locate_here(base.source)
    try:
        config = read_json(directory / "config.json") if directory else {}
    except MergestreamError:
        return None
    match config.get("architectures"):
        case [str(architecture)]:
            return {"base_model_class": architecture, "parent_library": "transformers"}
    return None


def refusals(config: Mapping[str, Any]) -> Iterator[str]:
    """What a server of adapters, such as vLLM, has against one with this configuration, in sentences."""
    full = "--format full writes a model that they take"
    if saved := config["modules_to_save"]:
        yield f"vLLM and others that serve adapters refuse modules_to_save ({shorten_list(saved)}); {full}"
    if config["bias"] != "none":
        yield f"vLLM and others that serve adapters refuse biases (bias={config['bias']}); {full}"
    ranks = {config["r"], *config["rank_pattern"].values()}
    if len(ranks) > 1:
        yield (
            f"the ranks of its modules are {min(ranks)} to {max(ranks)} (rank_pattern), which servers that know one "
            f"rank refuse; --rank {min(ranks)} makes them alike, and {full}"
        )
    if max(ranks) > LARGEST_RANK:
        yield f"vLLM takes ranks of {LARGEST_RANK} at most, and this has {max(ranks)}; cut it by --rank K, or {full}"
    elif max(ranks) > USUAL_RANK:
        yield (
            f"vLLM takes ranks of {USUAL_RANK} unless it is started with --max-lora-rank, and this has {max(ranks)}; "
            f"or cut it by --rank {USUAL_RANK}"
        )
