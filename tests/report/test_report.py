import json
import math
import re
import sys
from importlib.resources import files as package_files
from pathlib import Path

import pytest

from mergestream import Store
from mergestream.report import figures, pictures
from mergestream.report.facts import Facts
from mergestream.report.page import page
from tests.report.conftest import EXPERTS, make_store


def test_json_has_all_facts(scored: Store, done) -> None:
    data = json.loads(done("report", scored.path, "--format", "json"))
    assert [entry["name"] for entry in data["experts"]] == list(EXPERTS)
    last = data["experts"][-1]
    assert last["lambda"] == scored.history[-1].lambda_ and last["sqrt_t"] == math.sqrt(3)
    assert last["mean_norm"] == scored.history[-1].mean_norm and last["distance"] == scored.history[-1].distance
    assert data["similarity"]["cosines"] == [list(row) for row in scored.similarity().cosines]
    assert data["survival"]["kept"] == [list(row) for row in scored.survival().kept]
    assert data["layers"]["parts"] == list(scored.survival().by_layer().parts)
    assert data["scores"]["ACC"] == scored.scores.acc and data["scores"]["BWT"] == scored.scores.bwt
    assert {tensor["name"] for tensor in data["tensors"]} == set(scored.manifest.base.tensors)
    assert data["base"]["digest"] == scored.manifest.base.digest


def test_markdown_has_the_same_facts(scored: Store, done) -> None:
    text = done("report", scored.path, "--format", "md")
    for heading in ("## Experts", "## Cosine similarity", "## What survived", "## Scores (accuracy)", "## Commands"):
        assert heading in text
    assert f"| 3 | pets | {scored.history[2].added}" in text
    assert f"ACC {scored.scores.acc:.3f}, BWT −{-scored.scores.bwt:.3f} (below 0: forgotten since" in text
    assert scored.history[0].digest in text


def test_the_ending_of_the_file_decides_the_format(scored: Store, tmp_path: Path, done) -> None:
    for name, start in (("a.json", "{"), ("a.md", "# "), ("a.html", "<!doctype html>"), ("a", "<!doctype html>")):
        done("report", scored.path, "-o", tmp_path / name)
        assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)


def test_a_page_needs_a_place(scored: Store, mergestream) -> None:
    result = mergestream("report", scored.path)
    assert result.code == 2 and "-o report.html" in result.err


def test_the_same_store_gives_the_same_page(scored: Store) -> None:
    assert page(Facts.of(scored)) == page(Facts.of(Store(scored.path)))


def test_the_page_refers_to_nothing_outside(scored: Store) -> None:
    text = page(Facts.of(scored))
    without_plotly = re.sub(r"<script>/\*\*\n\* plotly\.js.*?</script>", "", text, flags=re.S)
    assert len(without_plotly) < len(text) / 4
    assert not re.search(r"https?://|src=|@import|url\(", without_plotly)


def test_the_commands_make_the_same_store_again(scored: Store, tmp_path: Path, mergestream) -> None:
    import shlex

    again = tmp_path / "again"
    for line in Facts.of(scored).commands:
        program, *arguments = shlex.split(line.replace(str(scored.path), str(again)))
        assert program == "mergestream"
        assert mergestream(*arguments).code == 0
    assert [entry.state for entry in Store(again).history] == [entry.state for entry in scored.history]


def test_the_commands_have_the_globs_as_they_were_given(tmp_path: Path, models: Path) -> None:
    globs = {"linear": ["pool*.weight", "embed*"], "not_linear": ["*.10.*"], "heads": ["none.in.the.base"]}
    store = make_store(tmp_path / "store", models, (), **globs)
    options = " --linear 'pool*.weight' --linear 'embed*' --not-linear '*.10.*' --heads none.in.the.base "
    assert options in Facts.of(store).commands[0]


def test_findings_name_what_deserves_a_look(tmp_path: Path, models: Path) -> None:
    store = make_store(tmp_path / "store", models, ("cars", "digits", "giant"))
    store.add(models / "cars", "cars-again", allow_duplicate=True)
    found = " ".join(Facts.of(store).findings())
    assert "giant is" in found and "times as large as the others" in found
    assert "cars-again and cars are similar (cosine 1.00)" in found


def test_forgetting_is_found_on_any_scale(store: Store) -> None:
    for scale in (1, 100):
        store.attach_scores(["cars", "digits"], [[0.9 * scale, 0], [0.7 * scale, 0.9 * scale]])
        assert (
            f"Tasks have lost {0.2 * scale:.3g} of accuracy in the mean since their experts came."
            in Facts.of(store).findings()
        )
        store.attach_scores(["cars", "digits"], [[0.9 * scale, 0], [0.89 * scale, 0.9 * scale]])
        assert not any("lost" in sentence for sentence in Facts.of(store).findings())


