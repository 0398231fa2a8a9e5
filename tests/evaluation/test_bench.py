"""The benchmark end to end on a suite of tiny tasks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from safetensors.torch import load_file, save_file

from mergestream import Store
from mergestream.cli import main
from mergestream.cli.parser import parse
from mergestream.errors import MergestreamError, UsageError
from mergestream.evaluation import bench as benchmark
from mergestream.evaluation.bench import Plan, run_bench
from mergestream.evaluation.results import Results
from mergestream.evaluation.rows import Row, parse_rows
from mergestream.evaluation.streams import Stream, run_streams
from mergestream.evaluation.suites import open_suite
from tests.conftest import files


def bench(suite: Path, output: Path, *options: str) -> None:
    words = ["bench", str(suite), "--workers", "1", *options, "-o", str(output)]
    command = parse(words)
    with patch.object(sys, "argv", ["mergestream", *words]):
        command.run()


def silent(*_: object) -> None:
    pass


def test_results_do_not_go_into_the_models_or_a_store(tiny_suite: Path, tmp_path: Path) -> None:
    place = tiny_suite.parent
    store = Store.create(tmp_path / "store", place / "base").path
    before = files(place), files(store)
    for output in (place / "base", place / "experts" / "red" / "results", store, store / "results"):
        with pytest.raises(MergestreamError, match="choose another place"):
            bench(tiny_suite, output, "--methods", "opcm")
    assert (files(place), files(store)) == before


@pytest.mark.slow
def test_one_command_writes_results_tables_and_figures(
    tiny_suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    bench(tiny_suite, output, "--methods", "opcm,average", "--orders", "2", "--workers", "2")
    written = {path.name for path in output.iterdir() if path.stat().st_size}
    assert written == {"results.json", "table1.md", "per-task.md"}
    table = (output / "table1.md").read_text()
    assert "| ACC↑ | Average (SWA) |" in table and "Pre-Trained" in table and "Fine-Tuned" in table
    results = Results.load(output)
    assert set(results.fine_tuned.values()) == {1.0}
    assert len(results.runs) == 4
    assert results.settings["seeds"] == [0, 1]
    assert "--methods opcm,average" in results.settings["command"]
    assert "table1" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_results(
    tiny_suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = parse_rows("opcm")
    found = []
    for attempt in ("a", "b"):
        monkeypatch.setenv("MERGESTREAM_CACHE", str(tmp_path / attempt))  # nothing is taken from the first attempt
        found.append(
            run_bench(open_suite(tiny_suite), Plan(rows, orders=2, workers=1), tmp_path / f"out-{attempt}", silent)
        )
    first, second = ([(run.method, run.order, run.matrix) for run in results.runs] for results in found)
    assert first == second
    other = run_bench(open_suite(tiny_suite), Plan(rows, orders=2, seed=7, workers=1), tmp_path / "out-c", silent)
    assert [run.order for run in other.runs] != [run.order for run in found[0].runs]


def test_nothing_is_scored_twice(tiny_suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[tuple[str, str]] = []
    suite = open_suite(tiny_suite)
    accuracy = type(suite).accuracy

    def noting(self: Any, model: Any, task: Any) -> Any:
        scored.append(task)
        return accuracy(self, model, task)

    monkeypatch.setattr(type(suite), "accuracy", noting)
    plan = Plan(parse_rows("ledger"), orders=4, workers=1)
    run_bench(suite, plan, tmp_path / "out", silent)
    # base and experts: 6; the last model of all orders is one: 3; the first order: 6; the others by diagonal
    assert len(scored) <= 6 + 3 + 6 + 2 * 3
    count = len(scored)
    run_bench(suite, plan, tmp_path / "out", silent)
    run_bench(suite, plan, tmp_path / "elsewhere", silent)
    assert len(scored) == count


def test_a_ledger_ends_at_the_same_accuracy_in_every_order(tiny_suite: Path, tmp_path: Path) -> None:
    plan = Plan(parse_rows("ledger"), orders=3, workers=1)
    results = run_bench(open_suite(tiny_suite), plan, tmp_path / "out", silent)
    assert len({tuple(sorted(run.final.items())) for run in results.runs}) == 1
    assert results.summary()["ledger"]["acc"]["std"] == 0


def test_only_what_acc_and_bwt_need_is_scored_beyond_the_first_order(tiny_suite: Path, tmp_path: Path) -> None:
    plan = Plan(parse_rows("opcm"), orders=2, workers=1)
    results = run_bench(open_suite(tiny_suite), plan, tmp_path / "out", silent)
    full, ends = (run.matrix for run in results.runs)
    assert all(value is not None for row in full for value in row)
    assert [[value is not None for value in row] for row in ends] == [[1, 0, 0], [0, 1, 0], [1, 1, 1]]
    assert results.summary()["opcm"]["bwt"]["count"] == 2


def test_the_last_model_alone_is_enough_for_acc(tiny_suite: Path, tmp_path: Path) -> None:
    options = ("--methods", "opcm", "--orders", "2")
    bench(tiny_suite, tmp_path / "last", *options, "--last-only")
    bench(tiny_suite, tmp_path / "all", *options)
    last, every = (Results.load(tmp_path / name).summary()["opcm"] for name in ("last", "all"))
    assert last["acc"] == every["acc"] and last["worst"] == every["worst"]
    assert last["bwt"] is None and every["bwt"] is not None
    assert Results.load(tmp_path / "last").settings["command"].endswith("--last-only -o " + str(tmp_path / "last"))


def test_an_interrupted_benchmark_continues_with_the_streams_that_are_missing(
    tiny_suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, plan = open_suite(tiny_suite), Plan(parse_rows("opcm,ema"), orders=2, workers=1)
    whole = run_bench(suite, plan, tmp_path / "whole", silent)

    def interrupt_second_stream(what: str, done: int, total: int) -> None:
        if what == "streams" and done == 2:
            raise KeyboardInterrupt

    monkeypatch.setenv("MERGESTREAM_CACHE", str(tmp_path / "second-cache"))
    with pytest.raises(KeyboardInterrupt):
        run_bench(suite, plan, tmp_path / "cut", interrupt_second_stream)
    assert len(Results.load(tmp_path / "cut").runs) == 1
    reported = []
    resumed = run_bench(suite, plan, tmp_path / "cut", lambda *event: reported.append(event))
    assert ("streams", 3, 3) in reported, "one of four streams was kept"
    assert not any(what.startswith("scoring") for what, _, _ in reported)
    for ours, theirs in zip(resumed.runs, whole.runs, strict=True):
        assert (ours.method, ours.order, ours.matrix) == (theirs.method, theirs.order, theirs.matrix)
        assert [step["lambda"] for step in ours.steps] == [step["lambda"] for step in theirs.steps]
    assert not (tmp_path / "cut" / "work").exists()


def test_a_run_goes_on_from_the_results_of_the_same_models(
    tiny_suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results that were committed elsewhere need neither a cache nor the old files' times."""
    first = run_bench(open_suite(tiny_suite), Plan(parse_rows("average"), orders=2, workers=1), tmp_path, silent)
    monkeypatch.setenv("MERGESTREAM_CACHE", str(tmp_path / "second-cache"))
    for path in (*tiny_suite.parent.rglob("*.safetensors"),):
        os.utime(path, (0, 0))
    reported = []
    plan = Plan(parse_rows("opcm"), orders=1, workers=1)
    second = run_bench(open_suite(tiny_suite), plan, tmp_path, lambda *event: reported.append(event))
    assert [run.method for run in second.runs] == ["opcm", "average", "average"]
    assert second.runs[1:] == first.runs and second.pretrained == first.pretrained
    assert ("streams", 1, 1) in reported

    expert = open_suite(tiny_suite).expert("red") / "model.safetensors"
    changed = {name: 0.5 * tensor for name, tensor in load_file(expert).items()}
    save_file(changed, expert, metadata={"format": "pt"})
    third = run_bench(open_suite(tiny_suite), plan, tmp_path, silent)
    assert [run.method for run in third.runs] == ["opcm"], "another expert: nothing is kept"
    assert third.digests["experts"]["red"] != second.digests["experts"]["red"]
    assert third.digests["base"] == second.digests["base"]


