"""Untrusted names are escaped, shortened and printed on one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mergestream import Store
from mergestream.progress import TerminalProgress
from mergestream.report.gates import Gate, GateError, check
from tests.conftest import RunCommand, Toys

HOSTILE = "a\n\x1b[31m\u202e<script>|`$\\frac$"


@pytest.fixture
def hostile(tmp_path: Path, toys: Toys) -> Store:
    """A store of experts from directories with hostile names, one of them very long."""
    store = Store.create(tmp_path / "store", toys.base)
    for place, name in zip(toys.experts, (HOSTILE, "n" * 250), strict=False):
        store.add(shutil.copytree(place, tmp_path / name))
    return store


def assert_plain(text: str) -> None:
    assert all(character.isprintable() or character == "\n" for character in text), text


def test_tables_and_lines_are_printable(hostile: Store, toys: Toys, done: Callable[..., str]) -> None:
    for command in ("log", "status", "inspect", "undo"):
        out = done(command, hostile.path, *([toys.experts[2]] if command == "inspect" else []))
        assert_plain(out)
        assert max(map(len, out.splitlines())) < 400
    assert r"a\n\x1b[31m" in done("log", hostile.path) and len(done("log", hostile.path).splitlines()) == 2


def test_json_has_the_original_names(hostile: Store, done: Callable[..., str]) -> None:
    out = done("log", hostile.path, "--json")
    assert_plain(out)
    assert [entry["name"] for entry in json.loads(out)] == [entry.name for entry in hostile.history]
    assert hostile.history[0].name == HOSTILE


def test_an_error_is_one_printable_line(tmp_path: Path, hostile: Store, mergestream: RunCommand) -> None:
    for words in (("status", tmp_path / HOSTILE), ("remove", hostile.path, HOSTILE[:-1]), ("export", "--\x1b[31m")):
        result = mergestream(*words)
        assert result.code and len(result.err.splitlines()) == 1 and len(result.err) < 1100
        assert_plain(result.err)


def test_each_failed_gate_is_exactly_one_line() -> None:
    gates = [Gate.parse("kept>=0.6"), Gate.parse("norm<=1")]
    with pytest.raises(GateError) as failed:
        check(gates, {"kept": 0.1, "norm": 2.0}, "dir/a\nerror: all is well")
    assert len(failed.value.sentences) == 2 and all("was not added" in line for line in failed.value.sentences)


def test_notes_are_one_printable_line(capsys: pytest.CaptureFixture[str]) -> None:
    TerminalProgress().note(f"{HOSTILE} [bold]:smile: " + "x" * 5000)
    err = capsys.readouterr().err
    assert_plain(err)
    assert err.startswith(r"note: a\n\x1b[31m\u202e<script>") and "[bold]:smile:" in err
    assert len(err.splitlines()) == 1 and len(err) < 1100


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "\x1b[31mred", "half \ud800", "txt.\u202eexe", "a/b", "..", "."])
def test_an_unusable_name_is_wrong_usage(name: str, tmp_path: Path, toys: Toys, mergestream: RunCommand) -> None:
    store = Store.create(tmp_path / "store", toys.base)
    result = mergestream("add", store.path, toys.experts[0], "--name", name)
    assert result.code == 2 and len(result.err.splitlines()) == 1
    assert not Store(store.path).history


def test_a_name_that_is_taken_is_numbered_and_noted(tmp_path: Path, toys: Toys, mergestream: RunCommand) -> None:
    store = Store.create(tmp_path / "store", toys.base)
    for number in (0, 1):
        shutil.copytree(toys.experts[number], tmp_path / str(number) / "law")
    result = mergestream("add", store.path, tmp_path / "0" / "law", tmp_path / "1" / "law")
    assert result.code == 0 and Store(store.path).manifest.names == ["law", "law-2"]
    assert "1/law is called law-2, because another expert has its name already" in result.err
    assert result.err.count("note: ") == 1


@pytest.mark.parametrize("last", ["missing", "bad.safetensors", "a=0", "expert-3=1"])
def test_all_experts_are_checked_before_the_first_is_added(
    last: str, tmp_path: Path, toys: Toys, mergestream: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(tmp_path / "store", toys.base)
    monkeypatch.chdir(tmp_path)
    Path("bad.safetensors").write_bytes(b"nonsense")
    for number in (0, 1):
        shutil.copytree(toys.experts[number], str(number))
    result = mergestream("add", store.path, f"a={toys.experts[1]}", shutil.copytree(toys.experts[2], "expert-3"), last)
    assert result.code == 1 and len(result.err.splitlines()) == 1
    assert not Store(store.path).history and not list((store.path / "steps").glob("*"))


def test_options_count_when_all_experts_are_checked(tmp_path: Path, toys: Toys, mergestream: RunCommand) -> None:
    store = Store.create(tmp_path / "store", toys.base)
    for number in (0, 1):
        tensors = load_file(toys.experts[number] / "model.safetensors")
        save_file(dict(sorted(tensors.items())[1:]), tmp_path / f"{number}.safetensors")
    words = ("add", store.path, tmp_path / "0.safetensors", tmp_path / "1.safetensors")
    assert mergestream(*words).code == 1
    assert mergestream(*words, "--partial").code == 0 and Store(store.path).manifest.step == 2


def test_a_base_that_is_remembered_is_said(tmp_path: Path, toys: Toys, mergestream: RunCommand) -> None:
    store = Store.create(tmp_path / "store", toys.base)
    moved = shutil.copytree(toys.base, tmp_path / "moved")
    words = ("add", store.path, toys.experts[0], "--base", moved)
    assert f"refers to the base at {moved} from now on, no longer at" in mergestream(*words).err
    assert "from now on" not in mergestream(*words, "--allow-duplicate").err


def test_init_counts_the_tensors(tmp_path: Path, toys: Toys, done: Callable[..., str]) -> None:
    counted = json.loads(done("init", tmp_path / "a", "--base", toys.base, "--json"))
    listed = json.loads(done("init", tmp_path / "b", "--base", toys.base, "--json", "--verbose"))
    assert "tensors" not in counted and sum(counted["counts"].values()) == len(listed["tensors"])
