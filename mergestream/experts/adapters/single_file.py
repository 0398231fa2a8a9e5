"""LoRAs in one file, as kohya, A1111, ComfyUI and diffusers write them; diffusers knows their names.

A file holds factors for one or several components of a pipeline. Those of the component that is the base are taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from mergestream.checkpoints import Checkpoint
from mergestream.checkpoints.layout import model_config
from mergestream.checkpoints.location import locate_here
from mergestream.checkpoints.reader import MemoryCheckpoint
from mergestream.errors import MergestreamError, first_line
from mergestream.experts.adapters.adapter import PREFIX, Adapter, BoundAdapter, make_adapter
from mergestream.experts.adapters.config import make_config
from mergestream.sizes import shorten_list

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.base.model import BaseModel

MAX_KEYS = 20_000
"""Tensors in a file; the largest LoRAs have a few thousand, and the converters need quadratic time"""
METADATA = "lora_adapter_metadata"
"""The key in the header of a file by diffusers under which it writes PEFT's configuration of every component"""
_OTHER_KINDS = {
    r"hada_w[12]": "LoHa",
    r"lokr_w[12]": "LoKr",
    r"lora_mid\.": "LoCon with a Tucker decomposition",
    r"dora_scale|lora_magnitude_vector": "DoRA",
    r"\boft_(blocks|diag)|\boft_R\b": "OFT",
    r"\bon_input$|\.ia3_l": "IA³",
    r"\.[ab][12]\.weight$": "GLoRA",
    r"\.(diff|diff_b|w_norm|b_norm)$": "full differences",
}
"""Adapters that are not s·B·A, by their keys"""
COMPONENT = re.compile(r"((?:unet|transformer|text_encoder)(?:_\d+)?)\.(.+)")
_FACTORS = (("lora_down.weight", "lora_up.weight"), ("lora_A.weight", "lora_B.weight"))


def open_lora_file(file: Checkpoint, model: BaseModel, directory: Path | None) -> Adapter:
    """The adapter of the base in a file with LoRA keys; ``directory`` is that of the base, if it is open."""
    for pattern, kind in _OTHER_KINDS.items():
        if key := next((key for key in file.tensors if re.search(pattern, key)), None):
            raise MergestreamError(
                f"{file.source} is no plain LoRA, but holds {kind} ({key}); merge it into its model with the program "
                "that made it (LyCORIS: tools/merge.py), and add the merged model"
            )
    directory = directory or locate_here(model.source)
    components = _by_component(_converted(file, model_config(directory)))
    try:
        fields = msgspec.json.decode(file.metadata.get(METADATA, "{}"), type=dict[str, Any])
    except ValueError as error:
        raise MergestreamError(f"{file.source}: {METADATA} in its header is no JSON; download it again") from error
    fitting: dict[str, Adapter] = {}
    refusal = MergestreamError(f"{file.source} holds no factors for {model.source}: it was made for another model")
    for component, tensors in components.items():
        weights = _ConvertedTensors(tensors, file.source, file.fingerprint)
        prefix = f"{component}."
        own = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
        try:
            config = make_config(Path(file.source), own or {"peft_type": "LORA"})
            if not own:  # every module has the rank of its factors and a scaling of 1
                ranks = {name.removesuffix(".lora_A.weight"): x.shape[0] for name, x in tensors.items() if x.ndim}
                config = replace(config, rank_pattern=ranks, alpha_pattern=ranks)
            adapter = make_adapter(file.source, file.directory, config, weights)
            BoundAdapter(adapter, model)
        except MergestreamError as error:
            refusal = error
        else:
            fitting[component] = adapter
    if not fitting:
        raise refusal
    named = directory.name if directory and directory.name in fitting else next(iter(fitting))
    others = shorten_list(sorted(components.keys() - {named}))
    notes = (f"{file.source}: the factors of {others} are left out, because the base is the {named}",) if others else ()
    return replace(fitting[named], notes=notes)


