"""The settings of the experts in an export: those on which they agree replace the base's."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mergestream.checkpoints.settings import FILES, PARTS, TEMPLATE, TOKENS_MAP, Part, Settings, read_settings
from mergestream.checkpoints.tokenizer import read_tokenizer
from mergestream.errors import UsageError
from mergestream.escaping import code
from mergestream.export.companions import fit_config
from mergestream.export.recipe import ReadoutChoice
from mergestream.export.vocabulary import ExpertTokens, ExtendedVocabularySource
from mergestream.files import read_json
from mergestream.merging.reading import Reading
from mergestream.sizes import shorten_list
from mergestream.store.snapshot import Snapshot

BASE = "base"
_OF_WEIGHTS = {
    *("architectures", "dtype", "model_type", "quantization_config", "tie_word_embeddings", "torch_dtype"),
    "vocab_size",
}
"""Keys of ``config.json`` that belong to the weights that are written"""
_OF_CALLS = ("_", "output_", "return_")
"""Keys of ``generation_config.json`` that say what a call returns, or where the file is from"""
_TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")


class Givers(NamedTuple):
    """The experts whose settings count: those that are merged, or one ``alone``, whose files are its own."""

    settings: Mapping[str, Settings]
    alone: bool = False


class Taken(NamedTuple):
    """The settings that an export has from experts, those in which they differ, and tokens that it does not have."""

    settings: list[str]
    differing: list[str]
    unknown: list[str]

    @property
    def notes(self) -> list[str]:
        """Sentences about the settings for which the base's were kept."""
        notes = []
        if self.differing:
            notes.append(
                f"the experts have different settings ({shorten_list(self.differing)}), so the base's are kept; "
                "export --files-from NAME takes those of one expert"
            )
        if self.unknown:
            notes.append(
                f"{shorten_list(self.unknown)} of the experts would be tokens that the merged model does not have, so "
                "the base's are kept"
            )
        return notes

    @property
    def summary(self) -> str:
        """Markdown for the card; empty if all files are the base's and no expert has others."""
        parts = [f"from the experts {_codes(self.settings)}"] if self.settings else []
        parts += [f"from the base, because the experts differ, {_codes(self.differing)}"] if self.differing else []
        return "; ".join(parts)


def find_givers(snapshot: Snapshot, reading: Reading, choice: ReadoutChoice) -> Givers:
    """The settings of the expert that ``--files-from`` names or that is read out alone, else of all in the model."""
    name = choice.files_from or choice.one_expert
    if name == choice.files_from == BASE:
        return Givers({})
    found: dict[str, Settings] = {}
    for entry in snapshot.manifest.history if name is None else [snapshot.manifest.expert(name)]:
        if name is not None or reading.weights is None or reading.weights.get(entry.name):
            found[entry.name] = snapshot.settings[entry.name]
    if choice.files_from and not found[choice.files_from]:
        raise UsageError(f"--files-from {name}: the store has no such files of this expert; add it again to keep them")
    return Givers(found, alone=name is not None)


def take_settings(
    draft: Path,
    givers: Givers,
    tokens: Mapping[str, ExpertTokens],
    extended: ExtendedVocabularySource | None,
    parts: Collection[Part] = PARTS,
) -> Taken:
    """Replace settings of the base in the files of a draft; ``tokens`` are new tokens in the model, by expert."""
    ours, taken = read_settings(draft), Taken([], [], [])
    tokenizer = read_tokenizer(draft)
    known = tokenizer.ids if tokenizer else {}
    for part in parts:
        base, theirs = ours.get(part, {}), _contents(part, ours, givers, tokens, extended)
        is_whole = givers.alone or part == "generation"  # then a key that is missing has its default
        changes: dict[str, Any] = {}
        keys = {key for content in theirs for key in content} | (base.keys() if is_whole and theirs else set())
        for key in sorted(key for key in keys if _is_setting(part, key, givers.alone)):
            first, *others = (content.get(key) for content in theirs)
            if any(_plain(other) != _plain(first) for other in others):
                taken.differing.append(key)
            elif _plain(first) == _plain(base.get(key)) or (first is None and not is_whole):
                continue
            elif part == "tokenizer" and not known.keys() >= _token_texts(key, first):
                taken.unknown.append(key)
            else:
                changes[key] = first
        if changes:
            taken.settings.extend(key for key, value in changes.items() if value is not None)
            _write(draft, part, changes)
    return Taken(*(list(dict.fromkeys(names)) for names in taken))


def _contents(
    part: Part,
    ours: Settings,
    givers: Givers,
    tokens: Mapping[str, ExpertTokens],
    extended: ExtendedVocabularySource | None,
) -> list[dict[str, Any]]:
    """One file of each expert that has it, with the ids of tokens in the model that is written."""
    theirs = {name: settings[part] for name, settings in givers.settings.items() if part in settings}
    if part not in ("generation", "config"):
        return list(theirs.values())
    config = ours.get("config", {})
    text = config.get("text_config")
    sized = {**(text if isinstance(text, dict) else {}), **config, **ours.get(part, {})}
    return [
        fit_config(content, sized, extended, tokens[name].tokens if name in tokens else ())
        for name, content in theirs.items()
        if part == "generation" or content.get("model_type") == config.get("model_type")
    ]


def _is_setting(part: Part, key: str, alone: bool) -> bool:
    """Whether a key counts: of merged experts only special tokens and their ids, and how text is generated."""
    if part == "config":
        return key not in _OF_WEIGHTS if alone else key.endswith("_token_id")
    if part == "tokenizer":
        return alone or key.endswith("_token") or key in _TOKEN_LISTS
    return key != "use_cache" and not key.startswith(_OF_CALLS)


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


def _codes(names: Collection[str]) -> str:
    return ", ".join(map(code, names))
