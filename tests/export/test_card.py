"""The model card lists the whole history: every add, not only the last command."""

from __future__ import annotations

from pathlib import Path

import pytest

from mergestream import Store
from mergestream.checkpoints.location import public_name
from tests.conftest import RunCommand, Toys


def history(directory: Path) -> str:
    return (directory / "README.md").read_text(encoding="utf-8").partition("## History\n")[2]


def lines_of(directory: Path, name: str) -> list[str]:
    return [line for line in history(directory).splitlines() if f"| {name} |" in line]


def test_every_add_is_in_the_card(
    tmp_path: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch, done: RunCommand
) -> None:
    monkeypatch.chdir(toys.base.parent)
    store = tmp_path / "store"
    done("init", store, "--base", "base")
    done("add", store, "expert-1", "--ignore", "half.*", "--gate", "norm<=100")
    done("add", store, "expert-2")
    done("add", store, "expert-3", "--evaluate", "echo {model} 0.75")
    done("remove", store, "expert-2")
    done("export", store, tmp_path / "out", "--without", "expert-3")
    entries = {entry.name: entry for entry in Store(store).history}
    for name, entry in entries.items():
        (line,) = lines_of(tmp_path / "out", name)
        assert f"| {entry.added} |" in line and f"`{name}`" in line and entry.digest in line
    assert "--ignore half.&#42;, norm&#60;=100 (" in lines_of(tmp_path / "out", "expert-1")[0]
    assert "score 0.75, left out of this model" in lines_of(tmp_path / "out", "expert-3")[0]
    assert "expert-2" not in history(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "* Base: `base`" in card and "# 1 model merged" in card
    assert str(toys.base.parent) not in card, "nobody typed where the experts lie"


def test_the_card_of_a_one_shot_merge_lists_its_experts(
    tmp_path: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch, done: RunCommand
) -> None:
    monkeypatch.chdir(toys.base.parent)
    for method in ("average", "opcm"):  # carried through, and by way of a store
        done("merge", "--base", "base", "--method", method, "expert-1", "./expert-2", "-o", tmp_path / method)
        assert "| `expert-1` |" in lines_of(tmp_path / method, "expert-1")[0]
        assert "| `./expert-2` |" in lines_of(tmp_path / method, "expert-2")[0]
        assert str(toys.base.parent) not in (tmp_path / method / "README.md").read_text(encoding="utf-8").replace(
            str(tmp_path), ""
        )


@pytest.mark.parametrize(
    ("source", "given", "expected"),
    [
        ("/home/ann/models/law", "models/law", "models/law"),
        ("/home/ann/models/law", "/home/ann/models/law", "/home/ann/models/law"),
        ("/home/ann/models/law", "", "law"),
        ("org/name@0123", "org/name", "org/name@0123"),
        ("the state dict", "", "the state dict"),
        ("/tmp/x", "https://ann:secret@host/law?signature=secret", "https://host/law"),
        ("/tmp/x", "s3://key:s@cret@bucket/law", "s3://bucket/law"),
    ],
)
def test_cards_show_what_the_user_typed_and_no_secrets(source: str, given: str, expected: str) -> None:
    assert public_name(source, given) == expected
