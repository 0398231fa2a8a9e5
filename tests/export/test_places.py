"""Outputs never overwrite their inputs, and replace only earlier exports."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mergestream import Store
from mergestream.export import places as checks
from mergestream.storage import open_storage
from mergestream.store import manifest
from tests.conftest import RunCommand, files, save_model, toy_base, toy_expert


def is_export(directory: Path) -> bool:
    return checks.is_export(open_storage(directory))


def is_store(directory: Path) -> bool:
    return manifest.is_store(open_storage(directory))


class Places(NamedTuple):
    root: Path
    store: Path
    base: Path
    experts: list[Path]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A ledger of two experts that adapters can hold, with all models below ``tmp_path / models``."""
    models = tmp_path / "models"
    tensors = {
        name: tensor for name, tensor in toy_base().items() if name in ("layers.0.q.weight", "layers.0.up.weight")
    }
    base = save_model(models / "base", tensors)
    experts = [save_model(models / f"expert-{number}", toy_expert(number, tensors)) for number in (1, 2)]
    store = Store.create(tmp_path / "store", base)
    for expert in experts:
        store.add(expert)
    return Places(tmp_path, store.path, base, experts)


def exports(store: Path) -> list[tuple[object, ...]]:
    """Every way to export, but for the place."""
    forms = [("--format", "full"), ("--format", "lora", "--rank", "2"), ("--format", "loras", "--rank", "2")]
    return [("export", store, *form, "--overwrite", "--quiet") for form in forms]


def assert_refused(mergestream: Any, *arguments: object) -> str:
    result = mergestream(*arguments)
    assert result.code == 1 and result.out == "", result
    assert result.err.startswith("error: ") and result.err.count("\n") == 1, result.err
    error: str = result.err
    return error


def test_no_export_goes_onto_into_or_around_what_it_is_made_of(places: Places, mergestream: RunCommand) -> None:
    (places.root / "link").symlink_to(places.base)
    other = Store.create(places.root / "other-store", places.base).path
    before = files(places.root)
    onto = [places.store, places.base, places.experts[0], places.root / "link", other, f"{places.base}/../base/"]
    around = [places.root, places.base.parent, "/"]
    within = [
        *(places.store / "steps", places.store / "new", places.store / "experts" / "0001" / "deep" / "er"),
        *(places.base / "new", places.root / "link" / "new", places.experts[1] / "new", other / "new"),
    ]
    for command in exports(places.store):
        for out in (*onto, *around, *within):
            assert_refused(mergestream, *command[:2], out, *command[2:])
    merge = ("merge", "--base", places.base, *places.experts, "--method", "average", "--overwrite", "-o")
    for out in (*onto, *around, *within):
        assert_refused(mergestream, *merge, out)
    assert files(places.root) == before


def test_an_export_that_has_become_a_base_or_an_expert_is_safe(
    places: Places, done: Callable[..., str], mergestream: RunCommand
) -> None:
    """It can be recognised as an export, and still is what another merge is made of."""
    done("export", places.store, places.root / "merged", "--quiet")
    merged = places.root / "merged"
    based = Store.create(places.root / "based", merged).path
    done("add", based, places.experts[0], "--quiet")
    grown = Store.create(places.root / "grown", places.base).path
    done("add", grown, merged, "--quiet")
    shutil.copytree(merged, places.root / "around")
    Store.create(places.root / "around" / "deep" / "store", places.base)
    for store in (based, grown):
        assert "merged is " in assert_refused(mergestream, "export", store, merged, "--overwrite", "--quiet")
        assert "holds the store" in assert_refused(mergestream, "export", store, places.root / "around", "--overwrite")


def test_nothing_but_exports_is_replaced(places: Places, done: Callable[..., str], mergestream: RunCommand) -> None:
    precious = save_model(places.root / "precious", {})
    (precious / "README.md").write_text("---\ntags:\n- merge\n---\n\n- mergestream\n")
    (precious / "mergestream.json").write_text("{}")
    before = files(places.root)
    for command in exports(places.store):
        assert "no export of mergestream" in assert_refused(mergestream, *command[:2], precious, *command[2:])
    assert files(places.root) == before
    for number, command in enumerate(exports(places.store)):
        out = places.root / f"out-{number}"
        out.mkdir()
        done(*command[:2], out, *[word for word in command[2:] if word != "--overwrite"])  # an empty one is free
        assert is_export(out)
        done(*command[:2], out, *command[2:])


def test_an_output_behind_a_link_is_written_there(
    places: Places, done: Callable[..., str], mergestream: RunCommand
) -> None:
    elsewhere, link = places.root / "elsewhere", places.root / "link"
    link.symlink_to(elsewhere)
    done("export", places.store, link, "--quiet")
    assert is_export(elsewhere)
    (elsewhere / "stale").touch()
    assert "--overwrite" in assert_refused(mergestream, "export", places.store, link, "--quiet")
    done("export", places.store, link, "--overwrite", "--quiet")
    assert link.is_symlink() and not (elsewhere / "stale").exists()
    assert not list(places.root.glob(".*"))
    loop = places.root / "loop"
    loop.symlink_to(loop)
    for out in (loop, loop / "deeper", places.root / ("x" * 250), places.root / ("x" * 300)):
        assert_refused(mergestream, "export", places.store, out, "--quiet")


def test_a_link_in_the_place_of_a_draft_is_not_followed(places: Places, mergestream: RunCommand) -> None:
    (places.root / "precious").mkdir()
    (places.root / "precious" / "file").touch()
    (places.root / ".merged.mergestream").symlink_to(places.root / "precious")
    assert "is a link" in assert_refused(mergestream, "export", places.store, places.root / "merged", "--quiet")
    assert files(places.root / "precious") == {"file": b""}


def test_a_report_replaces_a_report_and_nothing_else(
    places: Places, done: Callable[..., str], mergestream: RunCommand
) -> None:
    os.mkfifo(places.root / "pipe")
    (places.root / "link").symlink_to(places.root / "target")
    (places.root / "dangling").symlink_to(places.root / "nowhere")
    (places.root / "target").write_text("precious")
    (places.root / "into").symlink_to(places.store)
    done("report", places.store, "-o", places.root / "report.md")
    report = (places.root / "report.md").read_bytes()
    (places.root / "report.md").write_bytes(b"older")
    done("report", places.store, "-o", places.root / "report.md")
    assert (places.root / "report.md").read_bytes() == report
    before = {name: data for name, data in files(places.root).items() if name != "pipe"}
    for out in (
        *(places.store / "manifest.json", places.store / "new.json", places.root / "into" / "manifest.json"),
        *(places.store, places.base, places.base / "config.json", places.experts[0] / "model.safetensors"),
        *(places.root / "pipe", places.root / "link", places.root / "dangling", places.root / "none" / "report.md"),
        Path("/dev/null"),
    ):
        for form in ("json", "md", "html"):
            assert_refused(mergestream, "report", places.store, "-o", out, "--format", form)
    assert {name: data for name, data in files(places.root).items() if name != "pipe"} == before
    assert Path("/dev/null").is_char_device()


def test_a_store_is_known_by_its_manifest(places: Places, tmp_path: Path) -> None:
    assert is_store(places.store) and not is_store(places.base) and not is_store(tmp_path / "nowhere")
    (places.store / "manifest.json").write_text("{damaged")
    assert is_store(places.store)
    (tmp_path / "manifest.json").write_text(json.dumps({"name": "of a web page", "icons": []}))
    assert not is_store(tmp_path)
