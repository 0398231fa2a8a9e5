"""`watch` adds each complete expert of a directory once, whatever else is in there."""

from __future__ import annotations

import errno
import json
import os
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from mergestream import Average, MergestreamError, Store
from mergestream.cli.printing import replying
from mergestream.cli.watch import RETRY_SECONDS, Watcher, find_experts, is_temporary, report_failure
from mergestream.commands import CommandError
from mergestream.errors import DamagedError
from mergestream.progress import TerminalProgress
from mergestream.report.gates import GateError
from mergestream.storage import open_storage
from tests.conftest import RunCommand


def model(seed: int) -> dict[str, torch.Tensor]:
    """The base for seed 0, else an expert trained from it."""
    base, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    tensors = {"a.weight": torch.randn(8, 6, generator=base), "a.bias": torch.randn(8, generator=base)}
    size = 0.1 if seed else 0
    return {name: tensor + size * torch.randn(tensor.shape, generator=own) for name, tensor in tensors.items()}


class Bench:
    """A store, a directory of incoming experts, and watchers with a manual clock."""

    def __init__(self, place: Path) -> None:
        save_file(model(0), place / "base.safetensors")
        self.base, self.incoming, self.now = place / "base.safetensors", place / "incoming", 0.0
        self.incoming.mkdir()
        self.store = Store.create(place / "store", self.base, progress=TerminalProgress())
        self.tried: list[str] = []
        self.watcher = self.watch()

    def watch(self, **options: Any) -> Watcher:
        """Start a new watcher, as a new process would."""
        store = Store(self.store.path, progress=TerminalProgress())
        add = store.add

        def trying(path: str, **options: Any) -> Any:
            self.tried.append(Path(path).name)
            return add(path, **options)

        store.add = trying  # type: ignore[method-assign, assignment]
        self.watcher = Watcher(store, self.incoming, options, clock=lambda: self.now)
        return self.watcher

    def look(self, times: int = 3) -> list[str]:
        """Look several times and return the names of the experts that were tried."""
        self.tried.clear()
        for _ in range(times):
            self.watcher.look()
        return list(self.tried)

    def bring(self, name: str, seed: int) -> Path:
        path = self.incoming / f"{name}.safetensors"
        save_file(model(seed), path)
        return path

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in Store(self.store.path).history]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_an_expert_is_added_when_it_no_longer_changes(bench: Bench) -> None:
    whole = save(model(1))
    (bench.incoming / "one.safetensors").write_bytes(whole[:100])
    bench.look(1)
    (bench.incoming / "one.safetensors").write_bytes(whole)
    assert bench.look(1) == [], "it was still growing between the two looks"
    assert bench.look(1) == ["one.safetensors"] and bench.names == ["one"]
    assert bench.look() == [], "it is not added twice"