def test_more_of_the_matrix_is_measured_if_it_is_asked_for(tiny_suite: Path, tmp_path: Path) -> None:
    rows = parse_rows("opcm")
    run_bench(open_suite(tiny_suite), Plan(rows, orders=1, last_only=True, workers=1), tmp_path, silent)
    (whole,) = run_bench(open_suite(tiny_suite), Plan(rows, orders=1, workers=1), tmp_path, silent).runs
    assert all(value is not None for row in whole.matrix for value in row)
    reported = []
    plan = Plan(rows, orders=1, last_only=True, workers=1)
    (kept,) = run_bench(open_suite(tiny_suite), plan, tmp_path, lambda *event: reported.append(event)).runs
    assert kept == whole and ("streams", 0, 0) in reported


def test_rows_that_differ_in_the_readout_alone_share_a_store(tiny_suite: Path, tmp_path: Path) -> None:
    rows = parse_rows("ledger@tsv,opcm,ledger,opcm@iso,ledger@expert")
    reported = []
    plan = Plan(rows, orders=2, workers=1)
    together = run_bench(open_suite(tiny_suite), plan, tmp_path / "together", lambda *event: reported.append(event))
    assert ("streams", 4, 4) in reported, "two methods in two orders"
    for row in rows:
        plan = Plan([row], orders=2, workers=1)
        alone = run_bench(open_suite(tiny_suite), plan, tmp_path / row.key, silent)
        assert [run.matrix for run in alone.runs] == [run.matrix for run in together.methods[row.key]], row.key


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_a_killed_benchmark_is_finished_by_the_same_command(tiny_suite: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    options = ("--methods", "opcm,ema", "--orders", "3")
    command = [sys.executable, "-m", "mergestream", "bench", str(tiny_suite), "-o", str(output), *options]
    command += ["--workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not (output / "results.json").exists() and process.poll() is None:
        time.sleep(0.01)
    workers = children(process.pid)
    process.kill()  # the workers are told nothing, and must not go on at the next run's files
    process.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "the workers outlive the benchmark"
        time.sleep(0.05)
    finished = Results.load(output).runs
    assert workers and 0 < len(finished) < 6
    bench(tiny_suite, output, *options)
    runs = Results.load(output).runs
    assert len(runs) == 6 and all(run in runs for run in finished), "with their seconds: they were not run again"


def test_wrong_requests_are_told_before_any_work() -> None:
    for text in ("opcm:alpha", "nothing", "opcm:colour=red", "", "opcm:alpha=3"):
        with pytest.raises(UsageError):
            parse_rows(text)


def test_all_stands_for_every_method() -> None:
    from mergestream.methods import METHODS

    assert {row.name for row in parse_rows("all")} == {*METHODS}


def test_all_rows_are_run(tiny_suite: Path, tmp_path: Path, done: Callable[..., str]) -> None:
    words = ("bench", tiny_suite, "-o", tmp_path / "out", "--orders", 1, "--tasks", 2, "--workers", 1)
    told = json.loads(done(*words, "--methods", "all", "--json"))
    assert told["output"] == str(tmp_path / "out") and told["notes"] == []
    assert {"opcm", "average"} <= told["summary"].keys() and "results.json" in told["files"]


@pytest.mark.parametrize(
    ("option", "value"),
    [("--orders", "0"), ("--tasks", "0"), ("--tasks", "1"), ("--test-limit", "0"), ("--workers", "0"),
     ("--orders", "many")],
)  # fmt: skip
def test_a_number_that_makes_no_sense_is_wrong_usage(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "vision", "-o", str(tmp_path / "out"), option, value]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: argument {option}: ") and value in line


def test_a_log_has_a_line_for_what_is_finished_and_one_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_progress = benchmark.progress_lines()
    on_progress("streams", 1, 4)
    monkeypatch.setattr(benchmark, "QUIET_SECONDS", 0)
    on_progress("streams", 2, 4)
    monkeypatch.setattr(benchmark, "QUIET_SECONDS", 60)
    on_progress("streams", 3, 4)
    on_progress("streams", 4, 4)
    assert capsys.readouterr().err.splitlines() == ["streams: 2 of 4", "streams: 4 of 4"]


def test_rows_choose_a_readout() -> None:
    rows = {row.key: row for row in parse_rows("opcm:alpha=0.3@iso,ledger@agree,ledger@expert,ledger")}
    assert list(rows) == ["opcm:alpha=0.3@iso", "ledger@agree", "ledger@expert", "ledger"]
    assert rows["ledger@agree"].readout_for("red") == "agree"
    assert rows["ledger@expert"].readout_for("red") == "expert:red"
    assert rows["ledger"].readout_for("red") is None
    assert rows["opcm:alpha=0.3@iso"].label == "OPCM, alpha 0.3, readout iso"
    for wrong in ("ties@iso", "ledger@plain", "average@agree", "ledger@agre", "ledger@agree+balance"):
        with pytest.raises(UsageError):
            parse_rows(wrong)


def test_experts_are_read_back_each_on_its_own_task(tiny_suite: Path, tmp_path: Path) -> None:
    rows = parse_rows("ledger:budget=8:entries=float32@expert,ledger:budget=8,average@iso")
    results = run_bench(open_suite(tiny_suite), Plan(rows, orders=1, workers=1), tmp_path / "out", silent)
    back, merged, iso = results.runs
    assert back.final == {"red": 1.0, "green": 1.0, "blue": 1.0}, "the budget holds everything"
    for step, arrived in enumerate(back.order):
        assert (
            set(back.steps[step]["accuracies"]) == set(back.order[: step + 1]) and arrived in back.steps[step]["task"]
        )
    assert merged.final != back.final and len(merged.steps[0]["accuracies"]) == 3
    assert merged.steps[-1]["export_seconds"] > 0 and iso.final.keys() == back.final.keys()


def test_the_last_model_of_a_method_that_does_not_mind_the_order_is_made_once(tiny_suite: Path) -> None:
    plan = Plan(parse_rows("average,ledger,opcm"), orders=3, last_only=True)
    assert [stream.row.name for stream in plan.streams(open_suite(tiny_suite).tasks)].count("opcm") == 3
    assert len(plan.streams(open_suite(tiny_suite).tasks)) == 5


def test_what_a_store_notes_is_not_among_the_progress(
    tiny_suite: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    suite = open_suite(tiny_suite)
    base, green = (load_file(model / "model.safetensors") for model in (suite.base(), suite.expert("green")))
    near = {name: base[name] + 0.01 * (tensor - base[name]) for name, tensor in green.items()}
    save_file(near, suite.expert("green") / "model.safetensors", metadata={"format": "pt"})
    stream = Stream(Row.parse("average"), ("green", "red"), 0, "all")
    found = run_streams(suite, [stream], tmp_path / "work")
    assert [step["task"] for step in found[stream.outcome]] == ["green", "red"]
    assert not recwarn.list
