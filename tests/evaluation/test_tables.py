"""Tables in the paper's layout, and the paper's numbers beside ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mergestream.errors import MergestreamError
from mergestream.evaluation.results import Results, Run, Spread
from mergestream.evaluation.tables import per_task_table, plain, table1


def results(model: str = "some model", tasks: tuple[str, ...] = ("a", "b")) -> Results:
    def run(method: str, seed: int, order: list[str], values: list[list[float]]) -> Run:
        steps = [
            {"task": task, "accuracies": dict(zip(order, row, strict=True)), "lambda": 1.0, "state_bytes": 10}
            for task, row in zip(order, values, strict=True)
        ]
        return Run(method, seed, order, steps)

    a, b = tasks[:2]
    return Results(
        suite="test",
        model=model,
        tasks=[a, b],
        pretrained={a: 0.4, b: 0.5},
        fine_tuned={a: 0.9, b: 1.0},
        runs=[
            run("average", 0, [a, b], [[0.8, 0.5], [0.6, 0.7]]),
            run("average", 1, [b, a], [[0.9, 0.4], [0.7, 0.6]]),
            run("opcm", 0, [a, b], [[0.9, 0.6], [0.8, 0.8]]),
            run("opcm", 1, [b, a], [[1.0, 0.5], [0.7, 0.7]]),
        ],
        model_bytes=100,
        settings={"orders": 2},
    )


def test_table1_has_the_papers_blocks() -> None:
    table = table1(results())
    rows = [list(row) for row in table.rows]
    assert table.header == ("", "Method", "some model, 2 tasks")
    assert rows[:2] == [["", "Pre-Trained", "45.0"], ["", "Fine-Tuned", "95.0"]]
    assert ["ACC↑", "Average (SWA)", "65.0±0.0"] in rows
    assert ["ACC↑", "OPCM", "75.0±7.1"] in rows
    assert ["BWT↑", "Average (SWA)", "-20.0±0.0"] in rows
    assert ["BWT↑", "OPCM", "-20.0±14.1"] in rows


def test_the_best_stands_out_in_markdown() -> None:
    assert "| ACC↑ | OPCM | **75.0±7.1** |" in table1(results()).markdown()
    lines = per_task_table(results()).markdown().splitlines()
    assert "| OPCM | **75.0** | **75.0** | **75.0** |" in lines and "| Average (SWA) | 60.0 | 70.0 | 65.0 |" in lines


def test_numbers_of_any_size_can_be_read() -> None:
    assert plain(None) == "–" and plain(Spread(33.284, None, 1)) == "33.28"
    assert plain(Spread(69.218, 2.376, 3)) == "69.22±2.38"
    assert plain(Spread(46835309.76, 1e5, 3)) == "4.7e+07±1.0e+05"


def test_the_per_task_table_ends_with_the_mean() -> None:
    table = per_task_table(results())
    assert table.header == ("Model", "a", "b", "mean")
    assert table.rows[2:] == [("Average (SWA)", "60.0", "70.0", "65.0"), ("OPCM", "75.0", "75.0", "75.0")]


def test_results_survive_being_written(tmp_path: Path) -> None:
    first = results()
    first.save(tmp_path)
    assert Results.load(tmp_path) == first


def test_another_file_of_that_name_is_one_sentence(tmp_path: Path) -> None:
    results().save(tmp_path)
    saved = json.loads((tmp_path / "results.json").read_text())
    (run, *_) = saved["runs"]
    wrong: list[dict[str, Any]] = [{"runs": [{**run, key: value}]} for key in run for value in (None, [[1]])]
    wrong += [{key: value} for key, value in (("digests", None), ("tasks", 3), ("beside", [1]), ("model_bytes", "x"))]
    changed = [json.dumps({**saved, **fields}) for fields in wrong]
    for content in ('{"machine": {}}', "[]", "{", '{"summary": {}, "runs": [1]}', *changed):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(MergestreamError, match="was not written by mergestream bench"):
            Results.load(tmp_path)