def test_a_bad_file_is_reported_once_and_does_not_stop_the_watch(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    (bench.incoming / "bad.safetensors").write_bytes(b"nonsense")
    bench.bring("good", 2)
    bench.look(4)
    assert bench.names == ["good"]
    assert capsys.readouterr().err.count("error: bad.safetensors: ") == 1


def test_broken_links_and_empty_directories_are_no_experts(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    (bench.incoming / "broken").symlink_to("nowhere")
    (bench.incoming / "loop").symlink_to("loop")
    os.mkdir(os.fsencode(bench.incoming) + b"/\xff")  # noqa: PTH102
    (bench.incoming / ".hidden").write_bytes(b"nonsense")
    bench.bring("good", 1)
    bench.look(4)
    assert bench.names == ["good"] and capsys.readouterr().err == ""
    (bench.incoming / "broken").unlink()
    bench.bring("broken", 2)
    bench.look()
    assert bench.names == ["good", "broken"] and capsys.readouterr().err == ""


def test_a_change_of_a_file_in_a_directory_is_a_change(bench: Bench) -> None:
    expert = bench.incoming / "expert"
    expert.mkdir()
    found = []
    for change in (
        lambda: (expert / "a").write_text("1"),
        lambda: (expert / "a").write_text("22"),
        lambda: os.utime(expert / "a", (1, 1)),
        lambda: (expert / "a").rename(expert / "b"),
        lambda: (expert / "a").symlink_to("nowhere"),
    ):
        change()
        found.append(find_experts(bench.incoming)[str(expert.resolve())])
    assert found[4] == found[3] and all(one != other for one, other in pairwise(found[:4]))


def test_a_file_that_vanishes_during_a_look_is_ignored(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = bench.bring("gone", 1)
    expert = bench.incoming / "expert"
    expert.mkdir()
    save_file(model(2), expert / "model.safetensors")
    (expert / "model.safetensors.incomplete").touch()
    stat = Path.stat

    def vanishing(path: Path, **options: Any) -> os.stat_result:
        if path == gone or path.name.endswith(".incomplete"):
            path.unlink(missing_ok=True)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", vanishing)
    bench.look(4)
    assert bench.names == ["expert"] and capsys.readouterr().err == ""


def test_an_unexpected_error_does_not_stop_other_experts(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.bring("bad", 1)
    bench.bring("good", 2)
    add = bench.watcher.store.add

    def breaking(path: str, **options: Any) -> Any:
        if Path(path).name.startswith("bad"):
            bench.tried.append(Path(path).name)
            raise KeyError("surprise")
        return add(path, **options)

    monkeypatch.setattr(bench.watcher.store, "add", breaking)
    assert bench.look(5) == ["bad.safetensors", "good.safetensors"] and bench.names == ["good"]
    assert capsys.readouterr().err == "error: bad.safetensors: KeyError: 'surprise'; next attempt in 600 s\n"
    bench.watch()
    assert bench.look() == ["bad.safetensors"], "a new watch tries again"


def test_temporary_errors_are_retried_after_a_pause(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.bring("one", 1)
    add, failing = bench.watcher.store.add, True

    def full(path: str, **options: Any) -> Any:
        if failing:
            bench.tried.append(Path(path).name)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return add(path, **options)

    monkeypatch.setattr(bench.watcher.store, "add", full)
    bench.look(1)
    for _ in range(3):
        assert bench.look(2) == ["one.safetensors"]
        expected = "error: one.safetensors: No space left on device; next attempt in 600 s\n"
        assert capsys.readouterr().err == expected
        bench.now += RETRY_SECONDS - 1
        assert bench.look() == []
        bench.now += 1
    failing = False
    assert bench.look() and bench.names == ["one"]


def wrapped(cause: BaseException) -> MergestreamError:
    try:
        try:
            raise cause
        except BaseException as error:
            raise MergestreamError("it cannot be written") from error
    except MergestreamError as error:
        return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(errno.EIO, "input/output error"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (wrapped(OSError(errno.ENOSPC, "full")), True),
        (CommandError("score.py failed"), True),
        (KeyError("surprise"), True),
        (DamagedError("the base has changed"), True),
        (wrapped(ValueError("no header")), False),
        (MergestreamError("it is identical to the base"), False),
        (GateError("norm is 3"), False),
    ],
)
def test_which_errors_are_temporary(error: Any, passes: bool) -> None:
    assert is_temporary(error) is passes


def test_a_busy_store_is_tried_again(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.bring("one", 1)
    with open_storage(bench.store.path).writing("manifest.json"):
        assert bench.look(4) == ["one.safetensors"] * 3
    assert bench.look(1) and bench.names == ["one"] and capsys.readouterr().err == ""


def test_a_refused_expert_is_skipped_until_its_files_change(bench: Bench, tmp_path: Path) -> None:
    path = bench.bring("one", 1)
    bench.watch(gates=["norm<=0"])
    assert bench.look(4) == ["one.safetensors"]
    os.utime(path, (time.time() + 9, time.time() + 9))
    assert bench.look() == ["one.safetensors"], "new files are tried"
    bench.watch(gates=["norm<=1000"])
    assert bench.look() == ["one.safetensors"] and bench.names == ["one"], "a new watcher tries again"


def test_an_undone_or_removed_expert_is_not_added_again(bench: Bench) -> None:
    for seed, name in enumerate(("one", "two", "three"), 1):
        bench.bring(name, seed)
    bench.look()
    assert len(bench.names) == 3
    last = bench.names[2]
    Store(bench.store.path).undo()
    Store(bench.store.path).remove(first := bench.names[0])
    assert bench.look() == [], "by the same watcher"
    bench.bring(first, 10)
    assert bench.look() == [f"{first}.safetensors"], "an expert with new files is a new expert"
    bench.watch()
    assert bench.look() == [f"{last}.safetensors"], "a new watcher does not know"


def test_an_expert_that_was_in_the_store_before_is_not_added_after_an_undo(bench: Bench, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    save_file(model(1), elsewhere / "model.safetensors")
    (bench.incoming / "link").symlink_to(elsewhere)
    bench.store.add(elsewhere)
    assert bench.look() == []
    bench.store.undo()
    assert bench.look() == []


def test_what_older_versions_have_written_does_not_matter(bench: Bench) -> None:
    (bench.store.path / "watched.json").write_text("{}")
    bench.bring("one", 1)
    assert bench.look() == ["one.safetensors"] and bench.names == ["one"]
    bench.store.refresh()
    bench.store.verify()


def test_two_links_to_one_expert_are_one_expert(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expert = tmp_path / "expert"
    expert.mkdir()
    save_file(model(1), expert / "model.safetensors")
    for name in ("one", "two"):
        (bench.incoming / name).symlink_to(expert)
    assert len(bench.look()) == 1 and bench.names == ["expert"] and capsys.readouterr().err == ""


def test_a_missing_base_is_not_the_experts_fault(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.bring("one", 1)
    away = bench.base.rename(tmp_path / "away.safetensors")
    assert bench.look() == ["one.safetensors"] and "the base cannot be opened" in capsys.readouterr().err
    away.rename(bench.base)
    bench.now += RETRY_SECONDS
    assert bench.look() and bench.names == ["one"]


def test_the_directory_may_vanish_and_return(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.bring("one", 1)
    bench.look(1)
    away = bench.incoming.rename(tmp_path / "away")
    assert bench.look() == [] and capsys.readouterr().err.count("No such file") == 1
    away.rename(bench.incoming)
    assert bench.look() and bench.names == ["one"]


def test_a_model_of_another_base_is_refused(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a.weight": torch.randn(8, 6), "a.bias": torch.randn(8)}, bench.incoming / "unrelated.safetensors")
    bench.look()
    assert bench.names == [] and "pass --allow-other-base" in capsys.readouterr().err
    bench.watch(allow_other_base=True)
    bench.look()
    assert bench.names == ["unrelated"]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Interrupt the command after several looks."""

    def limit(count: int) -> None:
        left = [count]

        def sleep(seconds: float) -> None:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt

        own = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)  # subprocess sleeps too
        monkeypatch.setattr("mergestream.cli.watch.time", own)

    return limit


def test_events_are_lines_of_json(bench: Bench, mergestream: RunCommand, looks: Any) -> None:
    bench.bring("one", 1)
    (bench.incoming / "bad.safetensors").write_bytes(b"nonsense")
    looks(3)
    done = mergestream("watch", bench.store.path, bench.incoming, "--json", "--evaluate", "echo {model} 0.5")
    assert done.code == 0 and done.err == ""
    events = [json.loads(line) for line in done.out.splitlines()]
    assert [event["event"] for event in events] == ["watching", "absorbed", "refused"]
    absorbed, refused = events[1:]
    assert absorbed["step"] == 1 and absorbed["expert"]["evaluation"]["score"] == 0.5
    assert Path(refused["path"]).name == "bad.safetensors" and refused["seconds_to_retry"] is None
    assert refused["kind"] == "input" and refused["reasons"]


def test_a_retry_is_an_event(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with replying(as_json=True):
        report_failure("a\nb", OSError(errno.ENOSPC, "full"), 20.0)
    event = json.loads(capsys.readouterr().out)
    assert (event["event"], event["path"], event["seconds_to_retry"]) == ("failed", "a\nb", 20.0)


@pytest.mark.parametrize("interval", ["-1", "nan", "0.5", "soon"])
def test_the_interval_must_be_seconds(interval: str, bench: Bench, mergestream: RunCommand) -> None:
    done = mergestream("watch", bench.store.path, bench.incoming, "--interval", interval)
    assert done.code == 2 and "is not a whole number of at least 0" in done.err and len(done.err.splitlines()) == 1


def test_the_store_and_its_parents_cannot_be_watched(bench: Bench, mergestream: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(bench.store.path)
    for directory in (tmp_path, bench.store.path, bench.store.path / "steps", tmp_path / "link"):
        (bench.store.path / "steps").mkdir(exist_ok=True)
        done = mergestream("watch", bench.store.path, directory)
        assert done.code == 2 and "contain one another" in done.err


def test_wrong_options_are_refused_at_once(bench: Bench, mergestream: RunCommand) -> None:
    for options in (("--gate", "kept"), ("--gate", "score>=1"), ("--evaluate", "score.py"), ("--log", "x")):
        assert mergestream("watch", bench.store.path, bench.incoming, *options).code == 2
    assert mergestream("watch", bench.store.path, bench.base).code == 1


def test_every_step_is_logged(bench: Bench, tmp_path: Path) -> None:
    log = [f"jsonl:{tmp_path / 'steps.jsonl'}"]
    watcher = Watcher(bench.store, bench.incoming, {"log": log}, clock=lambda: 0.0)
    for name, seed in (("one", 1), ("two", 2)):
        bench.bring(name, seed)
        for _ in range(2):
            watcher.look()
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["expert"] for line in lines] == ["one", "two"]


def test_partial_and_ignore_are_passed_to_add(tmp_path: Path, mergestream: RunCommand, looks: Any) -> None:
    save_file(model(0), tmp_path / "base.safetensors")
    store = Store.create(tmp_path / "store", tmp_path / "base.safetensors", Average())
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    save_file({"a.weight": model(1)["a.weight"], "b": torch.ones(1)}, incoming / "part.safetensors")
    looks(3)
    assert mergestream("watch", store.path, incoming, "--partial", "--ignore", "b").code == 0
    assert Store(store.path).history[0].fates == {"ignored": 1, "merged": 1, "unchanged": 1}
