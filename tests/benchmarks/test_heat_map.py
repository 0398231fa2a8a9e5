"""Matrices as figures."""

from __future__ import annotations

import warnings
from pathlib import Path

from benchmarks.figures import save
from benchmarks.heat_map import MAX_TICKS, heat_map


def test_a_matrix_has_a_largest_size_and_so_many_names() -> None:
    names = [f"task-{i}" for i in range(300)]
    figure = heat_map([[0.5] * 300] * 300, names, names, (0, 1), ".2f", "accuracy")
    assert max(figure.get_size_inches()) < 22
    assert len(figure.axes[0].get_xticklabels()) <= MAX_TICKS


def test_cells_carry_their_values_in_a_colour_that_can_be_read() -> None:
    figure = heat_map([[0.0, 100.0], [None, -0.001]], ["r", "s"], ["a", "b"], (0, 100), ".0f", "percent")
    written = {text.get_text(): text.get_color() for text in figure.axes[0].texts}
    assert written == {"0": "white", "100": "black"} and len(figure.axes[0].texts) == 3


def test_matrices_write_formulas_as_text_and_say_nothing(tmp_path: Path) -> None:
    names = ("$\\frac$", "$$", "\\$x$", "名前", "x" * 500)
    figure = heat_map([[0.1] * 5] * 5, names, names, (0, 1), ".2f", "accuracy", title="$\\sum$")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(figure, tmp_path, "heat")
    from matplotlib.image import imread

    assert max(imread(tmp_path / "heat.png").shape) < 1000
