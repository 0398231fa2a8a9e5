"""The demo's words, without its work (the benchmark below it is tested elsewhere)."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import demo
from mergestream.errors import MergestreamError
from mergestream.evaluation.results import Results, Run


def run_of(method: str) -> Run:
    rows = ({"a": 0.9, "b": 0.2}, {"a": 0.8, "b": 0.7})
    return Run(method, 0, ["a", "b"], [{"task": t, "accuracies": r} for t, r in zip("ab", rows, strict=True)])


def test_the_report_shows_every_step_and_the_two_metrics() -> None:
    runs = [run_of(method) for method in demo.METHODS]
    base, experts = {"a": 0.5, "b": 0.3}, {"a": 0.9, "b": 0.9}
    text = demo.accuracy_report(Results("text", "MiniLM", ["a", "b"], base, experts, runs, 0))
    assert "OPCM: accuracy (%) after each model" in text and "Average (SWA)" in text
    assert "ACC 75.0   BWT -10.0" in text
    assert "base 40.0, experts on their own tasks 90.0" in text


def test_a_failure_is_one_sentence_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(output: Any) -> None:
        raise MergestreamError("cannot fetch x 1.0 from PyPI")

    monkeypatch.setattr(demo, "run", fail)
    assert demo.main([]) == 1
    assert capsys.readouterr().err == "error: cannot fetch x 1.0 from PyPI\n"
