"""Hundreds of experts: what is drawn and embedded is bounded, and says so; what is listed has all."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mergestream import OPCM, Ledger, Store
from mergestream.report import diagnostics, pictures
from mergestream.report.diagnostics import MOST_SHOWN, MOST_TOLD, Similarity, choose
from mergestream.report.facts import Facts
from mergestream.report.markdown import markdown
from mergestream.report.page import page
from tests.report.conftest import EXPERTS

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
    store.manifest.save(store.path)
    return store


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Store:
    store = crowded(tmp_path_factory.mktemp("many") / "store", models, OPCM(alpha=0.5), MANY)
    tasks = [f"task-{i}" for i in range(60)]
    store.attach_scores(tasks, [[i / 60] * 60 for i in range(60)])
    return store


def embedded(text: str) -> dict[str, Any]:
    """The data of a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1])


def assert_bounded(text: str, count: int) -> None:
    """Nothing in the page grows by more than a few numbers with every expert."""
    for views in embedded(text)["figures"].values():
        for figure in views.values():
            assert figure["layout"]["height"] < 1200
            for trace in figure["data"]:
                assert len(trace.get("z", ())) <= MOST_SHOWN + 2
                assert len(trace["x"]) <= max(count, 50)
    assert len(embedded(text)["tensors"]["norm"]) == MOST_SHOWN
    assert text.count("<option") == MOST_SHOWN + 1
    assert text.count("<td") < 20 * count + 40 * MOST_SHOWN**2
    assert text.count('<span class="dot">') == count
    assert f"Of {count} experts {MOST_SHOWN} are shown" in text
    assert '<div class="scroll tall"><table class="sortable timeline"' in text and 'id="expert-search"' in text
    assert f"<details><summary>All {count + 1} commands</summary>" in text
    assert len(text) < 6_500_000


def test_a_page_of_many_experts_is_bounded(many: Store) -> None:
    text = page(Facts.of(many))
    assert_bounded(text, MANY)
    assert (
        "The last 24 steps and 24 tasks are shown." in text and "after step 60" in text and "after step 36" not in text
    )
    assert text.count("are similar (cosine") == MOST_TOLD and re.search(r"… and \d+ more of these\.", text)


def test_a_page_of_a_ledger_of_many_experts_is_bounded(tmp_path: Path, models: Path) -> None:
    store = crowded(tmp_path / "ledger", models, Ledger(), 60)
    facts = Facts.of(store)
    assert_bounded(page(facts), 60)
    few = facts.shown.ledger
    assert facts.ledger and few and few.experts == facts.shown.similarity.experts
    chosen = facts.shown_experts
    assert few.damage == tuple(facts.ledger.damage[i] for i in chosen)
    assert few.overlap[0][1] == facts.ledger.overlap[chosen[0]][chosen[1]]
    assert few.layer_partner == tuple(facts.ledger.layer_partner[i] for i in chosen)


def test_text_of_many_experts_has_all_in_one_table(many: Store) -> None:
    text = markdown(Facts.of(many))
    assert max(line.count(" | ") for line in text.splitlines()) <= MOST_SHOWN + 2
    assert all(f"| expert-{i} |" in text for i in range(MANY))
    assert f"Of {MANY} experts {MOST_SHOWN} are shown" in text


def test_json_of_many_experts_has_all(many: Store, done) -> None:
    data = json.loads(done("report", many.path, "--format", "json"))
    assert len(data["experts"]) == len(data["similarity"]["cosines"]) == len(data["similarity"]["cosines"][0]) == MANY
    assert len(data["findings"]) < 5 * MOST_TOLD


@pytest.mark.draws
def test_the_card_of_many_experts_has_a_picture_like_any_other(
    many: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.image import imread

    read = []
    monkeypatch.setattr(diagnostics, "read_sketch", lambda *place: read.append(place) or original(*place))
    out = many.export(tmp_path / "merged")
    card = (out / "README.md").read_text(encoding="utf-8")
    assert len(read) == MANY, "each sketch is read once"
    assert f"![Cosine similarity of {MOST_SHOWN} of the experts' task vectors](similarity.png)" in card
    assert all(f"| expert-{i} |" in card for i in range(MANY))
    assert max(imread(out / "similarity.png").shape) < 1800 and max(imread(out / "lambda.png").shape) < 800


original = diagnostics.read_sketch


def test_a_matrix_has_a_largest_size_and_so_many_names(tmp_path: Path) -> None:
    names = [f"task-{i}" for i in range(300)]
    figure = pictures.heat_map([[0.5] * 300] * 300, names, names, (0, 1), ".2f", "accuracy")
    assert max(figure.get_size_inches()) < 22
    assert len(figure.axes[0].get_xticklabels()) <= pictures.MOST_NAMED


def test_the_chosen_are_the_latest_the_closest_and_the_most_opposed() -> None:
    count = 100
    cosines = [[1.0 if i == j else 0.0 for j in range(count)] for i in range(count)]
    cosines[3][50] = cosines[50][3] = 0.9
    cosines[7][60] = cosines[60][7] = -0.8
    found = Similarity(tuple(map(str, range(count))), tuple(map(tuple, cosines)))
    chosen = found.chosen([42, *(i for i in range(count) if i != 42)])
    assert len(chosen) == MOST_SHOWN and sorted(chosen) == list(chosen)
    assert {3, 50, 7, 60, 42, 99, 98, 97} <= set(chosen)
    assert found.of_experts(chosen).cosines[0][0] == cosines[chosen[0]][chosen[0]]
    assert choose(range(MOST_SHOWN), []) == tuple(range(MOST_SHOWN))


def test_inspect_lists_the_closest_of_many(many: Store, models: Path, done) -> None:
    text = done("inspect", many.path, models / "giant")
    assert text.count("expert-") == 20 and f"… and {MANY - 20} more (--json lists all)" in text
    assert len(json.loads(done("inspect", many.path, models / "giant", "--json"))["cosines"]) == MANY
