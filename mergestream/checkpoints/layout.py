"""The files of a model's directory: file formats, weights, their index, companions, and what is there instead.

To add a file format, write a module with a `Shard` and list it in `FORMATS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from mergestream.checkpoints.checkpoint import Shard
from mergestream.checkpoints.distributed import METADATA, DistributedFiles
from mergestream.checkpoints.gguf import GgufFile
from mergestream.checkpoints.safetensors import SafetensorsFile
from mergestream.checkpoints.torch_file import TorchFile
from mergestream.errors import MergestreamError
from mergestream.files import read_json, read_small
from mergestream.sizes import shorten_list

FORMATS: dict[str, type[Shard]] = {
    ".safetensors": SafetensorsFile,
    **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt"), TorchFile),
    ".gguf": GgufFile,
    METADATA: DistributedFiles,
}
"""File formats by the end of the file's name"""
WEIGHT_SUFFIXES = tuple(FORMATS)
DIFFUSERS_STEM = "diffusion_pytorch_model"
"""The stem of weight files in diffusers; transformers uses ``model``"""
CARD = "README.md"
MARKER = "mergestream.json"
"""The file in every export that says how it was made"""
CODE = ".py"
"""The suffix of custom model code: copied if the config asks for it, never run"""
MODULES = "modules.json"
_COMPANION_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".codes")
_FOLDER_SUFFIXES = (*_COMPANION_SUFFIXES, ".safetensors", ".bin")
_TEMPLATES = "additional_chat_templates"
_FOLDER = re.compile(rf"(\d+_\w+|{_TEMPLATES})/")
_CONFIGS = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_INDEX = re.compile(r"\.index(\.[\w-]+)?\.json$")
_SHARD = re.compile(r"-\d+-of-(\d+)\.safetensors$")
_SAFETENSORS_NAMES = [
    f"{stem}.safetensors{index}" for stem in ("model", DIFFUSERS_STEM) for index in (".index.json", "")
]
_TORCH_NAMES = [
    *("pytorch_model.bin.index.json", "pytorch_model.bin", "pytorch_model_fsdp.bin"),
    *(f"{DIFFUSERS_STEM}.bin.index.json", f"{DIFFUSERS_STEM}.bin"),
]


def is_weight_file(name: str) -> bool:
    """Whether a file name ends as those of a supported format do."""
    return name.endswith(WEIGHT_SUFFIXES)


def is_index(name: str) -> bool:
    """Whether a file maps tensors to shards; a variant (``fp16``) has its name before ``.json``."""
    return bool(_INDEX.search(name))


def is_companion(name: str) -> bool:
    """Whether a file beside the weights is a config, a tokenizer or generation settings."""
    return name.endswith(_COMPANION_SUFFIXES) and not is_index(name)


def may_go_along(name: str) -> bool:
    """Whether a file of a repository, given by its path there, may be needed to open or to export the model."""
    if "/" not in name:
        return is_companion(name) or name == CARD
    return bool(_FOLDER.match(name)) and name.endswith(_FOLDER_SUFFIXES)


def companions(directory: Path) -> Iterator[Path]:
    """The files that belong to a model, to be copied with it.

    A link may lead into the hub's cache, but nowhere else: exports are published, and must not contain a file of the
    user's by accident.
    """
    found = [path for path in directory.iterdir() if is_companion(path.name)]
    for folder in (_TEMPLATES, *module_folders(directory)):
        found += (path for path in (directory / folder).rglob("*") if path.name.endswith(_FOLDER_SUFFIXES))
    if names_code(directory):
        code = directory.rglob(f"*{CODE}")
        found += (path for path in code if not path.relative_to(directory).parts[0].startswith("."))
    for path in filter(Path.is_file, found):
        if leads_out(path, directory):
            raise MergestreamError(f"{path} is a link that leads out of the model's directory; copy the file there")
        yield path


def leads_out(path: Path, directory: Path) -> bool:
    """Whether a file of a model is a link to elsewhere; a link into the hub's cache is not."""
    allowed = directory.resolve(), directory.resolve().parent.parent / "blobs"
    return not any(path.resolve().is_relative_to(place) for place in allowed)


def names_code(directory: Path) -> bool:
    """Whether a config refers to Python files of the model's own."""
    if any(not kind.startswith("sentence_transformers.") for kind in module_folders(directory).values()):
        return True
    configs = (directory / name for name in _CONFIGS)
    return any(config.is_file() and read_json(config).get("auto_map") for config in configs)


def module_folders(directory: Path) -> dict[str, str]:
    """The folders of a sentence-transformers model that hold its modules after the first, and the class of each."""
    path = directory / MODULES
    if not path.is_file():
        return {}
    try:
        found = {str(module["path"]): str(module["type"]) for module in json.loads(read_small(path))}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise MergestreamError(f"{path} is no list of modules; restore it, or download it again") from error
    if invalid := [folder for folder in found if not re.fullmatch(r"[\w-]{0,100}", folder, re.ASCII)]:
        raise MergestreamError(f"{path} names the folder {invalid[0]!r}, which is not beside it; download it again")
    return {folder: kind for folder, kind in found.items() if folder}


