"""Read and extend the files of a tokenizer, without running it."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergestream.errors import MergestreamError
from mergestream.files import read_json, read_small

_WHOLE, _ADDED, _CONFIG = "tokenizer.json", "added_tokens.json", "tokenizer_config.json"
_FILES = (_WHOLE, "vocab.json", "vocab.txt", _ADDED, _CONFIG)
_TOKENS, _DECODER = "added_tokens", "added_tokens_decoder"
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
"""Default flags of an added token: how it is matched in a text"""


@dataclass(frozen=True)
class Tokenizer:
    """The tokens of a model and their ids, which are their rows in the embedding."""

    ids: Mapping[str, int]
    added: Mapping[str, Mapping[str, bool]]
    """The flags of the tokens that were added to the vocabulary"""

    @property
    def end(self) -> int:
        """The id of the next new token; the rows from here on are padding."""
        return max(self.ids.values(), default=-1) + 1


def read_tokenizer(directory: Path | None) -> Tokenizer | None:
    """Read the tokenizer in a directory; None if there is none or its format is unknown."""
    if directory is None:
        return None
    try:
        whole, added, config = (_read(directory / name) for name in (_WHOLE, _ADDED, _CONFIG))
        ids = _vocabulary(directory, whole)
        flags = {token: dict(_FLAGS) for token in added}
        for number, token in (*config.get(_DECODER, {}).items(), *((t["id"], t) for t in whole.get(_TOKENS, ()))):
            added[str(token["content"])] = int(number)
            flags[str(token["content"])] = {flag: bool(token.get(flag, default)) for flag, default in _FLAGS.items()}
        ids |= added
        known = ids and all(isinstance(number, int) and number >= 0 for number in ids.values())
        return Tokenizer(ids, flags) if known else None
    except (MergestreamError, OSError, LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def same_tokenizer(one: Path | None, other: Path | None) -> bool:
    """Whether two directories have the same tokenizer files, byte by byte; True if one directory is unknown."""
    if one is None or other is None:
        return True
    names = [name for name in _FILES if (one / name).is_file() or (other / name).is_file()]
    same, _, _ = filecmp.cmpfiles(one, other, names, shallow=False)
    return same == names


def add_tokens(directory: Path, tokens: Mapping[str, tuple[int, Mapping[str, bool]]]) -> None:
    """Add tokens, each with its id and its flags, to the tokenizer files in a directory."""
    whole, added, config = (_read(directory / name) for name in (_WHOLE, _ADDED, _CONFIG))
    if whole:
        new = [{"id": number, "content": token, **flags} for token, (number, flags) in tokens.items()]
        _write(directory / _WHOLE, {**whole, _TOKENS: [*whole.get(_TOKENS, ()), *new]})
    if added or not whole:
        _write(directory / _ADDED, added | {token: number for token, (number, _) in tokens.items()})
    if _DECODER in config:
        decoded = {str(number): {"content": token, **flags} for token, (number, flags) in tokens.items()}
        _write(directory / _CONFIG, {**config, _DECODER: {**config[_DECODER], **decoded}})


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _vocabulary(directory: Path, whole: Mapping[str, Any]) -> dict[str, int]:
    """The tokens of the vocabulary, without the added ones."""
    if whole:
        vocabulary = whole["model"]["vocab"]
        if isinstance(vocabulary, dict):
            return dict(vocabulary)
        return {token: number for number, (token, _) in enumerate(vocabulary)}  # pairs of token and score
    if (directory / "vocab.txt").is_file():
        lines = read_small(directory / "vocab.txt").removesuffix("\n").split("\n")
        return {line: number for number, line in enumerate(lines)}
    return _read(directory / "vocab.json")
