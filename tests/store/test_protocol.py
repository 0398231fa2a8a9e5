"""What lies around a commit: links, a slow init, failures and signals after it, a full disk at it, what is kept."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mergestream import OPCM, Average, Ledger, LocalEngine, MergestreamError, Store
from mergestream.base.model import BaseModel
from mergestream.cli import main
from mergestream.errors import StoreBusyError
from mergestream.merging.step import Step
from mergestream.progress import Progress
from mergestream.report import diagnostics
from mergestream.report.facts import Facts
from mergestream.storage import Storage, open_storage
from mergestream.storage.local import LocalStorage
from mergestream.store import shorten
from mergestream.store.add import add_expert
from mergestream.store.manifest import Manifest
from mergestream.store.records import tensor_records
from mergestream.store.transaction import retried
from tests.conftest import RunCommand, Toys, files, save_model, toy_expert
from tests.store.test_crash import children

MANIFEST = "manifest.json"


class Notes(Progress):
    """Keeps what the user is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, message: str) -> None:
        self.told.append(message)


@pytest.fixture
def store(tmp_path: Path, toys: Toys) -> Store:
    """A store that has absorbed two experts."""
    store = Store.create(tmp_path / "store", toys.base, Average(), engine=LocalEngine(workers=1))
    store.add(toys.experts[0])
    store.add(toys.experts[1])
    return store


def names(store: Store | Path, kind: str) -> list[str]:
    directory = store.path if isinstance(store, Store) else store
    return sorted(path.name for path in (directory / kind).iterdir())


# --- a store from somebody else ----------------------------------------------------------------------------

PARTS = [
    *("lock", MANIFEST, "manifest.json.new", "scores.json", "candidate", "steps", "experts"),
    *("steps/0002", "steps/.0001.removed", "experts/0001", "steps/0003"),
    *("steps/0002/model.safetensors", "steps/0002/plan.json", "experts/0001/tensors.json"),
]


@pytest.mark.parametrize("part", PARTS)
def test_a_store_whose_parts_are_links_is_refused(part: Any, store: Store, tmp_path: Path, toys: Toys) -> None:
    outside, place = tmp_path / "outside", store.path / part
    if place.exists():
        place.rename(outside)
    else:
        outside.mkdir()
        (outside / "thesis.txt").write_text("mine")
    place.symlink_to(outside)
    before = files(tmp_path)
    with pytest.raises(MergestreamError, match=rf"{part} is a symbolic link"):
        Store(store.path)
    for change in (store.undo, lambda: store.add(toys.experts[2]), lambda: store.keep(0)):  # it was opened earlier
        with pytest.raises(MergestreamError, match="symbolic link"):
            change()
    assert files(tmp_path) == before


@pytest.mark.parametrize("part", ["lock", MANIFEST, "scores.json", "steps/0002/digests.json", "steps/0003"])
def test_nobody_waits_for_a_pipe_in_a_store(part: Any, store: Store) -> None:
    place = store.path / part
    if place.exists():
        place.unlink()
    os.mkfifo(place)
    with pytest.raises(MergestreamError, match=rf"{part} is neither a file nor a directory"):
        Store(store.path)


def test_a_place_for_a_store_with_a_link_in_it_is_refused(tmp_path: Path, toys: Toys) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(MergestreamError, match="lock is a symbolic link"):
        Store.create(tmp_path / "store", toys.base)
    assert (tmp_path / "victim").read_text() == "mine"