def find_weights(names: Collection[str], source: str) -> str | None:
    """Choose the file of a directory to open: an index, or the only weight file."""
    for name in _SAFETENSORS_NAMES:
        if name in names:
            return name
    indexes = [name for name in names if is_index(name) and ".safetensors." in name]
    if len(indexes) == 1:
        return indexes[0]
    if shard := next((name for name in sorted(names) if (m := _SHARD.search(name)) and int(m[1]) > 1), None):
        raise MergestreamError(f"{source} holds the shard {shard}, but no index {_SAFETENSORS_NAMES[0]}; download it")
    if found := _find_only(names, ".safetensors", source):
        return found
    for name in _TORCH_NAMES:
        if name in names:
            return name
    return _find_only(names, ".gguf", source)


def _find_only(names: Collection[str], suffix: str, source: str) -> str | None:
    """The file with this suffix; an error if there are several."""
    found = sorted(name for name in names if name.endswith(suffix))
    if len(found) > 1:
        raise MergestreamError(f"{source} holds {len(found)} {suffix} files; name one of them ({shorten_list(found)})")
    return found[0] if found else None


def read_index(path: Path) -> dict[str, str]:
    """Read an index: tensor name to shard. Shards must be weight files beside the index."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MergestreamError(f"{path} is no index: it has no weight_map; download it again")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or "/" in shard or "\\" in shard or not is_weight_file(shard):
            place = f"the tensor {tensor!r} in {shard!r}, which is no weight file beside it"
            raise MergestreamError(f"{path} lists {place}; download it again")
    return weight_map


def model_config(directory: Path | None) -> dict[str, Any]:
    """The content of ``config.json``; empty if there is none."""
    path = directory / "config.json" if directory else None
    return read_json(path) if path and path.is_file() else {}


def refuse_quantised(directory: Path) -> None:
    """Refuse a checkpoint whose config says that it is quantised."""
    if model_config(directory).get("quantization_config"):
        path = directory / "config.json"
        raise MergestreamError(f"{path} has a quantization_config; dequantise the checkpoint, or give the original")


# --- directories without weights -----------------------------------------------------------------------------

_WEIGHTS = f".*({'|'.join(map(re.escape, WEIGHT_SUFFIXES))})"
_TRAINING_STATE = "(optimizer|scheduler|scaler|training_args|rng_state|random_states)"
_CONTENTS = {
    r"zero_to_fp32\.py|.*_optim_states\.pt|mp_rank_\d+.*_model_states\.pt|global_step\d+": (
        "is a DeepSpeed ZeRO checkpoint of pickles: if you trust its origin, run "
        "`python -m deepspeed.utils.zero_to_fp32 DIR OUT --safe_serialization` and give OUT"
    ),
    r".*\.distcp": "holds .distcp files; give the directory that has .metadata, too, or save it again",
    r"model_index\.json": (
        "is a diffusers pipeline, which is several models, and none of them has weights here: "
        "`hf download ORG/NAME --local-dir DIR` and give one of them, such as DIR/unet"
    ),
    f"(?!{_TRAINING_STATE}){_WEIGHTS}": "holds {found}; name the file you mean",
    _WEIGHTS: "holds only the state to resume a training run from ({found}); give the directory with the weights",
    r".*\.(onnx(_data)?|h5|keras|index|meta|data-\d+-of-\d+|pb|msgpack|np[zy])": (
        "holds {found}, which is not read, because it is a file of another framework: give the PyTorch model, or write "
        "its tensors as safetensors (docs: Inputs)"
    ),
    r".*\.(pkl|pickle|joblib)": (
        "holds {found}, which is not read, because it is a pickle, which was not executed: if you trust its origin, "
        "write the model's state_dict() as safetensors"
    ),
    r".*\.(zip|tar|tgz|gz|nemo)": "holds {found}, which is not read, because it is an archive: unpack it",
}
"""Names in a directory without weights, and what it is; the first pattern that matches a name counts"""


def no_weights_error(names: Collection[str], source: str, directory: Path | None = None) -> MergestreamError:
    """The error for a directory without weights; ``directory`` is None on the hub, where only names are known."""
    return MergestreamError(
        explain_directory(names, source, directory)
        or f"{source} holds no checkpoint: neither model.safetensors nor pytorch_model.bin; give another directory"
    )


def explain_directory(names: Collection[str], source: str, directory: Path | None = None) -> str | None:
    """What a directory without weights holds instead, and what to do; None if it is unknown."""
    if directory and (folders := _folders_with_weights(names, directory)):
        listed = shorten_list(folders, 4)
        return f"{source} has weights in its folders only: {listed}; give one of them, such as {source}/{folders[-1]}"
    for pattern, sentence in _CONTENTS.items():
        if found := sorted(name for name in names if re.fullmatch(pattern, name)):
            return f"{source} {sentence.format(found=shorten_list(found, 4))}"
    return None


def _folders_with_weights(names: Collection[str], directory: Path) -> list[str]:
    """The checkpoints of a training run, the models of a pipeline, or the first module of sentence-transformers."""
    known = re.compile(".*" if "model_index.json" in names else r"checkpoint-\d+|0_\w+|model")
    folders = [directory / name for name in names if known.fullmatch(name)]
    found = [
        path.name for path in folders if path.is_dir() and any(is_weight_file(file.name) for file in path.iterdir())
    ]
    return sorted(found, key=lambda name: (len(name), name))  # checkpoint-1000 after checkpoint-500
