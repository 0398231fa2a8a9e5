"""Hundreds of experts: what is drawn and embedded is bounded, and says so; what is listed has all."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mergestream import OPCM, Ledger, Store
from mergestream.report.facts import Facts
from mergestream.report.render import render_html, render_markdown
from mergestream.report.sections import MAX_EXPERTS, make_sections
from mergestream.report.tables import MAX_FINDINGS
from tests.report.conftest import EXPERTS, model

MANY = 500


def crowded(path: Path, models: Path, method: Any, count: int) -> Store:
    """A store that says that its three experts have come again and again."""
    store = Store.create(path, models / "base", method)
    for name in EXPERTS:
        store.add(models / name)
    came = [*(i % 3 for i in range(count - 1)), 2]  # the state is that after the last
    for number, which in enumerate(came[3:], 4):
        for part in store.path / "steps", store.path / "experts":
            if (part / f"{which + 1:04d}").is_dir():
                shutil.copytree(part / f"{which + 1:04d}", part / f"{number:04d}", copy_function=os.link)
    history = [
        dataclasses.replace(store.history[which], name=f"expert-{i}", number=i + 1) for i, which in enumerate(came)
    ]
    store.manifest = dataclasses.replace(store.manifest, history=tuple(history))
    store.manifest.save(store.storage)
    return store


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Store:
    store = crowded(tmp_path_factory.mktemp("many") / "store", models, OPCM(alpha=0.5), MANY)
    tasks = [f"task-{i}" for i in range(60)]
    store.attach_scores(tasks, [[i / 60] * 60 for i in range(60)])
    return store


def embedded(text: str) -> list[list[Any]]:
    """The table of tensors of a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found
    data: list[list[Any]] = json.loads(found[1])
    return data


def assert_bounded(text: str, count: int) -> None:
    """Nothing in the page grows by more than a few numbers with every expert."""
    for table in re.findall(r'<table class="matrix">.*?</thead>', text, re.S):
        assert table.count("<th ") <= MAX_EXPERTS + 1
    assert len(embedded(text)) == len(model()) and {len(row) for row in embedded(text)} == {9}
    assert text.count("<td") < 20 * count + 40 * MAX_EXPERTS**2
    assert text.count('<td data-label="step"') == count
    assert f"The tables below show the last {MAX_EXPERTS} of {count} experts." in text
    assert '<div class="scroll tall"><table class="sortable' in text and 'id="expert-search"' in text
    assert len(text) < 2_000_000


def test_a_page_of_many_experts_is_bounded(many: Store) -> None:
    text = render_html(Facts.of(many))
    assert_bounded(text, MANY)
    assert (
        "This shows the last 24 steps and 24 tasks." in text and "after step 60" in text and "after step 36" not in text
    )


def test_a_page_of_a_ledger_of_many_experts_is_bounded(tmp_path: Path, models: Path) -> None:
    store = crowded(tmp_path / "ledger", models, Ledger(), 60)
    facts = Facts.of(store)
    assert_bounded(render_html(facts), 60)
    assert facts.interference
    alike = dataclasses.replace(facts.interference, cosines=((0.9,) * 60,) * 60)
    text = render_html(dataclasses.replace(facts, interference=alike))
    (similar,) = re.findall(r"Similar experts .*", text)
    assert similar.count("(0.90)") == MAX_FINDINGS and "(1770 in all)." in similar
    tables = {section.key: section.table for section in make_sections(facts) if section.table}
    first = 60 - MAX_EXPERTS
    assert [cell.sort for cell in tables["damage"].rows[0][1:]] == list(facts.interference.damage[first:])
    assert tables["similarity"].rows[0][2].sort == facts.interference.cosines[first][first + 1]
    assert tables["similarity"].headings[1] == tables["damage"].headings[1] == f"expert-{first}"


def test_text_of_many_experts_has_all_in_one_table(many: Store) -> None:
    text = render_markdown(Facts.of(many))
    assert max(line.count(" | ") for line in text.splitlines()) <= MAX_EXPERTS + 2
    assert all(f"| expert-{i} |" in text for i in range(MANY))
    assert f"The tables below show the last {MAX_EXPERTS} of {MANY} experts." in text


def test_json_of_many_experts_has_all(many: Store, done: Callable[..., str]) -> None:
    data = json.loads(done("report", many.path, "--format", "json"))
    assert len(data["experts"]) == len(data["survival"]["kept"]) == MANY
    assert len(data["findings"]) < 5 * MAX_FINDINGS


def test_inspect_of_many_lists_the_worst(tmp_path: Path, models: Path, done: Callable[..., str]) -> None:
    store = crowded(tmp_path / "ledger", models, Ledger(), 60)
    text = done("inspect", store.path, models / "giant")
    assert text.count("expert-") == 20 and "… and 41 more (--json lists all)" in text
    assert len(json.loads(done("inspect", store.path, models / "giant", "--json"))["cosines"]) == 60
