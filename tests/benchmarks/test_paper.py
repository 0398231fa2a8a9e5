"""The paper's numbers beside ours, and its figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import paper
from benchmarks.paper import table1_value, table_beside_paper
from tests.evaluation.test_tables import results


def test_the_papers_numbers_are_in_the_checkout() -> None:
    assert table1_value("acc", "OPCM", "ViT-B/32", 8) == (75.5, 0.5)
    assert table1_value("bwt", "C. Ties-Merging", "ViT-L/14", 20) == (-2.9, 1.0)
    assert table1_value("acc", "OPCM", "ViT-B/32", 9) is None
    assert len(paper.paper_results()["table1"]) == 99


def test_the_papers_numbers_stand_beside_its_own_suite() -> None:
    table = table_beside_paper(replace(results("ViT-B/32"), tasks=[f"t{i}" for i in range(8)]))
    assert table.header[-1] == "paper (not ours)"
    assert ("ACC↑", "OPCM", "75.0±7.1", "75.5±0.5") in table.rows
    assert ("ACC↑", "OPCM", "75.0±7.1", "–") in table_beside_paper(results()).rows


def test_the_papers_figures_are_drawn(tmp_path: Path) -> None:
    results().save(tmp_path)
    paper.main([str(tmp_path)])
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {
        "accuracy-over-tasks.png",
        "accuracy-matrices-average.png",
        "accuracy-matrices-opcm.png",
        "lambda.png",
    }
    assert "paper (not ours)" in (tmp_path / "paper.md").read_text()


def test_a_sweep_is_drawn_from_its_rows() -> None:
    ours = results()
    methods = {"average": "opcm:alpha=0.2:projection=paper", "opcm": "opcm:alpha=0.4:projection=paper"}
    swept = replace(ours, runs=[replace(run, method=methods[run.method]) for run in ours.runs])
    (axes,) = paper.sweep(swept, "alpha").axes
    (line,) = axes.get_lines()[:1]
    assert np.asarray(line.get_xydata()).ravel().tolist() == pytest.approx([0.2, 65.0, 0.4, 75.0])
    assert axes.get_legend_handles_labels()[1] == ["OPCM, projection paper"]
