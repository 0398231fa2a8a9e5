"""What `watch` is to leave alone: kept in the store, and no reason for anything else to fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mergestream import Average, MergestreamError, Store
from mergestream.store.watched import NAME, SkippedExpert, recall, remember, signature
from tests.conftest import Toys


@pytest.fixture
def store(tmp_path: Path, toys: Toys) -> Any:
    store = Store.create(tmp_path / "store", toys.base, Average())
    store.add(toys.experts[0])
    return store


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"experts": {"a": 1}, "digest": ""}', '{"experts": 1, "digest": 2}'])
def test_damage_is_found_and_stops_no_undo(text: str, store: Any) -> None:
    (store.path / NAME).write_text(text)
    for reading in (lambda: recall(store.storage), store.verify):
        with pytest.raises(MergestreamError, match=NAME):
            reading()
    store.undo()
    assert store.history == ()


def test_a_flipped_bit_is_found(store: Any, toys: Toys) -> None:
    with store.writing():
        remember(store.storage, {"a": SkippedExpert("x", "because")})
    path = store.path / NAME
    path.write_text(path.read_text().replace("because", "becausf"))
    with pytest.raises(MergestreamError, match="is damaged"):
        recall(store.storage)


def test_a_signature_changes_with_names_sizes_and_times(tmp_path: Path) -> None:
    directory = tmp_path / "expert"
    directory.mkdir()
    assert signature(directory) == ""
    seen = []
    for change in (
        lambda: (directory / "a").write_text("1"),
        lambda: (directory / "a").write_text("22"),
        lambda: os.utime(directory / "a", (1, 1)),
        lambda: (directory / "a").rename(directory / "b"),
        lambda: (directory / "a").symlink_to("nowhere"),
    ):
        change()
        seen.append(signature(directory))
    assert len(set(seen)) == 4 and seen[-1] == seen[-2]
    os.rename(directory, tmp_path / "moved")  # noqa: PTH104
    assert signature(tmp_path / "moved") == seen[-1]
