"""Files and directories that are recognised but not read: what they are, and which path or command to use instead."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from mergestream.checkpoints.layout import WEIGHT_SUFFIXES, is_weight_file
from mergestream.errors import MergestreamError
from mergestream.sizes import shorten_list

_FROM_TRANSFORMERS = (
    "load it with transformers<5 (`AutoModel.from_pretrained(…, {})`) and give what save_pretrained() writes"
)
_FILES = {
    r"\.onnx(_data)?": "an ONNX graph: give the PyTorch model that it was exported from",
    r"\.(h5|keras)|\.index|\.meta|\.data-\d+-of-\d+|\.pb": (
        f"a TensorFlow file: {_FROM_TRANSFORMERS.format('from_tf=True')}"
    ),
    r"\.msgpack": f"a Flax file: {_FROM_TRANSFORMERS.format('from_flax=True')}",
    r"\.np[zy]": "a file of numpy or MLX: write its arrays with safetensors.numpy.save_file()",
    r"\.(pkl|pickle|joblib)": (
        "a pickle, which was not executed: if you trust its origin, write the model's state_dict() as safetensors"
    ),
    r"\.(zip|tar|tgz|gz|nemo)": "an archive: unpack it and give its content",
}
"""Other file formats by the end of their name: what they are, and what to do"""
_WEIGHTS = f".*({'|'.join(map(re.escape, WEIGHT_SUFFIXES))})"
_TRAINING_STATE = "(optimizer|scheduler|scaler|training_args|rng_state|random_states)"
_CONTENTS = {
    r"zero_to_fp32\.py|.*_optim_states\.pt|mp_rank_\d+.*_model_states\.pt|global_step\d+": (
        "is a DeepSpeed ZeRO checkpoint, which keeps its weights in pickles: if you trust its origin, run "
        "`python -m deepspeed.utils.zero_to_fp32 DIR OUT --safe_serialization`, where DIR holds the file `latest`, and "
        "give OUT"
    ),
    r".*\.distcp": "has .distcp files and no .metadata: it is incomplete; save or copy it again",
    r"model_index\.json": (
        "is a diffusers pipeline, which is several models, and none of them has weights here: "
        "`hf download ORG/NAME --local-dir DIR` and give one of them, such as DIR/unet"
    ),
    f"(?!{_TRAINING_STATE}){_WEIGHTS}": "holds {found}; name the file you mean",
    _WEIGHTS: "holds only the state to resume a training run from ({found}); give the directory with the weights",
    **{
        f".*({pattern})": f"holds {{found}}, which is not read, because it is {what}"
        for pattern, what in _FILES.items()
    },
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
        return (
            f"{source} holds no weights itself, but its folders {shorten_list(folders, 4)} do: give one of them, "
            f"such as {source}/{folders[-1]}"
        )
    for pattern, sentence in _CONTENTS.items():
        if found := sorted(name for name in names if re.fullmatch(pattern, name)):
            return f"{source} {sentence.format(found=shorten_list(found, 4))}"
    return None


def explain_file(path: Path) -> str | None:
    """What an unsupported file is, and what to do; None if it is unknown."""
    known = next((what for pattern, what in _FILES.items() if re.search(f"({pattern})$", path.name)), None)
    return f"{path} is not read, because it is {known}" if known else None


def _folders_with_weights(names: Collection[str], directory: Path) -> list[str]:
    """The checkpoints of a training run, the models of a pipeline, or the first module of sentence-transformers."""
    known = re.compile(".*" if "model_index.json" in names else r"checkpoint-\d+|0_\w+|model")
    folders = [directory / name for name in names if known.fullmatch(name)]
    found = [
        path.name for path in folders if path.is_dir() and any(is_weight_file(file.name) for file in path.iterdir())
    ]
    return sorted(found, key=lambda name: (len(name), name))  # checkpoint-1000 after checkpoint-500
