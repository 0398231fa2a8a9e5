"""The engine: order, admission by memory, errors, and threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator

import pytest
import torch

from mergestream.engine import LocalEngine, single_threaded
from mergestream.errors import MergestreamError


def test_every_job_runs_once_and_gives_its_result() -> None:
    costs = {f"job {n}": n for n in range(50)}
    for workers in (1, 2, 7):
        results = list(LocalEngine(workers).run(costs, lambda name: name.upper()))
        assert sorted(results) == sorted((name, name.upper()) for name in costs)


def test_the_most_costly_jobs_start_first() -> None:
    started: list[str] = []
    costs = {"small": 1, "large": 100, "medium": 10, "also medium": 10}
    list(LocalEngine(workers=1).run(costs, started.append))
    assert started == ["large", "also medium", "medium", "small"]


def test_no_jobs_are_no_trouble() -> None:
    assert list(LocalEngine(2).run({}, lambda name: name)) == []


def test_running_jobs_stay_within_the_budget_and_smaller_ones_overtake() -> None:
    memory = {"a": 60, "b": 60, "c": 30, "d": 30, "e": 5}
    lock = threading.Lock()
    used, peak, most = 0, 0, 0
    running = 0

    def work(name: str) -> None:
        nonlocal used, peak, running, most
        with lock:
            used += memory[name]
            running += 1
            peak, most = max(peak, used), max(most, running)
        time.sleep(0.02)
        with lock:
            used -= memory[name]
            running -= 1

    list(LocalEngine(workers=4, max_memory=100).run(memory, work, memory))
    assert peak <= 100
    assert most > 1, "two that fit together run together"


def test_a_job_that_can_never_be_admitted_is_named_before_anything_runs() -> None:
    ran: list[str] = []
    engine = LocalEngine(workers=2, max_memory=10**6)
    with pytest.raises(MergestreamError, match=r"tensor big needs 2\.0 MB .* 1\.0 MB allowed; raise --max-memory"):
        list(engine.run({"big": 1, "small": 1}, ran.append, {"big": 2 * 10**6, "small": 10}))
    assert not ran


@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_error_is_raised_and_nothing_more_is_admitted(workers: int) -> None:
    ran: list[str] = []

    def work(name: str) -> None:
        ran.append(name)
        if name == "bad":
            raise MergestreamError("this one")

    costs = {"bad": 1000, **{f"job {n}": n for n in range(100)}}
    with pytest.raises(MergestreamError, match="this one"):
        list(LocalEngine(workers).run(costs, work))
    assert len(ran) <= 3 * workers


def test_stopping_early_stops_the_workers() -> None:
    ran: list[str] = []
    jobs = LocalEngine(workers=2).run({f"job {n}": 1 for n in range(100)}, ran.append)
    assert isinstance(jobs, Generator)
    next(jobs)
    jobs.close()
    seen = len(ran)
    time.sleep(0.05)
    assert len(ran) == seen < 100


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [1, 2])
def test_torch_runs_on_one_thread_inside_and_as_before_outside(workers: int, two_threads: None) -> None:
    with single_threaded():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    jobs = LocalEngine(workers).run({"a": 1, "b": 1}, lambda name: torch.get_num_threads())
    assert {threads for _, threads in jobs} == {1}
    assert torch.get_num_threads() == 2


def test_a_system_without_threads_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(MergestreamError, match="no more threads; use --workers 1"):
        list(LocalEngine(2).run({"a": 1, "b": 1}, lambda name: name))
