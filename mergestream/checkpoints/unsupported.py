"""What people have that is no checkpoint we read: what it is, and what to type or to run instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

from mergestream.checkpoints.layout import is_weight_file
from mergestream.errors import MergestreamError
from mergestream.files import read_json
from mergestream.sizes import shorten_list

METADATA = ".metadata"
"""Of torch.distributed.checkpoint: which chunk of which tensor is where"""
_MOST_NAMED = 4
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_DEEPSPEED = re.compile(r"zero_to_fp32\.py|.*_optim_states\.pt|mp_rank_\d+.*_model_states\.pt|global_step\d+")
_OF_A_TRAINING = re.compile(r"(optimizer|scheduler|scaler|training_args|rng_state|random_states).*")
_TOKENIZER = re.compile(r"tokenizer.*|vocab\..*|merges\.txt|special_tokens_map\.json|.*\.(spm|model|tiktoken)")
_INFERENCE = "compiled for inference", "give the PyTorch model that it was made from"
_FILES = {
    r"\.onnx(_data)?": ("an ONNX graph", "give the PyTorch model that it was exported from"),
    r"\.(h5|keras)|\.index|\.meta|\.data-\d+-of-\d+|\.pb": (
        "of TensorFlow",
        "load it with transformers<5 (`AutoModel.from_pretrained(…, from_tf=True)`) and give what save_pretrained() "
        "writes",
    ),
    r"\.msgpack": (
        "of Flax",
        "load it with transformers<5 (`AutoModel.from_pretrained(…, from_flax=True)`) and give what save_pretrained() "
        "writes",
    ),
    r"\.np[zy]": (
        "of numpy or MLX",
        'write it as safetensors: `python -c "import numpy as n, safetensors.numpy as s; '
        "s.save_file(dict(n.load('IN.npz')), 'OUT.safetensors')\"`",
    ),
    r"\.pdparams": ("of PaddlePaddle", "give the PyTorch model, or write its tensors as safetensors"),
    r"\.(tflite|mlmodel|mlpackage|engine|plan|pte)": _INFERENCE,
    r"\.(pkl|pickle|joblib)": (
        "a pickle, which was not executed",
        "write the model's state_dict() as safetensors where you trust its origin",
    ),
    r"\.(zip|tar|tgz|gz|nemo)": ("an archive", "unpack it and give what is in it"),
}


def no_weights(names: Collection[str], source: str, directory: Path | None = None) -> MergestreamError:
    """For a directory that leads to no weights; of one on the hub only the names are known."""
    return MergestreamError(
        explain_directory(names, source, directory)
        or f"{source} holds no checkpoint: neither model.safetensors nor pytorch_model.bin"
    )


def explain_directory(names: Collection[str], source: str, directory: Path | None = None) -> str | None:
    """What a directory without weights holds instead, and what to do; None where that cannot be told."""
    if not names:
        return f"{source} is empty; give the directory that the model was saved to"
    looks: tuple[Callable[[Collection[str], str, Path | None], str | None], ...]
    looks = (_checkpoints, _deepspeed, _distributed, _pipeline, _modules, _loose_files, _other_format, _tokenizer)
    return next((found for look in looks if (found := look(names, source, directory))), None)


def explain_file(path: Path) -> str | None:
    """What a file is that is no checkpoint of ours, and what to do; None where that cannot be told."""
    known = _known(path.name)
    return f"{path} is {known[0]}, which mergestream does not read: {known[1]}" if known else None


def _known(name: str) -> tuple[str, str] | None:
    return next((words for pattern, words in _FILES.items() if re.search(f"({pattern})$", name)), None)


# --- what training leaves behind ----------------------------------------------------------------------------


def _checkpoints(names: Collection[str], source: str, directory: Path | None) -> str | None:
    """A Trainer's directory: which checkpoints there are, and which is the best or the last."""
    numbered = {int(match[1]): name for name in names if (match := _CHECKPOINT.fullmatch(name))}
    if directory is None or not numbered:
        return None
    found = [name for _, name in sorted(numbered.items()) if (directory / name).is_dir()]
    if not found:
        return None
    last = found[-1]
    begin = f"{source} holds no weights itself, but checkpoints of a training ({shorten_list(found, _MOST_NAMED)})"
    state = _state(directory / last) or _state(directory)
    best = re.split(r"[/\\]", str(state.get("best_model_checkpoint")))[-1]
    if best in found and best != last:
        return (
            f"{begin}: by trainer_state.json the best is {source}/{best} (metric {state.get('best_metric')}), and the "
            f"last is {source}/{last}; give one of these paths"
        )
    words = "the best and the last" if best == last else "the last"
    return f"{begin}: {words} is {source}/{last}; give that path, or another one's"


