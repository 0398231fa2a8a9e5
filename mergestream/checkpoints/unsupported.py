"""Files and directories that are recognised but not read: what they are, and which path or command to use instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

from mergestream.checkpoints.distributed import METADATA
from mergestream.checkpoints.formats import is_weight_file
from mergestream.errors import MergestreamError
from mergestream.files import read_json
from mergestream.sizes import shorten_list

_MAX_NAMES = 4
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_DEEPSPEED = re.compile(r"zero_to_fp32\.py|.*_optim_states\.pt|mp_rank_\d+.*_model_states\.pt|global_step\d+")
_TRAINING_STATE = re.compile(r"(optimizer|scheduler|scaler|training_args|rng_state|random_states).*")
_TOKENIZER = re.compile(r"tokenizer.*|vocab\..*|merges\.txt|special_tokens_map\.json|.*\.(spm|model|tiktoken)")
_FILES = {
    r"\.onnx(_data)?": ("an ONNX graph", "give the PyTorch model that it was exported from"),
    r"\.(h5|keras)|\.index|\.meta|\.data-\d+-of-\d+|\.pb": (
        "a TensorFlow file",
        "load it with transformers<5 (`AutoModel.from_pretrained(…, from_tf=True)`) and give what save_pretrained() "
        "writes",
    ),
    r"\.msgpack": (
        "a Flax file",
        "load it with transformers<5 (`AutoModel.from_pretrained(…, from_flax=True)`) and give what save_pretrained() "
        "writes",
    ),
    r"\.np[zy]": (
        "a file of numpy or MLX",
        'write it as safetensors: `python -c "import numpy as n, safetensors.numpy as s; '
        "s.save_file(dict(n.load('IN.npz')), 'OUT.safetensors')\"`",
    ),
    r"\.pdparams": ("a PaddlePaddle file", "give the PyTorch model, or write its tensors as safetensors"),
    r"\.(tflite|mlmodel|mlpackage|engine|plan|pte)": (
        "a model compiled for inference",
        "give the PyTorch model that it was made from",
    ),
    r"\.(pkl|pickle|joblib)": (
        "a pickle, which was not executed",
        "if you trust its origin, write the model's state_dict() as safetensors",
    ),
    r"\.(zip|tar|tgz|gz|nemo)": ("an archive", "unpack it and give its content"),
}
"""Other file formats by the end of their name: what they are, and what to do"""


def no_weights_error(names: Collection[str], source: str, directory: Path | None = None) -> MergestreamError:
    """The error for a directory without weights; ``directory`` is None on the hub, where only names are known."""
    return MergestreamError(
        explain_directory(names, source, directory)
        or f"{source} holds no checkpoint: neither model.safetensors nor pytorch_model.bin; give another directory"
    )


def explain_directory(names: Collection[str], source: str, directory: Path | None = None) -> str | None:
    """What a directory without weights holds instead, and what to do; None if it is unknown."""
    if not names:
        return f"{source} is empty; give the directory that the model was saved to"
    return next((found for explain in _EXPLANATIONS if (found := explain(names, source, directory))), None)


def explain_file(path: Path) -> str | None:
    """What an unsupported file is, and what to do; None if it is unknown."""
    known = _recognise(path.name)
    return f"{path} is {known[0]}, which mergestream does not read: {known[1]}" if known else None


def _recognise(name: str) -> tuple[str, str] | None:
    return next((words for pattern, words in _FILES.items() if re.search(f"({pattern})$", name)), None)


# --- output of a training run -------------------------------------------------------------------------------


def _trainer_output(names: Collection[str], source: str, directory: Path | None) -> str | None:
    """The output directory of a Trainer: list its checkpoints, and name the best and the last."""
    numbered = {int(match[1]): name for name in names if (match := _CHECKPOINT.fullmatch(name))}
    found = [name for _, name in sorted(numbered.items()) if directory and (directory / name).is_dir()]
    if directory is None or not found:
        return None
    last = found[-1]
    begin = f"{source} holds no weights itself, but the checkpoints {shorten_list(found, _MAX_NAMES)} of a training run"
    state = _trainer_state(directory / last) or _trainer_state(directory)
    best = re.split(r"[/\\]", str(state.get("best_model_checkpoint")))[-1]
    if best in found and best != last:
        return (
            f"{begin}: by trainer_state.json the best is {source}/{best} (metric {state.get('best_metric')}), and the "
            f"last is {source}/{last}; give one of these paths"
        )
    words = "the best and the last" if best == last else "the last"
    return f"{begin}: {words} is {source}/{last}; give that path, or one of the others"


def _trainer_state(directory: Path) -> dict[str, Any]:
    with suppress(MergestreamError):
        return read_json(directory / "trainer_state.json")
    return {}


def _deepspeed(names: Collection[str], source: str, directory: Path | None) -> str | None:
    """A DeepSpeed ZeRO checkpoint, or the directory of one of its steps."""
    if directory is None or not any(_DEEPSPEED.fullmatch(name) for name in names):
        return None
    root, tag = Path(source), ""
    if any(name.endswith("_states.pt") for name in names) and "latest" not in names:  # the directory of one step
        root, tag = root.parent, f" --tag {quote(root.name)}"
    script, out = root / "zero_to_fp32.py", root.with_name(f"{root.name}-fp32")
    program = quote(str(script)) if script.is_file() else "-m deepspeed.utils.zero_to_fp32"
    return (
        f"{source} is a DeepSpeed ZeRO checkpoint, which keeps its weights in pickles: if you trust its origin, "
        f"run `python {program} {quote(str(root))} {quote(str(out))} --safe_serialization{tag}` and give {out}"
    )


def _distributed(names: Collection[str], source: str, directory: Path | None) -> str | None:
    """A torch.distributed checkpoint that is incomplete, or in a subdirectory."""
    if any(name.endswith(".distcp") for name in names):
        return f"{source} has .distcp files and no {METADATA}: it is incomplete; save or copy it again"
    below = sorted(name for name in names if directory and (directory / name / METADATA).is_file())
    if not below:
        return None
    some = shorten_list(below, _MAX_NAMES)
    return f"{source} holds distributed checkpoints ({some}); give the model's, such as {source}/{below[0]}"


def _loose_files(names: Collection[str], source: str, directory: Path | None) -> str | None:
    """Weight files with unusual names, or only the state of an optimizer."""
    weights = sorted(name for name in names if is_weight_file(name))
    if not weights:
        return None
    models = [name for name in weights if not _TRAINING_STATE.fullmatch(name)]
    if not models:
        return (
            f"{source} holds only the state to resume a training run from ({shorten_list(weights, _MAX_NAMES)}); give "
            "the directory with the model's weights"
        )
    return f"{source} holds {shorten_list(models, _MAX_NAMES)}; name the file you mean, such as {source}/{models[-1]}"


# --- several models in one directory ------------------------------------------------------------------------


def _pipeline(names: Collection[str], source: str, directory: Path | None) -> str | None:
    """A diffusers pipeline: several models side by side."""
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
    return f"{begin} ({shorten_list(models, _MAX_NAMES)}): give one of them, such as {source}/{usual}"


def _sentence_transformer(names: Collection[str], source: str, directory: Path | None) -> str | None:
    """An older sentence-transformers model, whose weights are in its first module."""
    first = sorted(name for name in names if name.startswith("0_") and directory and _has_weights(directory / name))
    if "modules.json" not in names or not first:
        return None
    return f"{source} is a sentence-transformers model whose weights are in its first module: give {source}/{first[0]}"


def _has_weights(directory: Path) -> bool:
    return directory.is_dir() and any(is_weight_file(path.name) for path in directory.iterdir())


# --- other formats ------------------------------------------------------------------------------------------


def _other_format(names: Collection[str], source: str, directory: Path | None) -> str | None:
    for name in sorted(names):
        if known := _recognise(name):
            return f"{source} holds {name}, {known[0]}, which mergestream does not read: {known[1]}"
    return None


def _tokenizer_only(names: Collection[str], source: str, directory: Path | None) -> str | None:
    if "config.json" in names or not any(_TOKENIZER.fullmatch(name) for name in names):
        return None
    return f"{source} holds a tokenizer and no model; give the directory that has the weights"


_EXPLANATIONS: tuple[Callable[[Collection[str], str, Path | None], str | None], ...] = (
    *(_trainer_output, _deepspeed, _distributed, _pipeline, _sentence_transformer, _loose_files),
    *(_other_format, _tokenizer_only),
)
"""Tried in this order; the first that recognises the directory explains it"""
