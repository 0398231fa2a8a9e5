"""kill -9 at any moment leaves a store at the old or the new step, and it goes on to the same bytes.

Children die by SIGKILL at the n-th call that changes the disk, for every n until the operation succeeds.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mergestream import OPCM, LocalEngine, MergestreamError, Store
from mergestream.storage.local import LocalStorage
from tests.conftest import Toys, files, save_model, toy_expert

CHANGES = ("replace", "rename", "link", "unlink", "rmdir", "mkdir", "pwrite", "fsync", "posix_fallocate", "ftruncate")

children = multiprocessing.get_context("forkserver")
children.set_forkserver_preload(
    ["pytest", "torch", "mergestream.store.store", "mergestream.merging.step", "mergestream.export.model"]
)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_change(number: int) -> None:
    """Kill this process at the n-th change of the disk; a write dies with half of its bytes written."""
    left = number

    def count_down(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def change(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if name == "pwrite":
                    file, data, offset = arguments
                    original(file, data[: len(data) // 2], offset)
                die()
            return original(*arguments, **options)

        return change

    for name in CHANGES:
        setattr(os, name, count_down(name))


def one_worker() -> LocalEngine:
    return LocalEngine(workers=1)


def add(store: Path, expert: Path) -> None:
    Store(store, engine=one_worker()).add(expert)


def undo(store: Path) -> None:
    Store(store, engine=one_worker()).undo()


def export(store: Path, out: Path) -> None:
    Store(store, engine=one_worker()).export(out, overwrite=True)  # drawing takes most of it


def run_and_die(number: int, operation: Callable[..., None], arguments: tuple[Path, ...]) -> None:
    die_at_change(number)
    operation(*arguments)


def dies(number: int, operation: Callable[..., None], *arguments: Path) -> bool:
    """Run an operation in a child that dies at the n-th change; whether it got there."""
    child = children.Process(target=run_and_die, args=(number, operation, arguments))
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def add_and_die(store: Path, expert: Path, finished: int) -> None:
    from mergestream.store.steps import StepWriter

    original, left = StepWriter.record, finished

    def record(*arguments: Any) -> None:
        nonlocal left
        original(*arguments)
        left -= 1
        if left == 0:
            die()

    StepWriter.record = record  # type: ignore[method-assign, assignment]
    add(store, expert)


def cut_short(store: Path, expert: Path, finished: int = 1) -> set[str]:
    """Kill an add when so many tensors are finished; which they are."""
    child = children.Process(target=add_and_die, args=(store, expert, finished))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    return journaled(store, Store(store).manifest.step + 1)


def make_store(place: Path, toys: Toys, experts: int, keep: int = 1) -> Path:
    store = Store.create(place, toys.base, OPCM(), keep=keep, engine=one_worker())
    for expert in toys.experts[:experts]:
        store.add(expert)
    return place


def journaled(store: Path, step: int) -> set[str]:
    """Tensors that a step which was cut short has finished."""
    journal = store / "steps" / f"{step:04d}" / "journal"
    lines = journal.read_text().splitlines() if journal.exists() else []
    return {json.loads(line.partition(" ")[2])["tensor"] for line in lines if line}


def state(store: Path) -> dict[str, bytes]:
    """All bytes of the last step, and of what is remembered of the experts.

    Not its plan: a kill just after the step became real leaves it behind, for the next step to remove.
    """
    step = store / "steps" / f"{Store(store).manifest.step:04d}"
    bytes_of_step = files(step, ".safetensors", ".json")
    return {name: data for name, data in bytes_of_step.items() if name != "plan.json"} | files(store / "experts")


def absorbed_by(monkeypatch: pytest.MonkeyPatch, operation: Callable[[], object]) -> list[str]:
    """The tensors that an operation absorbs."""
    from mergestream.merging.step import Step

    original, names = Step.absorb, []

    def absorb(self: Step, *arguments: Any) -> Any:
        names.append(arguments[-1])
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "absorb", absorb)
        operation()
    return names


def every_death(
    start: Path, work: Path, operation: Callable[..., None], *arguments: Path, check: Callable[[Path], None]
) -> int:
    """Let an operation die at each of its changes, on a fresh copy of ``start``; returns how many there are."""
    for number in range(1, 1000):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(start, work)
        died = dies(number, operation, work, *arguments)
        check(work)
        if not died:
            return number - 1
    raise AssertionError("it never succeeds")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    """Experts in factors, whose states share files with those of earlier steps."""
    place = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    modules = {"layers.0.q": (12, 12), "layers.1.q": (12, 12), "layers.0.up": (20, 12)}
    base = save_model(place / "base", {f"{name}.weight": torch.randn(shape) for name, shape in modules.items()})
    for number in range(1, 5):
        adapter = place / f"adapter-{number}"
        factors = {}
        for name, (rows, columns) in modules.items():
            factors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(2, columns)
            factors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, 2) * 0.1
        adapter.mkdir()
        save_file(factors, adapter / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q", "up"], "bias": "none"}
        (adapter / "adapter_config.json").write_text(json.dumps(config))
    return Toys(base, [place / f"adapter-{number}" for number in range(1, 5)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["toys", "adapters"])
def test_add_killed_at_every_change_of_the_disk(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    toys = request.getfixturevalue(kind)
    _, _, third, fourth = toys.experts
    start = make_store(tmp_path / "start", toys, 2)
    expected_third = make_store(tmp_path / "three", toys, 3)
    expected_fourth = make_store(tmp_path / "four", toys, 4)
    merged_tensors = [n for n, t in Store(start).manifest.base.tensors.items() if t.merges]
    resumed = set()

    def check(store: Path) -> None:
        opened = Store(store, engine=one_worker())
        opened.verify()
        assert opened.manifest.step in (2, 3)
        for back in (1, 2) if opened.manifest.step == 3 else ():  # what is left of earlier steps is whole
            copy = shutil.copytree(store, tmp_path / "back")
            try:
                earlier = Store(copy, engine=one_worker())
                for _ in range(back):
                    earlier.undo()
                earlier.verify()
            except MergestreamError as error:
                assert "used up" in str(error)
            shutil.rmtree(copy)
        if opened.manifest.step == 2:
            finished = journaled(store, 3)
            again = absorbed_by(monkeypatch, lambda: opened.add(third))
            assert sorted(again) == sorted(set(merged_tensors) - finished)
            resumed.add(len(finished))
            assert state(store) == state(expected_third)
        opened.add(fourth)
        opened.verify()
        assert state(store) == state(expected_fourth)
        assert sorted(path.name for path in (store / "steps").iterdir()) == ["0003", "0004"], "nothing is left over"

    deaths = every_death(start, tmp_path / "store", add, third, check=check)
    assert deaths > len(merged_tensors)
    assert len(resumed) >= len(merged_tensors), "resumed after any number of tensors"


@pytest.mark.slow
def test_undo_killed_at_every_change_of_the_disk(tmp_path: Path, toys: Toys) -> None:
    first, _, third, _ = toys.experts
    start = make_store(tmp_path / "start", toys, 2)
    other = Store.create(tmp_path / "other", toys.base, OPCM(), engine=one_worker())
    other.add(first)
    after_undo = state(other.path)
    other.add(third)

    def check(store: Path) -> None:
        opened = Store(store, engine=one_worker())
        opened.verify()
        assert opened.manifest.step in (1, 2)
        if opened.manifest.step == 2:
            opened.undo()
            assert state(store) == after_undo
        opened.add(third)
        opened.verify()
        assert state(store) == state(other.path)

    assert every_death(start, tmp_path / "store", undo, check=check) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("replaces", [False, True])
def test_export_killed_at_every_change_of_the_disk(replaces: bool, tmp_path: Path, toys: Toys) -> None:
    store = make_store(tmp_path / "store", toys, 1)
    export(store, tmp_path / "old-model")
    Store(store, engine=one_worker()).add(toys.experts[1])
    export(store, tmp_path / "new-model")
    before, old, new = files(store), files(tmp_path / "old-model"), files(tmp_path / "new-model")
    place = tmp_path / "outputs"
    seen = set()
    for number in range(1, 1000):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        if replaces:
            shutil.copytree(tmp_path / "old-model", place / "model")
        died = dies(number, export, store, place / "model")
        assert files(store) == before
        assert (place / "model").exists() or not replaces, "the old one stays until the new one is there"
        if (place / "model").exists():
            seen.add("old" if files(place / "model") == old else "new")
            assert files(place / "model") in (old, new), "never half a model"
        export(store, place / "model")
        assert files(place / "model") == new
        assert [path.name for path in place.iterdir()] == ["model"], "nothing is left over"
        if not died:
            break
    assert number > len(Store(store).manifest.base.tensors)
    assert seen == ({"old", "new"} if replaces else {"new"})


def test_an_init_that_fails_at_the_last_flush_leaves_no_store(
    tmp_path: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:

        def fail(self: LocalStorage, folder: str = "") -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        broken.setattr(LocalStorage, "sync", fail)
        with pytest.raises(MergestreamError, match="store cannot be made: Input/output error"):
            Store.create(tmp_path / "store", toys.base, OPCM())
    assert not (tmp_path / "store" / "manifest.json").exists()
    assert Store.create(tmp_path / "store", toys.base, OPCM()).history == ()


def test_init_killed_at_every_change_of_the_disk_can_be_run_again(tmp_path: Path, toys: Toys) -> None:
    for number in range(1, 100):
        store = tmp_path / f"store-{number}"
        died = dies(number, create, store, toys.base)
        if not (store / "manifest.json").exists():
            create(store, toys.base)
        Store(store).verify()
        if not died:
            break
    assert number > 3


def create(store: Path, base: Path) -> None:
    Store.create(store, base, OPCM(), engine=one_worker())


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    """Enough work that a kill after some milliseconds hits all of its phases."""
    place = tmp_path_factory.mktemp("larger")
    generator = torch.Generator().manual_seed(0)
    base = {f"layers.{i}.weight": torch.randn(96, 96, generator=generator) for i in range(24)}
    return Toys(
        save_model(place / "base", base),
        [save_model(place / f"expert-{n}", toy_expert(n, base)) for n in (1, 2, 3)],
    )


def add_with_two_workers(store: Path, expert: Path) -> None:
    Store(store, engine=LocalEngine(workers=2)).add(expert)


@pytest.mark.slow
def test_add_killed_after_any_time_goes_on_to_the_same_bytes(tmp_path: Path, larger: Toys) -> None:
    expected = make_store(tmp_path / "expected", larger, 3)
    store = make_store(tmp_path / "store", larger, 1)
    delay = 0.0
    kills = 0
    for step, expert in enumerate(larger.experts[1:], 2):
        while Store(store).manifest.step < step:
            child = children.Process(target=add_with_two_workers, args=(store, expert))
            child.start()
            time.sleep(delay)
            child.kill()
            child.join()
            kills += child.exitcode == -signal.SIGKILL
            delay += 0.02
            Store(store).verify()
        delay = 0.01
    assert kills > 2
    assert state(store) == state(expected)


@pytest.mark.slow
def test_the_command_line_is_killed_and_resumes(tmp_path: Path, larger: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path / "store", larger, 1)
    expected = make_store(tmp_path / "expected", larger, 2)
    command: list[str | Path] = [sys.executable, "-m", "mergestream", "add", store, larger.experts[1], "--workers", "2"]
    journal = store / "steps" / "0002" / "journal"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and (not journal.exists() or journal.read_text().count("\n") < 3):
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    finished = journaled(store, 2)
    assert len(finished) >= 3
    again = absorbed_by(monkeypatch, lambda: Store(store).add(larger.experts[1]))
    assert len(again) == 24 - len(finished)
    assert state(store) == state(expected)


def test_a_step_that_was_cut_short_is_not_taken_for_another_expert(tmp_path: Path, toys: Toys) -> None:
    _, _, third, fourth = toys.experts
    store = make_store(tmp_path / "store", toys, 2)
    cut_short(store, third)
    add(store, fourth)
    other = make_store(tmp_path / "other", toys, 2)
    add(other, fourth)
    Store(store).verify()
    assert state(store) == state(other)


def test_a_step_that_was_cut_short_goes_on_where_the_base_is_given_again(
    tmp_path: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by ``add --base``, which tells the store where its base is before it resumes."""
    _, _, third, _ = toys.experts
    store = make_store(tmp_path / "store", toys, 2)
    expected = make_store(tmp_path / "expected", toys, 3)
    finished = cut_short(store, third)
    opened = Store(store, engine=one_worker())
    opened.relocate(shutil.copytree(toys.base, tmp_path / "base"))
    again = absorbed_by(monkeypatch, lambda: opened.add(third))
    assert again and not finished & set(again)
    assert state(store) == state(expected)


