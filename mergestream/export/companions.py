"""Files beside the weights: what the base has, and the settings on which the experts agree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mergestream.checkpoints import Checkpoint
from mergestream.checkpoints.layout import MODULES, model_config, module_folders
from mergestream.checkpoints.settings import FILES, PARTS, TEMPLATE, TOKENS_MAP, Part, Settings, read_settings
from mergestream.checkpoints.tokenizer import read_tokenizer
from mergestream.errors import UsageError
from mergestream.escaping import code
from mergestream.export.directory import ReadoutChoice
from mergestream.export.source import VocabularySource
from mergestream.files import read_json
from mergestream.merging.reading import Reading
from mergestream.progress import Progress
from mergestream.sizes import shorten_list
from mergestream.store.snapshot import Snapshot

_DTYPE_KEYS = {"dtype", "torch_dtype"}
BASE = "base"
_WEIGHT_KEYS = _DTYPE_KEYS | {
    *("architectures", "model_type", "quantization_config", "tie_word_embeddings", "vocab_size")
}
"""Keys of ``config.json`` that belong to the weights that are written"""
_CALL_PREFIXES = ("_", "output_", "return_")
"""How keys of ``generation_config.json`` begin that say what a call returns, or where the file is from"""
_TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")


def write_companions(
    draft: Path,
    base: Checkpoint,
    dtype: str | None,
    extended: VocabularySource | None = None,
    task: str = "",
    config: Mapping[str, Any] | None = None,
) -> None:
    """Copy the base's config, tokenizer and other small files, and adapt them to the weights.

    ``task`` is the expert whose head is in the model, and ``config`` is its config.
    """
    # The modules of a sentence encoder do not fit a classifier.
    left_out = {MODULES, *module_folders(base.directory)} if base.directory and has_other_class(base, config) else set()
    for file in base.companions():
        relative = file.relative_to(base.directory or "/")
        if relative.parts[0] not in left_out:
            (draft / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, draft / relative)
    path = draft / "config.json"
    ours = read_json(path) if path.is_file() else {}
    fitted = fit_config(ours if config is None else config, ours, extended, task)
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


def fit_config(
    config: Mapping[str, Any], ours: Mapping[str, Any], extended: VocabularySource | None, expert: str
) -> dict[str, Any]:
    """A config with the vocabulary size and the token ids of the written tables; ``ours`` is the base's.

    A token id of an expert's config becomes the id of the same token in the merged model, or the base's if the token
    was not kept.
    """
    size = ours.get("vocab_size")
    if extended and size == extended.base_size:
        size = extended.size
    new_ids = extended.new_ids(expert) if extended else {}

    def new_id(key: str, old: Any) -> Any:
        if not isinstance(old, int):
            return old
        is_lost = isinstance(size, int) and old >= size
        return new_ids.get(old, ours.get(key) if is_lost else old)

    fitted = dict(config)
    for key, value in config.items():
        if isinstance(value, Mapping) and isinstance(ours.get(key), Mapping):
            fitted[key] = fit_config(value, ours[key], extended, expert)
        elif key == "vocab_size" and size is not None:
            fitted[key] = size
        elif key.endswith("_token_id"):
            fitted[key] = [new_id(key, old) for old in value] if isinstance(value, list) else new_id(key, value)
    return fitted


# --- settings of the experts ---------------------------------------------------------------------------------


class ExpertSettings(NamedTuple):
    """The settings of the experts that are merged, or of one ``alone``, which keeps all of its files."""

    by_expert: Mapping[str, Settings]
    alone: bool = False
    advice: str = ""
    """What to do where they differ"""


def find_settings(snapshot: Snapshot, reading: Reading, choice: ReadoutChoice) -> ExpertSettings:
    """The settings of the expert that ``--files-from`` names or that is read out alone, else of all in the model."""
    name = choice.files_from or choice.one_expert
    if name == choice.files_from == BASE:
        return ExpertSettings({})
    found: dict[str, Settings] = {}
    for entry in snapshot.manifest.history if name is None else [snapshot.manifest.expert(name)]:
        if name is not None or reading.weights is None or reading.weights.get(entry.name):
            found[entry.name] = snapshot.records[entry.name].settings
    if choice.files_from and not found[choice.files_from]:
        raise UsageError(f"--files-from {name}: the store has no such files of this expert; add it again to keep them")
    advice = "; export --files-from NAME takes those of one expert"
    return ExpertSettings(found, alone=name is not None, advice=advice)


def take_settings(
    draft: Path,
    settings: ExpertSettings,
    extended: VocabularySource | None,
    progress: Progress,
    parts: Collection[Part] = PARTS,
) -> str:
    """Replace settings of the base in the files of a draft, and note those for which the base's are kept.

    Returns Markdown for the card; empty if all files are the base's and no expert has others.
    """
    taken, differing, unknown = dict[str, None](), dict[str, None](), dict[str, None]()  # sets with an order
    ours, tokenizer = read_settings(draft), read_tokenizer(draft)
    known = tokenizer.ids if tokenizer else {}
    for part in parts:
        base, theirs = ours.get(part, {}), _contents(part, ours, settings, extended)
        is_whole = settings.alone or part == "generation"  # then a key that is missing has its default
        changes: dict[str, Any] = {}
        keys = {key for content in theirs for key in content} | (base.keys() if is_whole and theirs else set())
        for key in sorted(key for key in keys if _is_setting(part, key, settings.alone)):
            first, *others = (content.get(key) for content in theirs)
            if any(_plain(other) != _plain(first) for other in others):
                differing[key] = None
            elif _plain(first) == _plain(base.get(key)) or (first is None and not is_whole):
                continue
            elif part == "tokenizer" and not known.keys() >= _token_texts(key, first):
                unknown[key] = None
            else:
                changes[key] = first
        if changes:
            taken |= {key: None for key, value in changes.items() if value is not None}
            _write(draft, part, changes)
    if differing:
        progress.note(
            f"the experts have different settings ({shorten_list(differing)}), so the base's are kept{settings.advice}"
        )
    if unknown:
        progress.note(
            f"{shorten_list(unknown)} of the experts would be tokens that the merged model does not have, so the "
            "base's are kept"
        )
    origins = {"from the experts": taken, "from the base, because the experts differ,": differing}
    return "; ".join(f"{origin} {', '.join(map(code, keys))}" for origin, keys in origins.items() if keys)


def _contents(
    part: Part, ours: Settings, settings: ExpertSettings, extended: VocabularySource | None
) -> list[dict[str, Any]]:
    """One file of each expert that has it, with the ids of tokens in the model that is written."""
    theirs = {name: found[part] for name, found in settings.by_expert.items() if part in found}
    if part not in ("generation", "config"):
        return list(theirs.values())
    config = ours.get("config", {})
    text = config.get("text_config")
    sized = {**(text if isinstance(text, dict) else {}), **config, **ours.get(part, {})}
    return [
        fit_config(content, sized, extended, name)
        for name, content in theirs.items()
        if part == "generation" or content.get("model_type") == config.get("model_type")
    ]


def _is_setting(part: Part, key: str, alone: bool) -> bool:
    """Whether a key counts: of merged experts only special tokens and their ids, and how text is generated."""
    if part == "config":
        return key not in _WEIGHT_KEYS if alone else key.endswith("_token_id")
    if part == "tokenizer":
        return alone or key.endswith("_token") or key in _TOKEN_LISTS
    return key != "use_cache" and not key.startswith(_CALL_PREFIXES)


def _plain(value: Any) -> Any:
    """A token as its text: files hold it as a string, or as an object with flags."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value["content"] if isinstance(value, dict) and "content" in value else value


