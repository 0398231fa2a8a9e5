"""What is told of tokens by the files of a tokenizer, as transformers reads them too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from mergestream.checkpoints.tokenizer import Tokenizer, add_tokens, read_tokenizer, same_tokenizer

FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
BERT = {
    "config.json": json.dumps({"model_type": "bert"}),
    "vocab.txt": "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n",
}
GPT2 = {
    "config.json": json.dumps({"model_type": "gpt2"}),
    "vocab.json": json.dumps({word: number for number, word in enumerate(["<|endoftext|>", "a", "b", "\u0120", "x"])}),
    "merges.txt": "#version: 0.2\n",
}
NEW = {"content": "<new>", **FLAGS}


def put(place: Any, files: Any) -> Any:
    place.mkdir()
    for name, text in files.items():
        (place / name).write_text(text)
    return place


def read(directory: Path) -> Tokenizer:
    found = read_tokenizer(directory)
    assert found is not None
    return found


@pytest.mark.parametrize("files", [BERT, GPT2], ids=["bert", "gpt2"])
@pytest.mark.parametrize(
    "more", [{}, {"added_tokens.json": "NUMBERS"}, {"tokenizer_config.json": "DECODER"}], ids=["", "added", "decoder"]
)
def test_tokens_are_read_and_added_as_transformers_does(files: Any, more: Any, tmp_path: Path) -> None:
    end = read(put(tmp_path / "plain", files)).end
    texts = {
        "NUMBERS": json.dumps({"<new>": end}),
        "DECODER": json.dumps({"added_tokens_decoder": {str(end): NEW}}),
    }
    place = put(tmp_path / "slow", {**files, **{name: texts[text] for name, text in more.items()}})
    whole = tmp_path / "fast"
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    tokenizer.save_pretrained(whole)
    (whole / "config.json").write_text(files["config.json"])
    for directory in (place, whole):
        found = read(directory)
        assert found.ids == tokenizer.get_vocab() and found.end == len(tokenizer)
        add_tokens(directory, {"<more>": (found.end, FLAGS), "<most>": (found.end + 1, {**FLAGS, "special": True})})
        grown = transformers.AutoTokenizer.from_pretrained(directory)
        assert grown.get_vocab() == read(directory).ids
        assert grown.convert_tokens_to_ids(["<more>", "<most>"]) == [found.end, found.end + 1]
        assert found.end in grown("a <more> b").input_ids
    assert same_tokenizer(place, place) and not same_tokenizer(place, whole)


def test_scored_pieces_are_numbered_by_their_place(tmp_path: Path) -> None:
    model = {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.0]], "unk_id": 0}
    added = [{"id": 2, "content": "<x>", **FLAGS, "special": True}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    found = read(tmp_path)
    assert found.ids == {"<unk>": 0, "a": 1, "<x>": 2}
    assert found.added == {"<x>": {**FLAGS, "special": True}}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"model": 3}',
        '{"model": {"vocab": [1]}}',
        '{"model": {"vocab": {"a": "b"}}}',
        '{"model": {"vocab": {"a": -1}}}',
        '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]}',
        '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": Infinity, "content": "b"}]}',
    ],
)
def test_what_is_not_understood_tells_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    assert read_tokenizer(tmp_path) is None
    assert read_tokenizer(None) is None
