"""``adapter_config.json`` of a merged adapter: what PEFT needs, and what servers of adapters refuse."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from mergestream.base.model import BaseModel
from mergestream.checkpoints.layout import model_config
from mergestream.checkpoints.location import hub_name, locate_here
from mergestream.errors import MergestreamError
from mergestream.experts.adapters.config import AdapterConfig
from mergestream.sizes import shorten_list
from mergestream.store.records import read_record

if TYPE_CHECKING:
    from mergestream.export.adapter import AdaptedModule
    from mergestream.store.manifest import Expert
    from mergestream.store.snapshot import Snapshot

_DEFAULTS: AdapterConfig = {
    "revision": None,
    "task_type": None,
    "auto_mapping": None,
    "lora_dropout": 0.0,
    "megatron_config": None,
    "megatron_core": "megatron.core",
}
"""PEFT's defaults, for fields that the adapters lack or disagree on"""
VLLM_DEFAULT_RANK, VLLM_MAX_RANK = 16, 512
"""vLLM's default for --max-lora-rank, and the largest value it accepts"""


def adapter_config(modules: Sequence[AdaptedModule], whole: Collection[str], fields: AdapterConfig) -> dict[str, Any]:
    """The configuration of an adapter with these modules and ``whole`` parameters; PEFT fills in the rest."""
    paths = {module.path for module in modules}
    saved = saved_modules(paths, whole)
    with_bias = {name.rpartition(".")[0] for name in whole} - saved
    common = Counter(module.rank for module in modules).most_common(1)
    rank = common[0][0] if common else 1
    other_ranks = {f"^{re.escape(module.path)}": module.rank for module in modules if module.rank != rank}
    return {
        "peft_type": "LORA",
        **fields,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": other_ranks,
        "alpha_pattern": other_ranks,
        "bias": "all" if with_bias - paths else "lora_only" if with_bias else "none",
        "fan_in_fan_out": any(module.kind == "conv1d" for module in modules),
        "target_modules": [module.path for module in modules],
        "modules_to_save": sorted(saved) or None,
    }


def saved_modules(paths: Collection[str], whole: Collection[str]) -> set[str]:
    """The modules that PEFT saves whole (``modules_to_save``): no factors, and more than a bias has changed."""
    return {name.rpartition(".")[0] for name in whole if not name.endswith(".bias")} - set(paths)


def common_fields(snapshot: Snapshot, experts: Sequence[Expert]) -> tuple[AdapterConfig, list[str]]:
    """The fields that the experts' own configurations agree on, and a note for each disagreement."""
    records = {entry.name: read_record(snapshot.storage, entry).get("adapter") for entry in experts}
    configs = {name: config for name, config in records.items() if config is not None}
    for_other_base = {entry.name for entry in experts if entry.options.get("allow_other_base")}
    base = snapshot.manifest.base
    fields: dict[str, Any] = {**_DEFAULTS}
    notes = []
    for field, default in _DEFAULTS.items():
        values = {name: config.get(field, default) for name, config in configs.items()}
        names_by_value: dict[str, list[str]] = {}
        for name, value in values.items():
            names_by_value.setdefault(str(value), []).append(name)
        if len(names_by_value) == 1:
            fields[field] = next(iter(values.values()))
        elif names_by_value and field not in ("revision", "auto_mapping"):  # the base decides these
            found = "; ".join(f"{value} in {', '.join(names)}" for value, names in names_by_value.items())
            notes.append(f"the adapters do not agree on {field} ({found}): PEFT's default is written, {default}")
    own_base = [config for name, config in configs.items() if name not in for_other_base]
    fields |= _base_fields(base, own_base)
    if fields["task_type"] is None and fields["auto_mapping"] is None:
        fields["auto_mapping"] = _auto_mapping(base)
    return cast(AdapterConfig, fields), notes


def _base_fields(base: BaseModel, configs: Sequence[AdapterConfig]) -> dict[str, str | None]:
    """The base's name on the hub, if it or all adapters give one, else its path."""
    if name := hub_name(base.source):
        return {"base_model_name_or_path": name, "revision": base.source.partition("@")[2] or None}
    names = {config.get("base_model_name_or_path") for config in configs}
    agreed = names.pop() if len(names) == 1 else None
    if agreed and hub_name(agreed):
        return {"base_model_name_or_path": agreed}
    return {"base_model_name_or_path": base.source, "revision": None}


def _auto_mapping(base: BaseModel) -> dict[str, str] | None:
    """The base's class, by which PEFT's AutoPeftModel finds it if there is no task type."""
    with suppress(MergestreamError):
        match model_config(locate_here(base.source)).get("architectures"):
            case [str(architecture)]:
                return {"base_model_class": architecture, "parent_library": "transformers"}
    return None


def serving_notes(config: Mapping[str, Any]) -> Iterator[str]:
    """Why vLLM and similar servers would refuse an adapter with this configuration."""
    way_out = "export with --format full for them"
    if saved := config["modules_to_save"]:
        yield f"vLLM and other servers refuse adapters with modules_to_save ({shorten_list(saved)}); {way_out}"
    if config["bias"] != "none":
        yield f"vLLM and other servers refuse adapters with biases (bias={config['bias']}); {way_out}"
    ranks = {config["r"], *config["rank_pattern"].values()}
    if len(ranks) > 1:
        yield (
            f"its modules have ranks from {min(ranks)} to {max(ranks)} (rank_pattern), which some servers refuse; "
            f"--rank {min(ranks)} makes them equal, or {way_out}"
        )
    if max(ranks) > VLLM_DEFAULT_RANK:
        yield (
            f"its rank is {max(ranks)}: start vLLM with --max-lora-rank {max(ranks)} (at most {VLLM_MAX_RANK}), or "
            "reduce it with --rank K"
        )
