"""Hostile names in cards, reports and pictures: shown, and nowhere obeyed."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from mergestream import Store
from mergestream.report.facts import Facts
from mergestream.report.render import render_html, render_markdown
from mergestream.report.tables import MAX_NAME, short_names
from tests.report.conftest import SCORES, make_ledger, make_store

HOSTILE = ("$\\frac$", "a\n# b\n\x1b[31m|`<script>alert(1)</script>", "[x](http://y) 名 \u202e" + "n" * 400)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Store:
    """A store whose experts have been given hostile names, as somebody else may do; never write to it."""
    return renamed(make_store(tmp_path_factory.mktemp("hostile") / "store", models))


def renamed(store: Store) -> Store:
    history = tuple(
        dataclasses.replace(entry, name=name, source=f"/{name}", given=name)
        for entry, name in zip(store.history, HOSTILE, strict=True)
    )
    store.manifest = dataclasses.replace(store.manifest, history=history)
    store.manifest.save(store.storage)
    store.attach_scores(HOSTILE, SCORES, metric="%{x}<b>")
    return store


def assert_harmless(text: str, heads: int) -> None:
    """Printable lines, as many headings as there are, no tag and no link of a name's; tables keep their columns."""
    assert all(character.isprintable() or character == "\n" for character in text)
    prose = re.sub(r"```sh\n.*?\n```\n|`[^`\n]*`|\n    .*?$", "", text, flags=re.S | re.M)
    assert "<script" not in prose and "](http" not in prose
    lines = text.splitlines()
    assert sum(line.startswith("#") for line in lines) == heads
    for line, above in zip(lines[1:], lines, strict=False):
        if line.startswith("|") and above.startswith("|"):
            assert line.count("|") == above.count("|")


def test_the_card_shows_names_and_obeys_none(hostile: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = hostile.export(tmp_path / "merged", task=None, command="mergestream a\nb")
    card = (out / "README.md").read_text(encoding="utf-8")
    assert_harmless(card, heads=2)
    assert "&#36;&#92;frac&#36;" in card and r"    mergestream a\nb" in card
    assert capfd.readouterr() == ("", "")


def test_the_card_names_no_base_that_is_none(hostile: Store, tmp_path: Path, models: Path) -> None:
    """The front matter is YAML, and the hub reads it."""
    from mergestream.export.card import hub_id, model_card

    class Base:
        source, directory = str(tmp_path), tmp_path

    for remembered, found in (("org/model", "org/model"), ("a/b\n---\nx: y", None), ("a/b: c", None), ("../b", None)):
        (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": remembered}))
        assert hub_id(Base()) == found  # type: ignore[arg-type]
    base = dataclasses.replace(hostile.manifest.base, given="b`a\nse")
    manifest = dataclasses.replace(hostile.manifest, base=base, method="m", parameters={"x\n": "# y"}, history=())
    front = model_card(manifest, 1.0, 1.0, hub_id="org/model").split("---\n")[1]
    assert 'base_model:\n- "org/model"\n' in front
    assert_harmless(model_card(manifest, 1.0, 1.0), heads=1)


def test_markdown_shows_names_and_obeys_none(hostile: Store) -> None:
    assert_harmless(render_markdown(Facts.of(hostile)), heads=5)


def test_markdown_of_a_ledger_shows_names_and_obeys_none(tmp_path: Path, models: Path) -> None:
    store = renamed(make_ledger(tmp_path / "store", models, budget=8.0))
    assert_harmless(render_markdown(Facts.of(store)), heads=7)


def test_the_page_has_no_tag_and_no_line_of_a_name(hostile: Store) -> None:
    text = render_html(Facts.of(hostile))
    assert "<script>alert" not in text and "\x1b" not in text and "\u202e" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_names_that_are_cut_alike_stay_apart() -> None:
    names = short_names(["a" * 100 + "b" * 100, "a" * 100 + "c" + "b" * 99, "a" * 300])
    assert len(set(names)) == 3 and all(len(name) <= MAX_NAME + 1 for name in names)
    assert short_names(["a-name-of-twenty-five-char"]) == ["a-name-of-twenty-five-char"]
