"""The tables of the proofs, from results as ``bench`` leaves them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import ledger_results
from mergestream.evaluation.results import Results, Run

TASKS = ["topic", "sort"]


def run(method: str, seed: int, topic: float, sort: float) -> Run:
    order = TASKS if seed == 0 else TASKS[::-1]
    steps = [{"task": task, "accuracies": {}, "state_bytes": 10, "absorb_seconds": 1.0} for task in order]
    steps[-1] |= {"accuracies": {"topic": topic, "sort": sort}, "beside": {"perplexity": 40.0}}
    return Run(method, seed, order, steps)


def results(*runs: Run) -> Results:
    return Results(
        "language",
        "model",
        TASKS,
        {"topic": 0.3, "sort": 0.0},
        {"topic": 0.9, "sort": 1.0},
        list(runs),
        100,
        {"protocol": {"choices": {"topic": 4}}},
        {"perplexity": 33.0},
    )


@pytest.fixture
def tables(tmp_path: Path) -> str:
    first = results(run("average", 0, 0.5, 0.1), run("opcm", 0, 0.6, 0.2), run("opcm", 1, 0.8, 0.4))
    first.save(tmp_path / "language-2")
    assert ledger_results.main([str(tmp_path)]) == 0
    return (tmp_path / "tables.md").read_text()


def section(text: str, title: str) -> dict[str, str]:
    lines = text.partition(f"## {title}")[2].partition("\n## ")[0].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return {first.strip(): last.strip() for first, last in rows}


def test_means_over_all_tasks_and_over_each_kind(tables: str) -> None:
    assert section(tables, "ACC (%): the mean") | {"": ""} == {
        "": "",
        "---": "---",
        "base": "15.0",
        "experts": "95.0",
        "average": "30.0",
        "OPCM (reference)": "50.0±14.1 (2)",
    }
    choices, written = section(tables, "ACC of the tasks with"), section(tables, "ACC of the tasks that are written")
    assert (choices["experts"], choices["average"], choices["OPCM (reference)"]) == ("90.0", "50.0", "70.0±14.1 (2)")
    assert (written["experts"], written["average"], written["OPCM (reference)"]) == ("100.0", "10.0", "30.0±14.1 (2)")


def test_perplexity_stands_beside(tables: str) -> None:
    assert section(tables, "Perplexity")["base"] == "33.00"
    assert section(tables, "Perplexity")["average"].startswith("40")


def test_more_orders_are_counted_once(tmp_path: Path) -> None:
    results(run("opcm", 0, 0.6, 0.2)).save(tmp_path / "language-2")
    more = results(run("opcm", 0, 0.6, 0.2), run("opcm", 1, 0.8, 0.4), run("ties", 0, 0.3, 0.1))
    more.save(tmp_path / "language-2" / "orders-2")
    assert ledger_results.main([str(tmp_path)]) == 0
    accuracies = section((tmp_path / "tables.md").read_text(), "ACC (%): the mean")
    assert (accuracies["OPCM (reference)"], accuracies["TIES, continual"]) == ("50.0±14.1 (2)", "20.0")


def test_what_was_forgotten_is_of_streams_of_its_own(tmp_path: Path) -> None:
    results(run("opcm", 0, 0.6, 0.2)).save(tmp_path / "language-2")
    stream = run("opcm", 0, 0.5, 0.2)
    stream.steps[0]["accuracies"] = {"topic": 0.8, "sort": 0.1}
    results(stream).save(tmp_path / "language-2" / "forgetting")
    assert ledger_results.main([str(tmp_path)]) == 0
    tables = (tmp_path / "tables.md").read_text()
    assert section(tables, "ACC (%): the mean")["OPCM (reference)"] == "40.0"
    assert section(tables, "BWT (points)")["OPCM (reference)"] == "-30.0"
    assert section(tables, "Retention (points)")["OPCM (reference)"] == "10.0"


def test_what_was_forgotten_may_be_of_more_methods_in_fewer_orders(tmp_path: Path) -> None:
    results(run("opcm", 0, 0.6, 0.2)).save(tmp_path / "language-2")
    for place, method in (("forgetting", "opcm"), ("forgetting/orders-1", "magmax")):
        stream = run(method, 0, 0.5, 0.2)
        stream.steps[0]["accuracies"] = {"topic": 0.8}
        results(stream).save(tmp_path / "language-2" / place)
    assert ledger_results.main([str(tmp_path)]) == 0
    lost = section((tmp_path / "tables.md").read_text(), "BWT (points)")
    assert (lost["OPCM (reference)"], lost["MagMax"]) == ("-30.0", "-30.0")


def test_nothing_is_said_of_what_was_not_measured(tables: str) -> None:
    assert "BWT" not in tables and "Retention" not in tables


def test_a_directory_without_results_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        ledger_results.main([str(tmp_path / "nowhere")])
    assert stopped.value.code == 2
    assert "nowhere has no SUITE-TASKS/results.json" in capsys.readouterr().err
