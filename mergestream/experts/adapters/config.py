"""Read ``adapter_config.json``: how PEFT scales the factors; fields that cannot be honoured are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta, Struct, convert

from mergestream.digest import json_digest
from mergestream.errors import MergestreamError
from mergestream.experts.adapters.module_patterns import PatternTable

CONFIG_NAME = "adapter_config.json"
WAY_OUT = "merge the adapter into its model with PEFT's merge_and_unload, then add the checkpoint"

_UNMERGEABLE = {
    "trains tokens or prefixes instead of weights, so there is nothing to merge": (
        "PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT", "CARTRIDGE",
    ),
    "changes the weights by the input, so it cannot be merged": ("LILY", "POLY", "SHADOW", "XLORA"),
}  # fmt: skip

# Initialisations that change the base's weights, so that the factors are not relative to the base any more: those that
# PEFT computes again from the base, and those that need data or settings which the adapter does not hold.
_REPEATABLE_INITS = ("pissa", "olora")
_LOST_INITS = ("corda", "loftq", "lora_ga")

# Fields of a LoRA that leave the factors of other modules alone.
_ELSEWHERE = ("target_parameters", "trainable_token_indices")

# Fields of a LoRA that no merge of single modules can honour.
_IMPOSSIBLE = ("alora_invocation_tokens", "arrow_config", "layer_replication")

# Fields about training and use that do not change W + s·B·A.
_HARMLESS = {
    "auto_mapping", "bias", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config",
    "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type", "velora_config",
}  # fmt: skip
_NOT_FOR_PEFT = _HARMLESS - {"qalora_group_size"} | {"base_model_name_or_path", "peft_type", "target_parameters"}
_READ = {
    "alpha_pattern", "base_model_name_or_path", "fan_in_fan_out", "init_lora_weights", "lora_alpha", "peft_type", "r",
    "rank_pattern", "use_rslora",
}  # fmt: skip


class AdapterConfig(TypedDict, total=False):
    """The fields of ``adapter_config.json`` that a merged adapter inherits: its base and its task.

    Fields about training, and fields that select modules, are not inherited.
    """

    base_model_name_or_path: str | None
    revision: str | None
    task_type: str | None
    auto_mapping: dict[str, Any] | None


Rank = Annotated[int, Meta(ge=1, le=2**53)]
Alpha = Annotated[float, Meta(ge=-1.7e308, le=1.7e308)]


class LoraFields(Struct):
    """The fields that say which weights the factors change, and by how much."""

    base_model_name_or_path: str | None = None
    target_parameters: list[str] | None = None
    """Parameters that are adapted and are no module's ``weight``"""
    r: Rank = 8
    lora_alpha: Alpha = 8.0
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, Alpha] | None = None
    use_rslora: bool | None = None
    fan_in_fan_out: bool | None = None


@dataclass(frozen=True)
class LoraConfig:
    """The fields of a configuration that determine the task vector, and those that are inherited."""

    path: Path
    kind: str
    """``LORA`` or another ``peft_type``"""
    reason: str
    """What makes it more than s·B·A, so that PEFT must merge it: ``use_dora``, ``peft_type=LOHA``; empty for a LoRA"""
    peft_fields: Mapping[str, Any]
    """The fields that are passed to PEFT in that case"""
    fields: LoraFields
    inherited: AdapterConfig
    rank_pattern: PatternTable | Mapping[str, float]
    alpha_pattern: PatternTable | Mapping[str, float]
    digest: str

    def parameters_of(self, module: str) -> list[str]:
        """The parameters of a module that are adapted and are not its ``weight`` (``target_parameters``)."""
        paths = [path.rpartition(".") for path in self.fields.target_parameters or ()]
        return [leaf for parent, _, leaf in paths if f".{module}".endswith(f".{parent}")]

    def is_merged_by_peft(self, module: str) -> bool:
        """Whether PEFT must merge a module with factors A and B."""
        return self.reason not in ("", *_ELSEWHERE) or bool(self.parameters_of(module))

    def rank(self, module: str) -> int:
        """The rank of a module's factors."""
        return int(self.rank_pattern.get(module, self.fields.r))

    def scaling(self, module: str) -> float:
        """s in W + s·B·A: lora_alpha/r, or lora_alpha/√r with ``use_rslora``."""
        alpha, rank = self.alpha_pattern.get(module, self.fields.lora_alpha), self.rank(module)
        return float(alpha / (math.sqrt(rank) if self.fields.use_rslora else rank))


def make_config(path: Path, fields: Mapping[str, Any]) -> LoraConfig:
    """Check the fields of a configuration that was read from a file."""
    kind = fields.get("peft_type")
    for why, kinds in _UNMERGEABLE.items():
        if kind in kinds:
            raise MergestreamError(f"{path}: peft_type={kind} {why}; serve it with PEFT")
    for name in _IMPOSSIBLE:
        if value := fields.get(name):
            raise MergestreamError(f"{path}: {name}={str(value)[:40]} cannot be honoured; serve it with PEFT")
    init = str(fields.get("init_lora_weights", True)).lower()
    if init.startswith(_LOST_INITS):
        raise MergestreamError(
            f"{path}: init_lora_weights={init} cannot be honoured (it changes the base's weights); {WAY_OUT}"
        )
    beyond = [name for name, value in fields.items() if value and name not in _HARMLESS | _READ]
    if init.startswith(_REPEATABLE_INITS):
        beyond.append(f"init_lora_weights={init}")
    reason = f"peft_type={kind}" if kind != "LORA" else min(beyond, key=_ELSEWHERE.__contains__, default="")
    # Other types have fields of these names with other values.
    others = {"LORA": (), "ADALORA": ("r", "lora_alpha", "rank_pattern")}.get(str(kind), ("r", "lora_alpha"))
    try:
        found = convert({name: value for name, value in fields.items() if name not in others}, LoraFields)
        inherited = convert(fields, AdapterConfig)
    except (ValueError, OverflowError) as error:
        raise MergestreamError(f"{path}: {error}; download or copy it again") from error
    return LoraConfig(
        path,
        str(kind),
        reason,
        {name: value for name, value in fields.items() if name not in _NOT_FOR_PEFT},
        found,
        inherited,
        _make_table(path, "rank_pattern", found.rank_pattern),
        _make_table(path, "alpha_pattern", found.alpha_pattern),
        json_digest(fields),
    )


def _make_table(path: Path, name: str, values: Mapping[str, float] | None) -> PatternTable:
    try:
        return PatternTable(values)
    except ValueError as error:
        raise MergestreamError(f"{path}: an expression in {name} cannot be honoured ({error}); {WAY_OUT}") from error
