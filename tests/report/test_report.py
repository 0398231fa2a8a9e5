from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from importlib.resources import files as package_files
from pathlib import Path

import pytest

from mergestream import Store
from mergestream.report.facts import Facts
from mergestream.report.render import render_html, render_markdown
from mergestream.report.sections import make_sections
from mergestream.report.tables import short_name
from mergestream.report.verdict import next_step
from tests.report.conftest import EXPERTS, known, make_ledger, make_store


def test_json_has_all_facts(scored: Store, done: Callable[..., str]) -> None:
    data = json.loads(done("report", scored.path, "--format", "json"))
    assert [entry["name"] for entry in data["experts"]] == list(EXPERTS)
    last = data["experts"][-1]
    assert last["lambda"] == scored.history[-1].lambda_
    assert last["mean_norm"] == scored.history[-1].mean_norm and last["distance"] == scored.history[-1].distance
    assert data["survival"]["kept"] == [list(row) for row in scored.survival().kept]
    assert data["layers"]["parts"] == list(scored.survival().by_layer().parts)
    assert scored.scores
    assert data["scores"]["ACC"] == scored.scores.acc and data["scores"]["BWT"] == scored.scores.bwt
    assert {tensor["name"] for tensor in data["tensors"]} == set(scored.manifest.base.tensors)
    assert data["base"]["digest"] == scored.manifest.base.digest


def test_markdown_has_the_same_facts(scored: Store, done: Callable[..., str]) -> None:
    text = done("report", scored.path, "--format", "md")
    for heading in ("## Experts", "## Share kept", "## Scores (accuracy)"):
        assert heading in text
    assert f"| pets | 3 | {scored.history[2].added[:10]}" in text
    assert scored.scores
    acc, bwt = known((scored.scores.acc, scored.scores.bwt))
    assert f"ACC {acc:.3f} is the mean" in text and f"BWT −{-bwt:.3f} is the mean" in text
    assert "(below 0: earlier tasks were forgotten)" in text
    assert scored.manifest.base.digest in text and "digest |" not in text


def test_the_page_and_the_text_have_the_same_sections(scored: Store) -> None:
    facts = Facts.of(scored)
    page, text = render_html(facts), render_markdown(facts)
    titles = re.findall(r"^## (.*)$", text, flags=re.M)
    assert len(titles) >= 5
    for title in titles:
        assert f"<h2>{title}</h2>" in page
    for row in re.findall(r"^\| (.*) \|$", text, flags=re.M):
        for cell in row.split(" | "):
            assert cell.partition(" (")[0] in page


def test_names_of_25_characters_are_whole_and_wrap_in_their_cells(tmp_path: Path, models: Path) -> None:
    """Nothing in the table of experts has a fixed width or position: no column can be printed over the next."""
    store = Store.create(tmp_path / "store", models / "base")
    for name in EXPERTS:
        store.add(models / name, f"{name}-{'x' * (24 - len(name))}")
    text = render_html(Facts.of(store))
    table = text[text.index('id="expert-table"') : text.index('id="similarity"')]
    assert all(table.count(entry.name) >= 2 for entry in store.history) and "digest" not in table
    rules = [rule for rule in STYLE.split("}") if "expert-table" in rule and "thead" not in rule]
    assert any("overflow-wrap: anywhere" in rule and "white-space: normal" in rule for rule in rules)
    assert not any(re.search(r"[{;\s](width|position: absolute|max-width|overflow: visible)\b", rule) for rule in rules)


def test_long_names_are_shortened_in_one_way_everywhere(tmp_path: Path, models: Path) -> None:
    name = "an-expert-" + 40 * "x" + "-of-a-long-name"
    store = make_store(tmp_path / "store", models, ("cars",))
    store.add(models / "giant", name)
    store.attach_scores(["cars", name], [[1, 1], [1, 0.5]], experts=[1, 1])
    facts = Facts.of(store)
    page, text, short = render_html(facts), render_markdown(facts), short_name(name)
    body = re.sub(r'<(script|style).*?</\1>|(title|data-sort|data-text)="[^"]*"|<code>.*?</code>', "", page, flags=re.S)
    assert name not in body and body.count(short) >= 6
    assert name not in text.replace(next_step(facts).command, "") and text.count(short) >= 6


def test_the_ending_of_the_file_decides_the_format(scored: Store, tmp_path: Path, done: Callable[..., str]) -> None:
    for name, start in (("a.json", "{"), ("a.md", "# "), ("a.html", "<!doctype html>")):
        done("report", scored.path, "-o", tmp_path / name)
        assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)
    done("report", scored.path, "-o", tmp_path / "a", "--format", "md")
    assert (tmp_path / "a").read_text(encoding="utf-8").startswith("# ")