def test_an_expert_that_changed_after_the_kill_is_read_again(tmp_path: Path, toys: Toys) -> None:
    expert = save_model(tmp_path / "expert", toy_expert(3))
    store = make_store(tmp_path / "store", toys, 2)
    cut_short(store, expert)
    save_model(expert, toy_expert(5))
    add(store, expert)
    other = make_store(tmp_path / "other", toys, 2)
    add(other, expert)
    assert state(store) == state(other)


def test_damage_to_what_was_cut_short_is_noticed_and_done_again(tmp_path: Path, toys: Toys) -> None:
    _, _, third, _ = toys.experts
    store = make_store(tmp_path / "store", toys, 2)
    expected = make_store(tmp_path / "expected", toys, 3)
    cut_short(store, third, finished=3)
    step = store / "steps" / "0003"
    written = bytearray((step / "model.safetensors").read_bytes())
    written[-400:] = bytes(400)
    (step / "model.safetensors").write_bytes(written)
    lines = (step / "journal").read_text().splitlines()
    damaged = lines[1].replace('"norm2": ', '"norm2": 1')
    garbage = ["", "[1, 2]", "null", "\0\0\0\0"]
    (step / "journal").write_text("\n".join([damaged, *garbage, *lines[2:], lines[-1][:20]]))
    add(store, third)
    Store(store).verify()
    assert state(store) == state(expected)
    assert Store(store).history[-1].norm == Store(expected).history[-1].norm
