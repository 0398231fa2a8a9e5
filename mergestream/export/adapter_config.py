"""``adapter_config.json`` of a merged adapter: what PEFT needs and servers refuse; and other layouts of adapters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from mergestream.base.model import BaseModel
from mergestream.checkpoints.layout import model_config
from mergestream.checkpoints.location import hub_name, locate_here
from mergestream.errors import MergestreamError, UsageError
from mergestream.experts.adapters.adapter import PREFIX
from mergestream.experts.adapters.config import AdapterConfig
from mergestream.experts.adapters.single_file import COMPONENT
from mergestream.sizes import shorten_list

if TYPE_CHECKING:
    from mergestream.export.adapter import AdaptedModule
    from mergestream.store.expert import Expert
    from mergestream.store.snapshot import Snapshot

Server = Literal["vllm"]
VLLM_RANKS, VLLM_DEFAULT_RANK = (8, 16, 32, 64, 128, 256, 320, 512), 16
"""The values of vLLM's --max-lora-rank (besides 1), and its default"""

STEMS = {"peft": "adapter_model", "diffusers": "pytorch_lora_weights", "kohya": "pytorch_lora_weights"}
"""The name of the file with the tensors, by layout"""
_KOHYA = {"unet": "lora_unet", "text_encoder": "lora_te", "text_encoder_2": "lora_te2"}
_FACTOR = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight")


def adapter_config(modules: Sequence[AdaptedModule], whole: Collection[str], fields: AdapterConfig) -> dict[str, Any]:
    """The configuration of an adapter with these modules and ``whole`` parameters; PEFT fills in the rest."""
    paths = {module.path for module in modules}
    saved = saved_modules(paths, whole)
    with_bias = {name.rpartition(".")[0] for name in whole if name.endswith(".bias")} - saved
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
    return {name.rpartition(".")[0] for name in whole if name.endswith(".weight")} - set(paths)


def common_fields(snapshot: Snapshot, experts: Sequence[Expert]) -> tuple[AdapterConfig, list[str]]:
    """The base and the task that the experts' own configurations agree on, and a note if they have different tasks.

    The base's name is that on the hub, if it or all adapters give one, else its path.
    """
    adapters = [(entry, config) for entry in experts if (config := snapshot.records[entry.name].adapter)]
    of_base = [config for entry, config in adapters if not entry.options.get("allow_other_base")]
    configs, source = [config for _, config in adapters], snapshot.manifest.base.source
    name, revision = hub_name(source), source.partition("@")[2] or None
    if name is None:
        agreed = _agreed(of_base, "base_model_name_or_path")
        is_on_hub = agreed is not None and hub_name(agreed) is not None
        name, revision = (agreed, _agreed(of_base, "revision")) if is_on_hub else (source, None)
    fields: AdapterConfig = {
        "task_type": _agreed(configs, "task_type"),
        "auto_mapping": _agreed(configs, "auto_mapping"),
        "base_model_name_or_path": name,
        "revision": revision,
    }
    if fields["task_type"] is None and fields["auto_mapping"] is None:
        with suppress(MergestreamError):  # without a task, PEFT's AutoPeftModel goes by the base's class
            match model_config(locate_here(source)).get("architectures"):
                case [str(architecture)]:
                    mapping = {"base_model_class": architecture, "parent_library": "transformers"}
                    fields["auto_mapping"] = mapping
    tasks = sorted({str(config.get("task_type")) for config in configs})
    note = f"the adapters have different task types ({', '.join(tasks)}), so the merged one has none"
    return fields, [note] if len(tasks) > 1 else []


def _agreed(configs: Sequence[AdapterConfig], field: str) -> Any:
    """The value of a field that all configurations share, else None."""
    values = [config.get(field) for config in configs]
    return values[0] if values and all(value == values[0] for value in values) else None


