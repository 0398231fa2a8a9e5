"""Read ``adapter_config.json``: how PEFT scales the factors; fields that cannot be honoured are refused."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from msgspec import convert

from mergestream.errors import MergestreamError
from mergestream.experts.adapters.module_patterns import PatternTable
from mergestream.files import read_json

CONFIG_NAME = "adapter_config.json"
WAY_OUT = "merge the adapter into its model with PEFT's merge_and_unload, then add the checkpoint"

# Fields that make an adapter something else than W + s·B·A, and why.
_REFUSED = {
    "use_dora": "DoRA rescales the columns of the full weight",
    "lora_bias": "the factors have biases",
    "use_qalora": "QALoRA pools the inputs of a quantised base",
    "layer_replication": "the adapted model has other layers than its base",
    "trainable_token_indices": "single rows of the embedding are trained too",
    "target_parameters": "the factors belong to parameters instead of modules",
    "alora_invocation_tokens": "the adapter is active only for some tokens",
    "arrow_config": "the adapter routes between other adapters",
    "use_bdlora": "BD-LoRA's factors are block-diagonal",
    "kasa_config": "KaSA changes the base's weights",
    "monteclora_config": "MonteCLoRA's factors are random",
}

# Initialisations that change the base's weights, so that the factors are not relative to the base any more.
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")

# Fields about training and use that do not change W + s·B·A.
_HARMLESS = {
    "auto_mapping", "bias", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config",
    "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type", "velora_config",
}  # fmt: skip
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
    lora_dropout: float
    megatron_config: dict[str, Any] | None
    megatron_core: str | None


@dataclass(frozen=True)
class LoraConfig:
    """The fields of a LoRA configuration that determine the task vector, and those that are inherited."""

    path: Path
    base: str | None
    r: int
    alpha: float
    rslora: bool
    rank_pattern: PatternTable
    alpha_pattern: PatternTable
    fan_in_fan_out: bool
    inherited: AdapterConfig

    def rank(self, module: str) -> int:
        """The rank of a module's factors."""
        return int(self.rank_pattern.get(module, self.r))

    def scaling(self, module: str) -> float:
        """s in W + s·B·A: lora_alpha/r, or lora_alpha/√r with ``use_rslora``."""
        alpha, rank = self.alpha_pattern.get(module, self.alpha), self.rank(module)
        return float(alpha / (math.sqrt(rank) if self.rslora else rank))


def read_config(directory: Path) -> LoraConfig:
    """Read and check the configuration of the adapter in ``directory``."""
    path = directory / CONFIG_NAME
    fields = read_json(path)
    if fields.get("peft_type") != "LORA":
        raise MergestreamError(f"{path}: peft_type={fields.get('peft_type')} is not LORA; {WAY_OUT}")
    for name, value in fields.items():
        if name in _HARMLESS | _READ or not value:
            continue
        reason = _REFUSED.get(name, "mergestream does not know this field")
        raise MergestreamError(f"{path}: {name}={_shorten(value)} cannot be honoured ({reason}); {WAY_OUT}")
    init = str(fields.get("init_lora_weights", True)).lower()
    if init.startswith(_BASE_CHANGING_INITS):
        raise MergestreamError(
            f"{path}: init_lora_weights={init} cannot be honoured (it changes the base's weights); {WAY_OUT}"
        )
    base = fields.get("base_model_name_or_path")
    config = LoraConfig(
        path,
        str(base) if base else None,
        _read_number(path, fields, "r", 8, int),
        _read_number(path, fields, "lora_alpha", 8, (int, float)),
        bool(fields.get("use_rslora")),
        _read_pattern(path, fields, "rank_pattern", int),
        _read_pattern(path, fields, "alpha_pattern", (int, float)),
        bool(fields.get("fan_in_fan_out")),
        _read_inherited(path, fields),
    )
    if config.r < 1 or any(rank < 1 for rank in config.rank_pattern.values.values()):
        raise MergestreamError(f"{path}: r and the ranks of rank_pattern must be at least 1; download or copy it again")
    return config


def _read_inherited(path: Path, fields: Mapping[str, Any]) -> AdapterConfig:
    try:
        json.dumps(inherited := convert(fields, AdapterConfig), allow_nan=False)
    except ValueError as error:
        raise MergestreamError(f"{path} is no PEFT configuration: {error}; download or copy it again") from error
    return inherited


def _read_number(path: Path, fields: Mapping[str, Any], name: str, default: Any, kind: Any) -> Any:
    value = fields.get(name, default)
    if not _is_number(value, kind):
        raise MergestreamError(f"{path}: {name}={_shorten(value)} is not a number; download or copy it again")
    return value


def _read_pattern(path: Path, fields: Mapping[str, Any], name: str, kind: Any) -> PatternTable:
    pattern = fields.get(name) or {}
    if not isinstance(pattern, dict) or not all(_is_number(value, kind) for value in pattern.values()):
        raise MergestreamError(f"{path}: {name} is no table of names and numbers; download or copy it again")
    try:
        return PatternTable(pattern)
    except ValueError as error:
        raise MergestreamError(f"{path}: an expression in {name} cannot be honoured ({error}); {WAY_OUT}") from error


def _is_number(value: Any, kind: Any) -> bool:
    """Whether a value is a finite number that float64 can hold."""
    return isinstance(value, kind) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _shorten(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