def _token_texts(key: str, value: Any) -> set[str]:
    """The tokens that a setting of a tokenizer names."""
    values = value if isinstance(value, list) else [value]
    is_token = key.endswith("_token") or key in _TOKEN_LISTS
    return {text for text in map(_plain, values) if isinstance(text, str)} if is_token else set()


def _write(draft: Path, part: Part, changes: Mapping[str, Any]) -> None:
    if part == "chat_template":
        template = changes[part]
        (draft / TEMPLATE).unlink(missing_ok=True)
        _change(draft / FILES["tokenizer"], {part: template if isinstance(template, list) else None})
        if isinstance(template, str):
            (draft / TEMPLATE).write_text(template, encoding="utf-8")
        return
    if part == "generation":  # else transformers would make it from the model's config again
        changes = {**changes, "_from_model_config": None}
    _change(draft / FILES[part], changes)
    if part == "tokenizer" and (draft / TOKENS_MAP).is_file():
        named = read_json(draft / TOKENS_MAP)
        _change(draft / TOKENS_MAP, {key: value for key, value in changes.items() if key in named})


def _change(path: Path, changes: Mapping[str, Any]) -> None:
    """Change keys of a JSON file; None removes a key."""
    before = read_json(path) if path.is_file() else {}
    after = {key: value for key, value in {**before, **changes}.items() if key not in changes or value is not None}
    if after != before:
        path.write_text(json.dumps(after, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