def test_the_lock_is_not_taken_through_a_link(store: Store, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (store.path / "lock").unlink()
    (store.path / "lock").symlink_to(tmp_path / "victim")
    lock = open_storage(store.path).writing("manifest.json")
    with pytest.raises(MergestreamError, match="cannot be written to"), lock:
        pass
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_store_may_be_reached_through_a_link(store: Store, toys: Toys, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store.path)
    linked = Store(tmp_path / "link")
    before = store.history
    linked.add(toys.experts[2])
    assert len(Store(store.path).history) == len(before) + 1
    linked.undo()
    linked.verify()
    assert (tmp_path / "link").is_symlink() and Store(store.path).history == before


# --- init --------------------------------------------------------------------------------------------------


def test_a_slow_init_leaves_a_store_alone_that_was_made_meanwhile(
    tmp_path: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, examine = tmp_path / "store", BaseModel.examine
    before: dict[str, bytes] = {}

    def slow(*arguments: Any, **options: Any) -> BaseModel:
        monkeypatch.setattr(BaseModel, "examine", examine)
        Store.create(place, toys.base, Average()).add(toys.experts[0])
        before.update(files(place))
        return examine(*arguments, **options)

    monkeypatch.setattr(BaseModel, "examine", slow)
    with pytest.raises(MergestreamError, match=r"store exists already and is not empty; choose another place"):
        Store.create(place, toys.base, OPCM())
    assert before and files(place) | {"lock": b""} == before | {"lock": b""}


def test_two_inits_at_once_are_one(tmp_path: Path, toys: Toys) -> None:
    (tmp_path / "store").mkdir()
    with open_storage(tmp_path / "store").writing("manifest.json"), pytest.raises(StoreBusyError):
        Store.create(tmp_path / "store", toys.base)
    Store.create(tmp_path / "store", toys.base)


def test_a_manifest_is_never_made_over_another(store: Store) -> None:
    before = files(store.path)
    with pytest.raises(StoreBusyError, match=r"manifest\.json was changed by another process"):
        dataclasses.replace(store.manifest, version=None).save(store.storage)
    stale = store.manifest
    store.keep(3)
    before = files(store.path)
    with pytest.raises(StoreBusyError, match=r"manifest\.json was changed by another process"):
        stale.save(store.storage)
    assert files(store.path) == before


# --- after the commit --------------------------------------------------------------------------------------


@contextmanager
def at_the_commit(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> Iterator[None]:
    """Do something as soon as a new manifest is in place."""
    original = os.replace

    def replace(source: Any, target: Any) -> None:
        original(source, target)
        if Path(target).name == MANIFEST:
            then()

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        yield


def commands(store: Path, toys: Toys) -> dict[str, tuple[object, ...]]:
    return {
        "add": ("add", store, toys.experts[2]),
        "undo": ("undo", store),
        "remove": ("remove", store, "expert-1"),
        "keep": ("keep", store, 0),
        "verify": ("verify", store, "--base", toys.base),
    }


def store_for(command: str, store: Store, toys: Toys) -> Store:
    """The store for a command: only a ledger can `remove`. It keeps nothing for `undo`: it deletes files."""
    if command != "remove":
        return store
    ledger = Store.create(store.path.with_name("ledger"), toys.base, Ledger(), keep=0)
    for expert in toys.experts[:2]:
        ledger.add(expert)
    return ledger


@pytest.mark.parametrize("call", ["fsync", "rename", "rmdir"])
@pytest.mark.parametrize("command", ["add", "undo", "remove", "keep"])
def test_what_fails_after_the_commit_is_only_told(
    command: str, call: str, store: Store, toys: Toys, mergestream: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_for(command, store, toys)
    reference = shutil.copytree(store.path, store.path.with_name("reference"))
    assert mergestream(*commands(reference, toys)[command]).code == 0
    broken = monkeypatch.context()

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "the-disk")

    with broken as patch, at_the_commit(monkeypatch, lambda: patch.setattr(os, call, fail)):
        result = mergestream(*commands(store.path, toys)[command])
    assert result.code == 0, result.err
    assert result.err.count("note:") == 1 and "could not be deleted: Input/output error" in result.err
    again = Store(store.path)
    again.verify()
    assert again.manifest.step == Store(reference).manifest.step
    again.relocate(toys.base)  # any writer tidies up
    assert names(again, "steps") == names(reference, "steps")
    assert names(again, "experts") == names(reference, "experts")


def test_nothing_is_removed_while_the_manifest_may_still_be_lost(
    store: Store, toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its name cannot be brought to the disk, a power cut may bring back the old one, which needs its steps."""
    store.progress = notes = Notes()

    def fail(storage: LocalStorage, folder: str = "") -> None:
        if not folder:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(storage))

    monkeypatch.setattr(LocalStorage, "sync", fail)
    store.add(toys.experts[2])
    assert store.manifest.step == 3 and names(store, "steps") == ["0001", "0002", "0003"]
    assert len(notes.told) == 1 and f"{store.path} could not be deleted" in notes.told[0]


@pytest.mark.parametrize(("number", "code", "what"), [(2, 130, "interrupted"), (15, 143, "terminated")])
@pytest.mark.parametrize(("command", "step"), [("add", 3), ("undo", 1), ("keep", 2)])
def test_a_signal_during_the_commit_waits_for_it(
    command: str,
    step: int,
    number: int,
    code: int,
    what: str,
    store: Store,
    toys: Toys,
    mergestream: RunCommand,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with at_the_commit(monkeypatch, lambda: os.kill(os.getpid(), number)):
        result = mergestream(*commands(store.path, toys)[command])
    assert result.code == code
    assert result.err == f"error: {what}; the command was complete, {store.path} is at step {step}\n"
    assert Store(store.path).manifest.step == step
    Store(store.path).verify()


def test_a_signal_before_the_commit_leaves_a_step_to_be_resumed(
    store: Store, toys: Toys, mergestream: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    absorb, left = Step.absorb, 4

    def terminated(self: Step, *arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return absorb(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "absorb", terminated)
        result = mergestream("add", store.path, toys.experts[2], "--workers", 1)
    assert result.code == 143
    assert result.err.startswith("error: terminated; finished steps are kept") and result.err[:-1].isprintable()
    assert (store.path / "steps" / "0003" / "journal").read_text()
    assert Store(store.path).manifest.step == 2
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    Store(store.path).attach_scores(["a", "b"], [[1.0, 0.5]])
    assert names(store, "steps") == ["0001", "0002", "0003"], "other writers spare it"
    left = -1
    store.add(toys.experts[2])
    store.verify()


# --- a full disk -------------------------------------------------------------------------------------------


@contextmanager
def no_room_for_the_manifest(monkeypatch: pytest.MonkeyPatch, full: Callable[[], bool]) -> Iterator[None]:
    def save(self: Manifest, storage: Storage) -> Manifest:
        if full():
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", no_space)
                original(self, storage)
        return original(self, storage)

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    original = Manifest.save
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "save", save)
        yield


@pytest.mark.parametrize("command", ["add", "remove"])
def test_a_step_for_whose_manifest_there_is_no_room_is_abandoned(
    command: str, store: Store, toys: Toys, mergestream: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_for(command, store, toys)
    before = files(store.path, ".json", ".safetensors")
    with no_room_for_the_manifest(monkeypatch, lambda: True):
        result = mergestream(*commands(store.path, toys)[command])
    assert result.code == 1
    assert result.err.endswith(
        "manifest.json cannot be written: No space left on device; free some disk space and run the command again\n"
    )
    assert files(store.path, ".json", ".safetensors") == before
    assert names(store, "steps") == names(store, "experts") == ["0001", "0002"]
    assert mergestream(*commands(store.path, toys)[command]).code == 0


@pytest.mark.parametrize("operation", [Store.undo, lambda store: store.remove("expert-2")], ids=["undo", "remove"])
def test_on_a_full_disk_a_step_that_was_cut_short_makes_room(
    operation: Any, tmp_path: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(tmp_path / "store", toys.base, Ledger(), keep=0)
    store.add(toys.experts[0])
    store.add(toys.experts[1])
    unborn = store.path / "steps" / "0003"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("mergestream.store.add.write_record", interrupt)
        store.add(toys.experts[2])
    assert unborn.is_dir()
    with no_room_for_the_manifest(monkeypatch, unborn.exists):
        operation(store)
    assert store.manifest.step == 1 and names(store, "steps") == ["0001"]
    store.verify()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_add_clears_what_others_have_left(store: Store, toys: Toys) -> None:
    """As a shortening that was cut short, whose steps have later numbers."""
    for number in ("0003", "0004", "0005"):
        shutil.copytree(store.path / "steps" / "0002", store.path / "steps" / number)
        shutil.copytree(store.path / "experts" / "0002", store.path / "experts" / number)
    (store.path / "candidate" / "model").mkdir(parents=True)
    seen: list[str] = []

    def review(candidate: Any) -> Any:
        seen.extend(names(store, "steps"))
        return candidate.expert

    add_expert(store, toys.experts[2], review=review)
    assert seen == ["0001", "0002", "0003"]
    assert names(store, "experts") == ["0001", "0002", "0003"] and not (store.path / "candidate").exists()


# --- entries that are shortened ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fifteen(tmp_path_factory: pytest.TempPathFactory, toys: Toys) -> tuple[Path, Path]:
    """A ledger of 15 experts, and the 16th, with which the first eight are shortened."""
    place = tmp_path_factory.mktemp("fifteen")
    store = Store.create(place / "store", toys.base, Ledger(), engine=LocalEngine(workers=1))
    for number in range(15):
        store.add(toy_expert(100 + number), f"expert-{number}")
    return store.path, save_model(place / "last", toy_expert(200))


def count_commits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    original, found = Manifest.save, []

    def save(self: Manifest, storage: Storage) -> Manifest:
        found.append(self.step)
        return original(self, storage)

    monkeypatch.setattr(Manifest, "save", save)
    return found


def fail_at(number: int, error: BaseException) -> Callable[..., Any]:
    original, left = shorten._shorten, number

    def failing(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise error
        return original(*arguments)

    return failing


def cuts(store: Store) -> list[int]:
    return [entry.cut for entry in store.history]


def test_all_entries_are_shortened_by_one_commit(
    fifteen: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(shutil.copytree(fifteen[0], tmp_path / "store"))
    commits = count_commits(monkeypatch)
    store.add(fifteen[1])
    assert commits == [16, 16]
    assert cuts(store)[:8] == [16] * 8
    assert len(names(store, "steps")) == len(names(store, "experts")) == 16
    store.verify()


def test_shortening_that_fails_halfway_keeps_what_it_has(
    fifteen: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(shutil.copytree(fifteen[0], tmp_path / "store"), progress=(notes := Notes()))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        patch.setattr(shorten, "_shorten", fail_at(3, full))
        store.add(fifteen[1])
    assert cuts(store)[:8] == [16, 16, *[8] * 6] and "No space left" in notes.told[0]
    assert len(names(store, "steps")) == len(names(store, "experts")) == 16
    store.verify()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MergestreamError("full")], ids=["interrupted", "full"])
def test_shortening_that_does_not_reach_its_commit_changes_nothing(
    error: Any, fifteen: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(shutil.copytree(fifteen[0], tmp_path / "store"), progress=Notes())
    original = Manifest.save

    def save(self: Manifest, storage: Storage) -> Manifest:
        if self.history[0].cut == 16:
            raise error
        return original(self, storage)

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "save", save)
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt, match="is at step 16"):
                store.add(fifteen[1])
        else:
            store.add(fifteen[1])
            assert len(names(store, "steps")) == 16, "on a full disk they would be in the way"
    again = Store(store.path)
    assert again.manifest.step == 16 and cuts(again)[:8] == [8] * 8
    again.verify()
    again.add(toy_expert(300), "one-more")
    again.verify()
    assert cuts(again)[:8] == [17] * 8
    assert len(names(again, "steps")) == len(names(again, "experts")) == 17


# --- readers -----------------------------------------------------------------------------------------------


def test_a_report_during_an_undo_is_of_the_store_after_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    undone: list[object] = []

    def undo_first(*arguments: Any) -> Any:
        if not undone:
            undone.append(Store(store.path).undo())
        return tensor_records(*arguments)

    monkeypatch.setattr(diagnostics, "tensor_records", undo_first)
    facts = Facts.of(store)
    assert undone and [entry.name for entry in facts.history] == ["expert-1"]
    assert facts.survival.experts == ("expert-1",)


def test_a_status_during_an_undo_is_no_error(
    tmp_path: Path, toys: Toys, mergestream: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(tmp_path / "store", toys.base)
    store.add(toys.experts[0])
    original = Path.is_file

    def undo_first(self: Path) -> bool:
        if self.parent.name == "0001":
            monkeypatch.setattr(Path, "is_file", original)
            Store(store.path).undo()
            return True
        return original(self)

    monkeypatch.setattr(Path, "is_file", undo_first)
    assert mergestream("status", store.path).code == 0


def run_as_nobody(commands: list[list[str]]) -> None:
    """Run commands that only read; first as ourselves, for what they import is not everybody's to read."""
    for turn in ("root", "nobody"):
        if turn == "nobody" and os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        for number, command in enumerate(commands):
            code = main([word.format(turn=turn) for word in command])
            if code:
                os._exit(number + 10 * code)


def test_who_only_reads_needs_no_write_access(toys: Toys) -> None:
    place = Path(tempfile.mkdtemp())  # others may not look into pytest's
    try:
        shutil.copytree(toys.base.parent, place, dirs_exist_ok=True)
        store = Store.create(place / "nobody", place / "base", Average())
        store.add(place / "expert-1")
        store.add(place / "expert-2")
        shutil.copytree(store.path, place / "root")
        (place / "base").rename(place / "moved")
        (place / "out").mkdir()
        for path in (place, *place.rglob("*")):
            path.chmod(0o777 if path.name == "out" else 0o555 if path.is_dir() else 0o444)
        opened, moved = f"{place}/{{turn}}", ["--quiet", "--base", f"{place}/moved"]
        commands = [
            ["verify", opened, *moved],
            ["inspect", opened, f"{place}/expert-3", *moved],
            ["status", opened],
            ["log", opened],
            ["diff", opened, "1", f"{place}/expert-3", *moved],
            ["report", opened, "--format", "md", *moved],
            ["export", opened, f"{place}/out/{{turn}}", *moved],
        ]
        before = files(store.path)
        child = children.Process(target=run_as_nobody, args=(commands,))
        child.start()
        child.join()
        assert child.exitcode == 0
        assert files(store.path) == before
    finally:
        for path in (place, *(path for path in place.rglob("*") if path.is_dir())):
            path.chmod(0o755)
        shutil.rmtree(place)


# --- keep --------------------------------------------------------------------------------------------------


def test_more_can_be_kept_later(store: Store, toys: Toys, mergestream: RunCommand) -> None:
    store.undo()
    result = mergestream("undo", store.path)
    assert result.code == 0
    for expert in toys.experts[:3]:
        store.add(expert)
    store.undo()
    result = mergestream("undo", store.path)
    assert result.code == 1 and f"in future: mergestream keep {store.path} 2\n" in result.err
    assert mergestream("keep", store.path, 2).code == 0
    store.add(toys.experts[2])
    store.add(toys.experts[3])
    assert names(store, "steps") == ["0002", "0003", "0004"]
    store.undo()
    store.undo()
    store.verify()


def test_fewer_are_kept_at_once(store: Store) -> None:
    store.keep(0)
    assert names(store, "steps") == ["0002"] and Store(store.path).manifest.keep == 0
    with pytest.raises(MergestreamError, match="keeps are used up"):
        store.undo()
    with pytest.raises(
        MergestreamError, match=r"no longer keeps step 1; to go back further in future: mergestream keep"
    ):
        store.snapshot(1)
    with pytest.raises(MergestreamError, match="at least 0"):
        store.keep(-1)


def test_a_reader_that_met_an_expert_which_was_taken_back_since_reads_once_more(store: Store, toys: Toys) -> None:
    """The manifest is what it was when it began, but not what it read by."""
    reader, attempts = Store(store.path), []

    def read() -> int:
        attempts.append(reader.manifest.step)
        if len(attempts) == 1:
            store.add(toys.experts[2])
            reader.refresh()
            store.undo()
            raise MergestreamError("the expert that was met is gone")
        return reader.manifest.step

    assert retried(reader, read) == 2
    assert attempts == [2, 2]