def test_the_page_goes_beside_the_store_by_default(
    store: Store, done: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = store.path.with_name("store-report.html")
    for given in (store.path, f"{store.path}/"):
        assert f"{beside}: report on" in done("report", given)
        assert beside.read_text(encoding="utf-8").startswith("<!doctype html>")
        beside.unlink()
    monkeypatch.chdir(store.path)
    done("report", ".")
    assert beside.is_file()


def test_the_same_store_gives_the_same_page(scored: Store) -> None:
    assert render_html(Facts.of(scored)) == render_html(Facts.of(Store(scored.path)))


def test_the_page_refers_to_nothing_outside(scored: Store) -> None:
    text = render_html(Facts.of(scored))
    assert len(text) < 2_000_000
    assert not re.search(r"https?://|src=|@import|url\((?!#)", text)


def test_the_page_allows_its_own_script_only(scored: Store) -> None:
    text = render_html(Facts.of(scored))
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', text)
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.S)
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assert policy and f"default-src 'none'; script-src 'sha256-{digest}';" in policy[1]


def test_findings_name_what_deserves_a_look(tmp_path: Path, models: Path) -> None:
    store = make_ledger(tmp_path / "store", models, ("cars", "digits", "giant"), budget=8.0)
    store.add(models / "cars", "cars-again", allow_duplicate=True)
    found = " ".join(Facts.of(store).findings())
    assert "giant: the task vector of " in found and "outweighs them." in found
    assert "Similar experts (cosine): cars and cars-again (1.00)" in found


def test_forgetting_is_found_on_any_scale(store: Store) -> None:
    for scale in (1, 100):
        store.attach_scores(["cars", "digits"], [[0.9 * scale, 0], [0.7 * scale, 0.9 * scale]])
        assert (
            f"Tasks have lost {0.2 * scale:.3g} of accuracy on average since their experts were added."
            in Facts.of(store).findings()
        )
        store.attach_scores(["cars", "digits"], [[0.9 * scale, 0], [0.89 * scale, 0.9 * scale]])
        assert not any("lost" in sentence for sentence in Facts.of(store).findings())


def test_nothing_to_find_in_an_ordinary_store(scored: Store) -> None:
    assert [sentence for sentence in Facts.of(scored).findings() if "lost" not in sentence] == []


def test_matrices_are_tables_with_the_numbers(scored: Store) -> None:
    sections = {section.key: section for section in make_sections(Facts.of(scored))}
    kept = sections["shares"].table
    assert kept and [cell.sort for cell in kept.rows[0]][1:] == pytest.approx([e.kept for e in scored.history])
    scores = sections["scores"].table
    assert scores and [row[0].text for row in scores.rows[:2]] == ["base", "after step 1"]
    assert scores.rows[1][1].sort == 0.9


def test_the_model_card_has_no_picture(scored: Store, tmp_path: Path) -> None:
    exported = scored.export(tmp_path / "merged")
    assert not list(exported.glob("*.png")) and "![" not in (exported / "README.md").read_text(encoding="utf-8")


def test_the_cosines_of_a_ledger_are_a_table(ledger: Store, done: Callable[..., str]) -> None:
    cosines = ledger.similarity().cosines
    data = json.loads(done("report", ledger.path, "--format", "json"))
    assert data["similarity"] == {"experts": list(EXPERTS), "cosines": [list(row) for row in cosines]}
    (pairs,) = (section.table for section in make_sections(Facts.of(ledger)) if section.key == "similarity")
    assert pairs and pairs.rows[0][2].sort == cosines[0][1]
    assert pairs.rows[0][1].shade is None and max(abs(cell.shade or 0) for cell in pairs.rows[0][1:]) <= 1
    (experts,) = (section.table for section in make_sections(Facts.of(ledger)) if section.key == "experts")
    most = max((known([value])[0], name) for value, name in zip(cosines[0][1:], EXPERTS[1:], strict=True))
    assert experts and experts.rows[0][experts.headings.index("most similar")].sort == most[0]
    assert "## Similarity of the experts" in done("report", ledger.path, "--format", "md")


STYLE = (package_files("mergestream.report") / "templates/style.css").read_text(encoding="utf-8")


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize(
    ("text", "ground"),
    [("ink", "page"), ("ink", "card"), ("soft", "page"), ("soft", "card"), ("accent", "card"), ("warn", "warn-soft")],
)
def test_colours_are_readable(theme: int, text: str, ground: str) -> None:
    """WCAG AA asks for a contrast of 4.5."""
    block = STYLE.split("}")[theme]
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", block))

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dim = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
    assert (bright + 0.05) / (dim + 0.05) >= 4.5
