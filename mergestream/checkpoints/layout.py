"""What the directory of a model holds: the weights, their index where they are several, and what goes with them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from mergestream.errors import MergestreamError
from mergestream.files import read_json
from mergestream.sizes import shorten_list

TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
WEIGHT_SUFFIXES = (".safetensors", *TORCH_SUFFIXES, ".gguf")
DIFFUSERS_STEM = "diffusion_pytorch_model"
"""What diffusers calls the weights of a component, as transformers calls them ``model``"""
CARD = "README.md"
MARKER = "mergestream.json"
"""Beside every export: what made it"""
UNFINISHED = "unfinished"
"""A key in the marker, until an export to object storage is whole"""
CODE = ".py"
"""Of a model whose class is not in a library: copied where its config asks for it, and never run"""
MODULES = "modules.json"
_COMPANION_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".codes")
_IN_FOLDERS = (*_COMPANION_SUFFIXES, ".safetensors", ".bin")
_TEMPLATES = "additional_chat_templates"
_FOLDER = re.compile(rf"(\d+_\w+|{_TEMPLATES})/")
_MAY_NAME_CODE = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_INDEX = re.compile(r"\.index(\.[\w-]+)?\.json$")
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.(safetensors|bin|gguf)$")
_USUAL_SAFETENSORS = [
    f"{stem}.safetensors{index}" for stem in ("model", DIFFUSERS_STEM) for index in (".index.json", "")
]
_USUAL_TORCH = [
    *("pytorch_model.bin.index.json", "pytorch_model.bin", "pytorch_model_fsdp.bin"),
    *(f"{DIFFUSERS_STEM}.bin.index.json", f"{DIFFUSERS_STEM}.bin"),
]


def is_weight_file(name: str) -> bool:
    return name.endswith(WEIGHT_SUFFIXES)


def is_index(name: str) -> bool:
    """Whether a file says in which shard each tensor is; that of a variant has its name before ``.json``."""
    return bool(_INDEX.search(name))


def is_companion(name: str) -> bool:
    """Whether a file beside the weights is configuration, tokenizer or generation settings: it goes with the model.

    Weights and their index do not, nor does the model card.
    """
    return name.endswith(_COMPANION_SUFFIXES) and not is_index(name)


def may_go_along(name: str) -> bool:
    """Whether a file of a repository, by its path there, may be asked for once the model is opened or written."""
    if "/" not in name:
        return is_companion(name) or name == CARD
    return bool(_FOLDER.match(name)) and name.endswith(_IN_FOLDERS)


def companions(directory: Path) -> Iterator[Path]:
    """The files that go with a model. A link among them may lead to a hub's cache, but not to any file of the user's:
    what is copied is published."""
    inside = directory.resolve(), directory.resolve().parent.parent / "blobs"
    for path in _companions(directory):
        if path.is_file():
            if not any(path.resolve().is_relative_to(place) for place in inside):
                raise MergestreamError(f"{path} is a link that leads out of the model's directory; put the file there")
            yield path


def _companions(directory: Path) -> Iterator[Path]:
    yield from (path for path in directory.iterdir() if is_companion(path.name))
    for folder in (_TEMPLATES, *module_folders(directory)):
        yield from (path for path in (directory / folder).rglob("*") if path.name.endswith(_IN_FOLDERS))
    if names_code(directory):
        code = directory.rglob(f"*{CODE}")
        yield from (path for path in code if not path.relative_to(directory).parts[0].startswith("."))


def names_code(directory: Path) -> bool:
    """Whether a config asks for Python files of the model's own."""
    configs = (directory / name for name in _MAY_NAME_CODE)
    strange = (kind for kind in module_folders(directory).values() if not kind.startswith("sentence_transformers."))
    return any(strange) or any(config.is_file() and read_json(config).get("auto_map") for config in configs)


def module_folders(directory: Path) -> dict[str, str]:
    """The folders of a sentence-transformers model that hold its modules after the first, and the class of each."""
    path = directory / MODULES
    if not path.is_file():
        return {}
    try:
        found = {str(module["path"]): str(module["type"]) for module in json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise MergestreamError(f"{path} is no list of modules; restore it, or download it again") from error
    if strange := [folder for folder in found if not re.fullmatch(r"[\w-]{0,100}", folder, re.ASCII)]:
        raise MergestreamError(f"{path} names the folder {strange[0]!r}, which is none beside it")
    return {folder: kind for folder, kind in found.items() if folder}


def find_weights(names: Collection[str], source: str) -> str | None:
    """The file among those of a directory that leads to its weights: an index, or the only file."""
    for name in _USUAL_SAFETENSORS:
        if name in names:
            return name
    indexes = [name for name in names if is_index(name) and ".safetensors." in name]
    if len(indexes) == 1:
        return indexes[0]
    shard = next((name for name in sorted(names) if (m := _SHARD.search(name)) and int(m[2]) > 1), None)
    if shard and shard.endswith(".safetensors"):
        raise MergestreamError(f"{source} holds the shard {shard}, but no index (such as {_USUAL_SAFETENSORS[0]})")
    if found := _only_one(names, ".safetensors", source):
        return found
    for name in _USUAL_TORCH:
        if name in names:
            return name
    if shard and shard.endswith(".gguf"):
        return shard  # its header says that there are others, and opening it what to do
    return _only_one(names, ".gguf", source)


def _only_one(names: Collection[str], suffix: str, source: str) -> str | None:
    """The file that ends so; where there are several, the user has to say which."""
    found = sorted(name for name in names if name.endswith(suffix))
    if len(found) > 1:
        raise MergestreamError(
            f"{source} holds {len(found)} {suffix} files and no index; name the one you mean ({shorten_list(found)})"
        )
    return found[0] if found else None


def read_index(path: Path) -> dict[str, str]:
    """Tensor to shard. A shard is a file beside the index: nothing else is followed."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MergestreamError(f"{path} is no index: it has no weight_map")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or "/" in shard or "\\" in shard or not is_weight_file(shard):
            raise MergestreamError(
                f"{path} sends the tensor {tensor!r} to {shard!r}, which is no weight file beside it"
            )
    return weight_map


def model_config(directory: Path | None) -> dict[str, Any]:
    """What ``config.json`` says; nothing where there is none."""
    path = directory / "config.json" if directory else None
    return read_json(path) if path and path.is_file() else {}
