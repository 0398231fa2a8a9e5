"""Files beside the weights: config, tokenizer and what else the base has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mergestream.checkpoints import Checkpoint
from mergestream.checkpoints.layout import MODULES, model_config, module_folders
from mergestream.experts.vocabulary import Token
from mergestream.export.vocabulary import ExtendedVocabularySource
from mergestream.files import read_json

_DTYPE_KEYS = {"dtype", "torch_dtype"}


def write_companions(
    draft: Path,
    base: Checkpoint,
    dtype: str | None,
    extended: ExtendedVocabularySource | None = None,
    config: Mapping[str, Any] | None = None,
    own_tokens: Sequence[Token] = (),
) -> None:
    """Copy the base's config, tokenizer and other small files, and adapt them to the weights.

    ``config`` is the config of the expert whose head is in the model, ``own_tokens`` are the tokens it adds.
    """
    _copy_files(draft, base, has_other_class(base, config))
    path = draft / "config.json"
    ours = read_json(path) if path.is_file() else {}
    fitted = fit_config(ours if config is None else config, ours, extended, own_tokens)
    if config is not None:
        fitted = {key: value for key, value in fitted.items() if key not in _DTYPE_KEYS}
    fitted |= {key: dtype or ours[key] for key in sorted(_DTYPE_KEYS & ours.keys())}
    if fitted != ours:
        path.write_text(json.dumps(fitted, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if extended:
        extended.extend_tokenizer(draft)


def has_other_class(base: Checkpoint, config: Mapping[str, Any] | None) -> bool:
    """Whether an expert's config names another model class than the base's."""
    return config is not None and config.get("architectures") != model_config(base.directory).get("architectures")


def _copy_files(draft: Path, base: Checkpoint, is_other_class: bool) -> None:
    if base.directory is None:
        return
    # The modules of a sentence encoder do not fit a classifier.
    left_out = {MODULES, *module_folders(base.directory)} if is_other_class else set()
    for path in base.companions():
        relative = path.relative_to(base.directory)
        if relative.parts[0] not in left_out:
            (draft / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, draft / relative)


def fit_config(
    config: Mapping[str, Any],
    ours: Mapping[str, Any],
    extended: ExtendedVocabularySource | None,
    own_tokens: Sequence[Token],
) -> dict[str, Any]:
    """A config with the vocabulary size and the token ids of the written tables; ``ours`` is the base's.

    A token id of an expert's config becomes the id of the same token in the merged model, or the base's if the token
    was not kept.
    """
    size = ours.get("vocab_size")
    if extended and size == extended.base_size:
        size = extended.size
    new_ids = {token.id: extended.rows[token.content] for token in own_tokens} if extended else {}

    def new_id(key: str, old: Any) -> Any:
        if not isinstance(old, int):
            return old
        is_lost = isinstance(size, int) and old >= size
        return new_ids.get(old, ours.get(key) if is_lost else old)

    fitted = dict(config)
    for key, value in config.items():
        if isinstance(value, Mapping) and isinstance(ours.get(key), Mapping):
            fitted[key] = fit_config(value, ours[key], extended, own_tokens)
        elif key == "vocab_size" and size is not None:
            fitted[key] = size
        elif key.endswith("_token_id"):
            fitted[key] = [new_id(key, old) for old in value] if isinstance(value, list) else new_id(key, value)
    return fitted
