"""Adapters in the layouts of diffusers and of kohya's scripts (A1111, ComfyUI): other names, and one file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from mergestream.base.model import BaseModel
from mergestream.checkpoints import SafetensorsWriter, open_checkpoint
from mergestream.checkpoints.layout import model_config
from mergestream.checkpoints.location import locate_here
from mergestream.errors import UsageError
from mergestream.experts.adapters.adapter import PREFIX
from mergestream.experts.adapters.config import CONFIG_NAME
from mergestream.experts.adapters.single_file import COMPONENT

PEFT_FILE, LORA_FILE = "adapter_model.safetensors", "pytorch_lora_weights.safetensors"
_KOHYA = {"unet": "lora_unet", "text_encoder": "lora_te", "text_encoder_2": "lora_te2"}
_FACTOR = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight")


def layout_names(layout: str, model: BaseModel, keys: Iterable[str]) -> dict[str, str]:
    """The names in another layout for PEFT's ``keys``; raises UsageError if it has none."""
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


def change_layout(directory: Path, names: Mapping[str, str]) -> None:
    """Replace PEFT's files by one file with other names; without an alpha in it, the scaling is 1 for all programs."""
    with open_checkpoint(directory / PEFT_FILE) as written:
        layout = {new: written.tensors[key] for key, new in names.items()}
        with SafetensorsWriter(directory, layout, prefix=Path(LORA_FILE).stem, max_shard_size=2**62) as writer:
            for key, new in names.items():
                writer.write(new, written.read(key))
    for name in (PEFT_FILE, CONFIG_NAME):
        (directory / name).unlink()
