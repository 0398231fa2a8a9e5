"""``--json``: every command prints its result, the notes and any error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunCommand, Toys, save_model, toy_base, toy_expert


@pytest.fixture
def store(tmp_path: Path, toys: Toys, done: Callable[..., str]) -> Path:
    done("init", tmp_path / "store", "--base", toys.base)
    done("add", tmp_path / "store", *toys.experts[:2])
    return tmp_path / "store"


@pytest.fixture
def run_json(mergestream: RunCommand) -> Any:
    """Runs a command with --json and returns its exit code and the parsed output."""

    def run(*words: object) -> tuple[int, Any]:
        result = mergestream(*words, "--json")
        return result.code, json.loads(result.out)

    return run


def far_expert(place: Path) -> Path:
    """An expert with a note, because it is much larger than the others."""
    expert = toy_expert(8)
    far = {name: tensor + 12 * (expert[name] - tensor) for name, tensor in toy_base().items() if tensor.dim() > 1}
    return save_model(place, expert | far)


def test_every_command_prints_one_object_with_notes(store: Path, toys: Toys, tmp_path: Path, run_json: Any) -> None:
    commands: dict[str, tuple[tuple[object, ...], set[str]]] = {
        "init": ((tmp_path / "new", "--base", toys.base), {"method", "parameters", "base", "counts"}),
        "inspect": ((store, toys.experts[2]), {"norm", "kept", "tensors"}),
        "status": ((store,), {"step", "experts", "method"}),
        "verify": ((store,), {"store", "step"}),
        "keep": ((store, 3), {"store", "keep"}),
        "export": ((store, tmp_path / "exported"), {"out", "format", "method", "readout", "experts"}),
        "merge": (("--base", toys.base, *toys.experts, "-o", tmp_path / "merged"), {"out", "method", "experts"}),
        "report": ((store,), {"method", "experts", "verdict"}),
        "diff": ((store, 1, 2), {"total", "layers"}),
        "remove": ((store, "expert-1"), {"name", "digest"}),
        "undo": ((store,), {"store", "step", "undone"}),
    }
    for name, (words, keys) in commands.items():
        code, data = run_json(name, *words)
        assert code == 0 and data["notes"] == [] and keys <= data.keys(), (name, data)
    assert run_json("report", store, "-o", tmp_path / "report.html")[1]["format"] == "html"
    assert run_json("report", store, "--format", "md")[1]["text"].startswith("#")
    assert (tmp_path / "report.html").is_file()


def test_items_of_a_list_have_their_own_notes(store: Path, toys: Toys, tmp_path: Path, run_json: Any) -> None:
    large = far_expert(tmp_path / "large")
    (inspected,) = run_json("add", store, large, "--dry-run")[1]
    code, added = run_json("add", store, toys.experts[3], large)
    assert code == 0 and added[0]["notes"] == [] and "outweighs" in added[1]["notes"][0]
    code, log = run_json("log", store)
    assert code == 0 and [entry["notes"] for entry in log[-2:]] == [[], added[1]["notes"]]
    assert "outweighs" in inspected["notes"][0] and len(inspected["notes"]) == 1


def test_notes_after_the_commit_are_in_json_even_if_quiet(
    store: Path, toys: Toys, run_json: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "worn out", "a disk")

    monkeypatch.setattr("mergestream.store.transaction.delete_unused", fail)
    code, (added,) = run_json("add", store, toys.experts[2], "--quiet")
    assert code == 0 and "could not be deleted: worn out" in added["notes"][0]
    code, undone = run_json("undo", store)
    assert code == 0 and "could not be deleted" in undone["notes"][0]


def test_a_refused_gate_gives_its_reasons(store: Path, toys: Toys, run_json: Any, mergestream: RunCommand) -> None:
    words = ("add", store, *toys.experts[2:], "--gate", "norm<=0.001", "--gate", "held>=2")
    code, (refused,) = run_json(*words)
    assert (code, refused["kind"]) == (4, "gate") and len(refused["reasons"]) == 2
    assert refused["error"] == "; ".join(refused["reasons"])
    assert all("was not added" in reason for reason in refused["reasons"])
    assert [f"error: {reason}" for reason in refused["reasons"]] == mergestream(*words, "--json").err.splitlines()


def test_add_prints_a_list_even_without_a_store(toys: Toys, tmp_path: Path, run_json: Any) -> None:
    code, (failed,) = run_json("add", tmp_path / "nowhere", toys.experts[0])
    assert code == 1 and "nowhere" in failed["error"]


@pytest.mark.parametrize(
    ("words", "code", "kind", "part"),
    [
        (("status", "nowhere"), 1, "input", "nowhere"),
        (("remove", "STORE", "nobody"), 2, "usage", "nobody"),
        (("export", "STORE"), 2, "usage", "OUT"),
        (("export", "STORE", "out", "--overwite"), 2, "usage", "did you mean --overwrite"),
        (("expot", "STORE"), 2, "usage", "did you mean export"),
        (("watch", "STORE", "nowhere"), 1, "system", "No such file or directory"),
    ],
)
def test_json_contains_the_error(
    words: Any, code: int, kind: str, part: str, store: Path, mergestream: RunCommand, run_json: Any
) -> None:
    given = [store if word == "STORE" else word for word in words]
    found, data = run_json(*given)
    assert (found, data["kind"]) == (code, kind) and part in data["error"] and data["notes"] == []
    assert f"error: {data['error']}\n" == mergestream(*given).err


def test_json_may_be_abbreviated_and_affects_one_command(store: Path, mergestream: RunCommand) -> None:
    result = mergestream("verify", store, "--js")
    assert result.code == 0 and json.loads(result.out)["step"] == 2, "an option may be abbreviated"
    assert "all digests match" in mergestream("verify", store).out, "the next command prints text"
    assert mergestream("status", "--", "--json").err.startswith("error: "), "after -- it is the name of a store"