def vllm_rank(rank: int) -> int:
    """The least rank that vLLM has and that holds factors of this rank."""
    found = next((each for each in VLLM_RANKS if each >= rank), None)
    if found is None:
        raise MergestreamError(f"the adapter needs rank {rank} and vLLM has at most {VLLM_RANKS[-1]}; pass --rank K")
    return found


def is_for_vllm(module: AdaptedModule, base: BaseModel) -> bool:
    """Whether vLLM takes factors for a module of any model class: a linear layer, but no embedding and no head."""
    tables = {tensor.shape for tensor in base.tensors.values() if tensor.role == "embedding"}
    return module.kind != "embedding" and len(module.shape) == 2 and module.shape not in tables


def serving_notes(config: Mapping[str, Any], others: Collection[str] = ()) -> Iterator[str]:
    """What vLLM refuses of an adapter, and how it is started; ``others`` are modules that are no linear layers.

    These are statements of vLLM's documentation: its PEFTHelper, LoRAModel, LoRAConfig and lora.utils.
    """
    way_out = "--for vllm leaves them out, and --format full has everything"
    if saved := config["modules_to_save"]:
        yield f"vLLM refuses adapters with modules_to_save ({shorten_list(saved)}); {way_out}"
    if config["bias"] != "none":
        yield f"vLLM refuses adapters with biases (bias={config['bias']}); {way_out}"
    if others:
        yield f"vLLM takes factors of {shorten_list(others)} for some model classes only; {way_out}"
    ranks = {config["r"], *config["rank_pattern"].values()}
    if len(ranks) > 1:
        yield (
            f"its modules have ranks from {min(ranks)} to {max(ranks)} (rank_pattern), as PEFT loads them; --rank "
            f"{max(ranks)} or --for vllm gives all of them one rank, padded with zeros, which loses nothing"
        )
    if max(ranks) > VLLM_RANKS[-1]:
        yield f"its rank is {max(ranks)}, and vLLM has at most {VLLM_RANKS[-1]}; reduce it with --rank K"
    elif max(ranks) > VLLM_DEFAULT_RANK:
        yield f"its rank is {max(ranks)}: start vLLM with --max-lora-rank {vllm_rank(max(ranks))}"


def layout_names(layout: str, model: BaseModel, keys: Iterable[str]) -> dict[str, str]:
    """The names in a layout for PEFT's ``keys``: ``peft``, ``diffusers``, or ``kohya`` for kohya's scripts, A1111 and
    ComfyUI. There is no alpha beside them, so the scaling is 1 for all programs."""
    if layout == "peft":
        return {key: key for key in keys}
    directory = locate_here(model.source)
    config = model_config(directory)
    architecture = str(config.get("_class_name") or config.get("architectures"))
    names = {"UNet": "unet", "Transformer": "transformer", "CLIPText": "text_encoder"}
    component = next((name for part, name in names.items() if part in architecture), None)
    if directory is None or component is None:
        raise UsageError(f"--layout {layout} is for a component of a diffusers pipeline, which {model.source} is not")
    if COMPONENT.fullmatch(f"{directory.name}.x"):
        component = directory.name
    prefix = _KOHYA.get(component, "")
    if component == "text_encoder" and (directory.parent / "text_encoder_2").exists():
        prefix = "lora_te1"  # of SDXL
    if layout == "kohya" and not prefix:
        raise UsageError(f"kohya's scripts have other modules than diffusers' {architecture}; use --layout diffusers")
    found = {}
    for key in keys:
        if not (factor := _FACTOR.fullmatch(key)):
            raise UsageError(f"--layout {layout} has no name for {key.removeprefix(PREFIX)}; use --layout peft")
        path, side = factor.groups()
        if component.startswith("text_encoder") and not path.startswith(("text_model.", "text_projection")):
            path = f"text_model.{path}"  # as all programs have it, although new versions of transformers do not
        if layout == "kohya":
            found[key] = f"{prefix}_{path.replace('.', '_')}.lora_{'down' if side == 'A' else 'up'}.weight"
        else:
            found[key] = f"{component}.{path}.lora_{side}.weight"
    return found
