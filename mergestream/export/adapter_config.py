"""``adapter_config.json`` of a merged adapter: what PEFT needs, and what servers of adapters refuse."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

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
    """The base and the task that the experts' own configurations agree on, and a note if they have different tasks."""
    records = {entry.name: read_record(snapshot.storage, entry).get("adapter") for entry in experts}
    adapters = {name: config for name, config in records.items() if config is not None}
    of_other_base = {entry.name for entry in experts if entry.options.get("allow_other_base")}
    of_base = [config for name, config in adapters.items() if name not in of_other_base]
    base, configs = snapshot.manifest.base, list(adapters.values())
    fields: AdapterConfig = {
        "task_type": _agreed(configs, "task_type"),
        "auto_mapping": _agreed(configs, "auto_mapping"),
        **_base_fields(base, of_base),
    }
    if fields["task_type"] is None and fields["auto_mapping"] is None:
        fields["auto_mapping"] = _auto_mapping(base)
    tasks = sorted({str(config.get("task_type")) for config in configs})
    note = f"the adapters have different task types ({', '.join(tasks)}), so the merged one has none"
    return fields, [note] if len(tasks) > 1 else []


def _agreed(configs: Sequence[AdapterConfig], field: str) -> Any:
    """The value of a field that all configurations share, else None."""
    values = [config.get(field) for config in configs]
    return values[0] if values and all(value == values[0] for value in values) else None


def _base_fields(base: BaseModel, configs: Sequence[AdapterConfig]) -> AdapterConfig:
    """The base's name on the hub, if it or all adapters give one, else its path."""
    if name := hub_name(base.source):
        return {"base_model_name_or_path": name, "revision": base.source.partition("@")[2] or None}
    agreed = _agreed(configs, "base_model_name_or_path")
    if agreed and hub_name(agreed):
        return {"base_model_name_or_path": agreed, "revision": _agreed(configs, "revision")}
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
