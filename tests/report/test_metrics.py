"""The metrics against matrices worked out by hand."""

import pytest

from benchmarks.figures import seen_means
from mergestream.evaluation.results import Spread, retention, worst_task
from mergestream.report.scores import average_accuracy, backward_transfer

MATRIX = [
    [0.9, 0.3, 0.1],
    [0.7, 0.8, 0.2],
    [0.6, 0.5, 0.7],
]


def test_average_accuracy_is_the_mean_of_the_last_row() -> None:
    assert average_accuracy(MATRIX) == pytest.approx((0.6 + 0.5 + 0.7) / 3)


def test_backward_transfer_compares_with_the_step_of_the_tasks_own_model() -> None:
    assert backward_transfer(MATRIX) == pytest.approx(((0.6 - 0.9) + (0.5 - 0.8)) / 2)


def test_worst_task_is_that_of_the_last_model() -> None:
    assert worst_task(MATRIX) == 0.5


def test_seen_means_leave_out_what_has_not_arrived() -> None:
    assert seen_means(MATRIX) == pytest.approx([0.9, (0.7 + 0.8) / 2, 0.6])


def test_retention_is_measured_on_tasks_that_are_not_merged() -> None:
    base = [0.5, 0.25, 0.1]
    assert retention(MATRIX, base) == pytest.approx(((0.3 - 0.25) + (0.1 - 0.1) + (0.2 - 0.1)) / 3)


def test_a_metric_that_lacks_an_entry_is_unknown_and_not_wrong() -> None:
    ends: list[list[float | None]] = [[0.9, None, None], [None, 0.8, None], [0.6, 0.5, 0.7]]
    assert average_accuracy(ends) == average_accuracy(MATRIX)
    assert backward_transfer(ends) == backward_transfer(MATRIX)
    assert seen_means(ends) == [0.9, None, pytest.approx(0.6)]
    assert retention(ends, [0.5, 0.25, 0.1]) is None
    assert average_accuracy([[0.9, None], [0.5, None]]) is None


def test_spread_is_the_sample_standard_deviation() -> None:
    assert Spread.of([1.0, 2.0, 3.0, None]) == Spread(2.0, 1.0, 3)
    assert Spread.of([0.5]) == Spread(0.5, None, 1)
    assert Spread.of([None]) is None
