"""The settings of a model in small files beside its weights: chat template, special tokens, generation settings."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from mergestream.checkpoints.layout import leads_out
from mergestream.errors import MergestreamError
from mergestream.files import read_json, to_json

TEMPLATE, TOKENS_MAP = "chat_template.jinja", "special_tokens_map.json"
MAX_FILE, MAX_KEPT = 1 << 23, 1 << 18
"""Bytes of a file that is read, and of what is kept of it"""
_LEFT_OUT = {
    *("added_tokens_decoder", "auto_map", "backend", "name_or_path", "_name_or_path", "special_tokens_map_file"),
    *("tokenizer_class", "tokenizer_file", "transformers_version"),
}
"""Keys that say how files are stored, or that hold the user's paths"""


Part = Literal["chat_template", "tokenizer", "generation", "config"]
PARTS: tuple[Part, ...] = get_args(Part)
FILES: dict[Part, str] = {
    "tokenizer": "tokenizer_config.json",
    "generation": "generation_config.json",
    "config": "config.json",
}
Settings = dict[Part, dict[str, Any]]
"""The content of these files; a file that the model lacks is missing. The only key of ``chat_template`` is
``chat_template``: it is empty if there is a tokenizer without one"""


def read_settings(directory: Path | None) -> Settings:
    """The settings in a directory; a file that is too large, damaged or a link to elsewhere is left out."""
    if directory is None:
        return {}
    found: Settings = {}
    for part, name in FILES.items():
        if (content := _read_object(directory / name)) is not None:
            found[part] = content
    if tokens := _read_object(directory / TOKENS_MAP):
        found["tokenizer"] = {**tokens, **found.get("tokenizer", {})}
    template = found.get("tokenizer", {}).pop("chat_template", None)
    template = _read_text(directory / TEMPLATE) or template
    if template or "tokenizer" in found:
        found["chat_template"] = {"chat_template": template} if template else {}
    return {part: content for part, content in found.items() if len(to_json(content)) <= MAX_KEPT}


def _read_text(path: Path) -> str | None:
    with suppress(OSError, ValueError):
        if path.is_file() and path.stat().st_size <= MAX_FILE and not leads_out(path, path.parent):
            return path.read_text(encoding="utf-8")
    return None


def _read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, without the keys that are left out."""
    with suppress(MergestreamError):
        if _read_text(path) is not None:
            content: Mapping[str, Any] = read_json(path, finite=True)
            return {key: value for key, value in content.items() if key not in _LEFT_OUT}
    return None