def _state(directory: Path) -> dict[str, Any]:
    with suppress(MergestreamError):
        return read_json(directory / "trainer_state.json")
    return {}


def _deepspeed(names: Collection[str], source: str, directory: Path | None) -> str | None:
    if directory is None or not any(_DEEPSPEED.fullmatch(name) for name in names):
        return None
    root, tag = Path(source), ""
    if any(name.endswith("_states.pt") for name in names) and "latest" not in names:  # the directory of one step
        root, tag = root.parent, f" --tag {quote(root.name)}"
    script, out = root / "zero_to_fp32.py", root.with_name(f"{root.name}-fp32")
    program = quote(str(script)) if script.is_file() else "-m deepspeed.utils.zero_to_fp32"
    return (
        f"{source} is a DeepSpeed ZeRO checkpoint, whose weights are in pieces in pickles: where you trust its origin, "
        f"run `python {program} {quote(str(root))} {quote(str(out))} --safe_serialization{tag}` and give {out}"
    )


def _distributed(names: Collection[str], source: str, directory: Path | None) -> str | None:
    """Beside or above a checkpoint of torch.distributed."""
    if any(name.endswith(".distcp") for name in names):
        return f"{source} has .distcp files and no {METADATA}: it was not saved to its end, or not copied whole"
    below = sorted(name for name in names if directory and (directory / name / METADATA).is_file())
    if not below:
        return None
    some = shorten_list(below, _MOST_NAMED)
    return f"{source} holds distributed checkpoints ({some}); give the model's, such as {source}/{below[0]}"


def _loose_files(names: Collection[str], source: str, directory: Path | None) -> str | None:
    weights = sorted(name for name in names if is_weight_file(name))
    if not weights:
        return None
    models = [name for name in weights if not _OF_A_TRAINING.fullmatch(name)]
    if not models:
        found = shorten_list(weights, _MOST_NAMED)
        return f"{source} holds what a training resumes from ({found}), and no weights of a model"
    return f"{source} holds {shorten_list(models, _MOST_NAMED)}; name the file you mean, such as {source}/{models[-1]}"


# --- what belongs together -----------------------------------------------------------------------------------


def _pipeline(names: Collection[str], source: str, directory: Path | None) -> str | None:
    """Of diffusers: several models side by side."""
    if "model_index.json" not in names:
        return None
    begin = f"{source} is a diffusers pipeline, which is several models"
    if directory is None:
        repository = source.partition("@")[0]
        return f"{begin}: `hf download {repository} --local-dir DIR` and give one of them, such as DIR/unet"
    models = sorted(name for name in names if _has_weights(directory / name))
    if not models:
        return f"{begin}, and none of them has weights here; download it again"
    usual = next((name for name in ("unet", "transformer") if name in models), models[0])
    return f"{begin} ({shorten_list(models, _MOST_NAMED)}): give one of them, such as {source}/{usual}"


def _modules(names: Collection[str], source: str, directory: Path | None) -> str | None:
    """Of sentence-transformers in its older form: the model is the first module."""
    first = sorted(name for name in names if name.startswith("0_") and directory and _has_weights(directory / name))
    if "modules.json" not in names or not first:
        return None
    return f"{source} is a sentence-transformers model whose weights are in its first module: give {source}/{first[0]}"


def _has_weights(directory: Path) -> bool:
    return directory.is_dir() and any(is_weight_file(path.name) for path in directory.iterdir())


# --- other formats -------------------------------------------------------------------------------------------


def _other_format(names: Collection[str], source: str, directory: Path | None) -> str | None:
    for name in sorted(names):
        if known := _known(name):
            return f"{source} holds {name}, {known[0]}, which mergestream does not read: {known[1]}"
    return None


def _tokenizer(names: Collection[str], source: str, directory: Path | None) -> str | None:
    if "config.json" in names or not any(_TOKENIZER.fullmatch(name) for name in names):
        return None
    return f"{source} holds a tokenizer and no model; give the directory that has the weights"