def test_nothing_to_find_in_an_ordinary_store(scored: Store) -> None:
    assert [sentence for sentence in Facts.of(scored).findings() if "lost" not in sentence] == []


def test_figures_are_objects_with_the_numbers(scored: Store) -> None:
    drawn = figures.scaling(scored.history)
    assert list(drawn.data[0].y) == [math.sqrt(t) for t in (1, 2, 3)]
    assert list(drawn.data[1].y) == [entry.lambda_ for entry in scored.history]
    heat = figures.similarity(scored.similarity()).data[0]
    assert heat.z[0][1] == scored.similarity().cosines[0][1] and heat.z[0][0] is None
    kept = figures.survival(scored.survival().by_layer()).data[0]
    assert kept.z[1][0] == pytest.approx(scored.history[1].kept)
    assert figures.scores(scored.scores).data[0].z[1][0] == 0.9


def test_a_store_of_hundreds_of_tensors_and_twenty_experts(tmp_path: Path, scored: Store) -> None:
    """The figures of a large store, from made-up numbers."""
    from mergestream.report.diagnostics import Similarity, Survival

    names = tuple(f"expert-{i}" for i in range(20))
    parts = tuple(f"model.layers.{i // 7}.part{i % 7}.weight" for i in range(350))
    row = tuple(0.5 + i / 1000 for i in range(350))
    large = Survival(names, parts, (row,) * 20, (row,) * 20, (tuple(range(350)),) * 20)
    assert len(figures.survival(large.by_layer()).data[0].x) == 52
    assert figures.short_names(parts)[0] == "0.part0.weight"
    assert len(figures.protected(large).data[0].x) == 350
    flat = Similarity(names, ((0.1,) * 20,) * 20)
    assert figures.similarity(flat).data[0].texttemplate is None


@pytest.mark.draws
def test_the_model_card_shows_pictures(scored: Store, tmp_path: Path) -> None:
    exported = scored.export(tmp_path / "merged")
    card = (exported / "README.md").read_text(encoding="utf-8")
    for name in ("lambda.png", "similarity.png"):
        assert f"]({name})" in card
        assert (exported / name).read_bytes().startswith(b"\x89PNG")


def test_pictures_are_figure_objects(scored: Store) -> None:
    factors = [entry.lambda_ for entry in scored.history]
    axes = pictures.scaling({"λ": factors}).axes[0]
    assert list(axes.lines[1].get_ydata()) == factors
    found = scored.similarity()
    image = pictures.similarity(found.experts, found.cosines).axes[0].images[0]
    assert image.get_array()[0, 1] == pytest.approx(found.cosines[0][1])


def test_a_chart_has_a_curve_and_a_band_for_each_name() -> None:
    axes = pictures.scaling({"a": [1.0, 1.4, 1.7], "b": [1.0, 1.3]}, {"a": [0.0, 0.1, 0.2]}).axes[0]
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"√t", "a", "b"}
    assert [len(container.lines[0].get_xdata()) for container in axes.containers] == [3, 2]


def test_cells_carry_their_values_in_a_colour_that_can_be_read() -> None:
    figure = pictures.heat_map([[0.0, 100.0], [None, -0.001]], ["r", "s"], ["a", "b"], (0, 100), ".0f", "percent")
    written = {text.get_text(): text.get_color() for text in figure.axes[0].texts}
    assert written == {"0": "white", "100": "black"} and len(figure.axes[0].texts) == 3


def test_without_matplotlib_the_card_has_no_pictures_and_a_note_says_so(
    scored: Store, tmp_path: Path, monkeypatch, mergestream
) -> None:
    monkeypatch.setitem(sys.modules, "mergestream.report.pictures", None)
    result = mergestream("export", scored.path, tmp_path / "merged")
    assert result.code == 0 and "the model card has no pictures" in result.err
    assert "![" not in (tmp_path / "merged/README.md").read_text()
    assert not list((tmp_path / "merged").glob("*.png"))


def test_without_plotly_the_page_says_what_to_install(scored: Store, tmp_path: Path, monkeypatch, mergestream) -> None:
    for name in ("figures", "plots", "page"):
        monkeypatch.delitem(sys.modules, f"mergestream.report.{name}")
    monkeypatch.delattr("mergestream.report.figures")
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    result = mergestream("report", scored.path, "-o", tmp_path / "report.html")
    assert result.code == 1 and "pip install 'mergestream[report]'" in result.err


STYLE = (package_files("mergestream.report") / "assets/style.css").read_text(encoding="utf-8")


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