def _converted(file: Checkpoint, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The factors under diffusers' names, with a scaling of 1 if the file has an alpha."""
    if len(file.tensors) > MAX_KEYS:
        raise MergestreamError(f"{file.source} holds {len(file.tensors)} tensors, which no LoRA has")
    if any(name.startswith(PREFIX) for name in file.tensors) and "_class_name" not in config:
        raise MergestreamError(
            f"{file.source} holds the factors of a PEFT adapter, but adapter_config.json, which says how they are "
            "scaled, is not beside it; download it too, and give the directory"
        )
    tensors = _fold_alphas(file)
    if all(re.fullmatch(rf"{COMPONENT.pattern}\.lora_[AB]\.weight", name) for name in tensors):
        return tensors
    try:
        loaders: Any = import_module("diffusers.loaders")
        diffusers_names: Any = import_module("diffusers.utils.state_dict_utils")
    except ImportError as error:
        raise MergestreamError(f"to read {file.source}, mergestream needs diffusers: pip install diffusers") from error
    family = re.sub(r"Transformer\dDModel$", "", str(config.get("_class_name", "")))
    loader = getattr(loaders, f"{family}LoraLoaderMixin", loaders.StableDiffusionXLLoraLoaderMixin)
    unet = SimpleNamespace(layers_per_block=config.get("layers_per_block", 2))
    options = {"unet_config": unet} if loader is loaders.StableDiffusionXLLoraLoaderMixin else {}
    try:
        found = loader.lora_state_dict(tensors, **options)
        others = dict(found[0] if isinstance(found, tuple) else found)
        text = {name: others.pop(name) for name in list(others) if name.startswith("text_encoder")}
        text = diffusers_names.convert_state_dict(text, diffusers_names.DIFFUSERS_OLD_TO_PEFT)
        text = diffusers_names.convert_state_dict(text, diffusers_names.DIFFUSERS_TO_PEFT)
        return {**diffusers_names.convert_unet_state_dict_to_peft(others), **text}
    except Exception as error:  # the converters raise whatever a strange name makes them raise
        raise MergestreamError(
            f"{file.source} holds names of a LoRA that diffusers cannot convert ({first_line(error)}); save it with "
            "diffusers' save_lora_weights(), and give that file"
        ) from error


def _fold_alphas(file: Checkpoint) -> dict[str, Tensor]:
    """All tensors; factors with an alpha are multiplied by alpha/rank, and their alpha becomes the rank."""
    import torch

    tensors = {name: file.read(name) for name in file.tensors}
    for key in [key for key in tensors if key.endswith(".alpha")]:
        module = key.removesuffix("alpha")
        pair = next(((module + down, module + up) for down, up in _FACTORS if module + down in tensors), None)
        if pair is None or pair[1] not in tensors or not tensors[pair[0]].ndim or tensors[key].numel() != 1:
            raise MergestreamError(f"{file.source}: {key} belongs to no factors; download the file again")
        rank, up = float(tensors[pair[0]].shape[0]), tensors[pair[1]]
        precise = up.to(torch.promote_types(up.dtype, torch.float32))
        tensors[pair[1]] = precise * (float(tensors[key]) / max(rank, 1.0))
        tensors[key] = torch.tensor(rank)
    return tensors


def _by_component(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The factors of each component of the pipeline; without a component's name they belong to the base."""
    components: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if not name.endswith(".alpha"):
            match = COMPONENT.fullmatch(name)
            component, inner = match.groups() if match else ("", name)
            components.setdefault(component, {})[inner] = tensor
    return components


class _ConvertedTensors(MemoryCheckpoint):
    """Converted factors; unlike other tensors in memory, they are sent to the workers of a cluster."""

    def __init__(self, tensors: Mapping[str, Tensor], source: str, fingerprint: str | None) -> None:
        super().__init__(tensors)
        self.source, self.fingerprint = source, fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        return _ConvertedTensors, (self._tensors, self.source, self.fingerprint)
