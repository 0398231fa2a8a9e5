"""Files and directories that are recognised but not read: what they are, and which path or command to use instead."""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from mergestream.checkpoints.distributed import METADATA
from mergestream.checkpoints.layout import WEIGHT_SUFFIXES, is_weight_file
from mergestream.errors import MergestreamError
from mergestream.files import read_json
from mergestream.sizes import shorten_list

_FROM_TRANSFORMERS = (
    "load it with transformers<5 (`AutoModel.from_pretrained(…, {})`) and give what save_pretrained() writes"
)
_FILES = {
    r"\.onnx(_data)?": ("an ONNX graph", "give the PyTorch model that it was exported from"),
    r"\.(h5|keras)|\.index|\.meta|\.data-\d+-of-\d+|\.pb": (
        "a TensorFlow file",
        _FROM_TRANSFORMERS.format("from_tf=True"),
    ),
    r"\.msgpack": ("a Flax file", _FROM_TRANSFORMERS.format("from_flax=True")),
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
_WEIGHTS = f".*({'|'.join(map(re.escape, WEIGHT_SUFFIXES))})"
_TRAINING_STATE = "(optimizer|scheduler|scaler|training_args|rng_state|random_states)"
_CONTENTS = {
    r"zero_to_fp32\.py|.*_optim_states\.pt|mp_rank_\d+.*_model_states\.pt|global_step\d+": (
        "{source} is a DeepSpeed ZeRO checkpoint, which keeps its weights in pickles: if you trust its origin, run "
        "`python -m deepspeed.utils.zero_to_fp32 DIR OUT --safe_serialization`, where DIR holds the file `latest`, and "
        "give OUT"
    ),
    r".*\.distcp": "{source} has .distcp files and no .metadata: it is incomplete; save or copy it again",
    r"model_index\.json": (
        "{source} is a diffusers pipeline, which is several models, and none of them has weights here: "
        "`hf download ORG/NAME --local-dir DIR` and give one of them, such as DIR/unet"
    ),
    f"(?!{_TRAINING_STATE}){_WEIGHTS}": "{source} holds {found}; name the file you mean, such as {source}/{last}",
    _WEIGHTS: (
        "{source} holds only the state to resume a training run from ({found}); give the directory with the model's "
        "weights"
    ),
    **{
        f".*({pattern})": f"{{source}} holds {{found}}, {what}, which mergestream does not read: {remedy}"
        for pattern, (what, remedy) in _FILES.items()
    },
}
"""Names in a directory without weights, and what it is; the first pattern that matches a name counts"""
_TOKENIZER = re.compile(r"tokenizer.*|vocab\..*|merges\.txt|special_tokens_map\.json|.*\.(spm|model|tiktoken)")


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
    if directory and (folders := _folders_with_weights(names, directory)):
        begin = f"{source} holds no weights itself, but in its folders {shorten_list(folders, 4)}"
        return f"{begin}: {_choose_folder(folders, source, directory)}"
    for pattern, sentence in _CONTENTS.items():
        if found := sorted(name for name in names if re.fullmatch(pattern, name)):
            return sentence.format(source=source, found=shorten_list(found, 4), last=found[-1])
    if "config.json" not in names and any(_TOKENIZER.fullmatch(name) for name in names):
        return f"{source} holds a tokenizer and no model; give the directory that has the weights"
    return None


def explain_file(path: Path) -> str | None:
    """What an unsupported file is, and what to do; None if it is unknown."""
    known = next((words for pattern, words in _FILES.items() if re.search(f"({pattern})$", path.name)), None)
    return f"{path} is {known[0]}, which mergestream does not read: {known[1]}" if known else None


def _folders_with_weights(names: Collection[str], directory: Path) -> list[str]:
    """The checkpoints of a training run, the models of a pipeline, or the first module of sentence-transformers."""
    known = re.compile(".*" if "model_index.json" in names else r"checkpoint-\d+|0_\w+")
    folders = [directory / name for name in names if known.fullmatch(name) or (directory / name / METADATA).is_file()]
    found = [
        folder.name for folder in folders if folder.is_dir() and any(is_weight_file(f.name) for f in folder.iterdir())
    ]
    return sorted(found, key=lambda name: (len(name), name) if name.startswith("checkpoint-") else (0, name))


def _choose_folder(folders: list[str], source: str, directory: Path) -> str:
    """Say which folder to give: the best and the last checkpoint, the denoiser of a pipeline, or else the first."""
    last = folders[-1]
    if not last.startswith("checkpoint-"):
        usual = next((name for name in ("unet", "transformer") if name in folders), folders[0])
        return f"give one of them, such as {source}/{usual}"
    state = {}
    with suppress(MergestreamError):
        state = read_json(directory / last / "trainer_state.json")
    best = re.split(r"[/\\]", str(state.get("best_model_checkpoint")))[-1]
    begin = f"the best is {source}/{best} (metric {state.get('best_metric')}), " if best in folders else ""
    return f"{begin}the last is {source}/{last}; give one of these paths"
