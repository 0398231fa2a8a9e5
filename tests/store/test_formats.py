"""Stores that an earlier version made still open, verify and go on to what that version would have made of them."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mergestream import MergestreamError, Store
from mergestream.base.model import BaseModel
from mergestream.report.facts import Facts
from tests.conftest import files

ARCHIVE = Path(__file__).parent.parent / "fixtures" / "format-1.tar.gz"
NAMES = ["opcm", "ties", "average", "adapters"]
BITWISE = ["ties", "average"]
"""Elementwise methods: the others multiply matrices, and BLAS rounds differently on other processors."""

every_store = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "format-1"


def third(place: Path, name: str) -> Path:
    """The expert that the earlier version has added to a copy of the store."""
    return place / ("adapter-3" if name == "adapters" else "expert-3")


def moved(place: Path, name: str) -> Store:
    """The store, told where its base is now."""
    store = Store(place / name)
    store.relocate(place / "base")
    return store


def written_format(store: Path) -> int:
    found: int = json.loads((store / "manifest.json").read_text())["format"]
    return found


def assert_same_model(found: Path, expected: Path, name: str) -> None:
    ours, theirs = load_file(found / "model.safetensors"), load_file(expected / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        if name in BITWISE or not tensor.is_floating_point():
            assert torch.equal(ours[key], tensor), key
        torch.testing.assert_close(ours[key], tensor, rtol=1e-5, atol=1e-6)


@every_store
def test_all_that_it_remembers_is_read_and_nothing_written(name: Any, place: Path) -> None:
    before = files(place / name)
    assert written_format(place / name) == 1
    store = Store(place / name)
    experts = ["adapter-1", "adapter-2"] if name == "adapters" else ["expert-1", "expert-2"]
    assert [entry.name for entry in store.history] == experts
    assert all(entry.norm > 0 and entry.direction_norm is not None for entry in store.history)
    facts = json.loads(json.dumps(Facts.of(store).to_json(), allow_nan=False))
    assert [expert["name"] for expert in facts["experts"]] == experts
    assert files(place / name) == before


def test_sketches_of_earlier_versions_are_ignored(place: Path) -> None:
    store = moved(place, "opcm")
    sketch = store.path / "experts/0001/sketch.safetensors"
    sketch.write_bytes(b"damaged")
    store.add(third(place, "opcm"))
    store.verify()
    assert sketch.is_file() and not (store.path / "experts/0003/sketch.safetensors").exists()


def test_the_globs_that_the_base_was_examined_with_are_told_from_the_rules(place: Path) -> None:
    base = Store(place / "opcm").manifest.base
    assert (base.linear, base.not_linear, base.heads) == ((), ("layers.0.up.*",), ())
    assert {name for name, tensor in base.tensors.items() if tensor.module is not None} == set()
    assert Store(place / "average").manifest.base.heads == ("layers.0.norm.*",)
    assert Store(place / "ties").manifest.base.not_linear == ()


def test_what_else_the_rules_tell_is_told_from_them(place: Path) -> None:
    data = json.loads((place / "opcm" / "manifest.json").read_text())["base"]
    rules = {
        "layers.0.q.weight": "--linear *.q.*",
        "layers.0.down.weight": "Conv1D in GPT2LMHeadModel",
        "layers.0.down.bias": "bias of Conv1D in GPT2LMHeadModel",
        "half.weight": "torch.nn.Conv2d in CLIPModel",
        "double.weight": "2-D *.weight, not in GPT2LMHeadModel",
    }
    for name, rule in rules.items():
        data["tensors"][name]["rule"] = rule
    base = BaseModel.from_json(data, Path("manifest.json"))
    assert (base.linear, base.not_linear) == (("*.q.*",), ("layers.0.up.*",))
    assert base.conv1d == {"layers.0.down.weight"}
    assert [base.tensors[name].module for name in rules] == [None, "Conv1D", None, "torch.nn.Conv2d", None]


def test_scores_are_still_attached_to_the_steps_that_they_belong_to(place: Path) -> None:
    store = moved(place, "opcm")
    scores = store.scores
    assert scores is not None and scores.matrix == ((0.5, 0.25), (0.75, 0.5))
    store.undo()
    scores = store.scores
    assert scores is not None and scores.matrix == ((0.5, 0.25),)
    assert Store(place / "ties").scores is None


def test_heads_are_still_those_of_their_experts(place: Path, tmp_path: Path) -> None:
    store = moved(place, "average")
    head = "layers.0.norm.weight"
    for expert in ("expert-1", "expert-2"):
        exported = load_file(store.export(tmp_path / expert, task=expert) / "model.safetensors")
        assert torch.equal(exported[head], load_file(place / expert / "model.safetensors")[head])


@every_store
def test_it_verifies_exports_the_same_and_goes_on_to_the_same(name: Any, place: Path, tmp_path: Path) -> None:
    store = moved(place, name)
    store.verify()
    assert_same_model(store.export(tmp_path / "merged"), place / f"{name}-merged", name)
    store.add(third(place, name))
    assert written_format(store.path) == 3
    again = Store(store.path)
    again.verify()
    assert again.history == store.history and len(again.history) == 3
    assert_same_model(again.export(tmp_path / "later"), place / f"{name}-merged-later", name)
    assert len(Facts.of(again).to_json()["experts"]) == 3


@every_store
def test_undo_goes_back_behind_what_the_earlier_version_did(name: Any, place: Path, tmp_path: Path) -> None:
    store = moved(place, name)
    first, second = store.history
    state = files(store.path / "steps" / "0002")
    assert store.undo() == second
    store.verify()
    assert store.history == (first,)
    store.add(place / second.name)
    store.verify()
    if name in BITWISE:
        assert files(store.path / "steps" / "0002") == state
    assert_same_model(store.export(tmp_path / "merged"), place / f"{name}-merged", name)


@every_store
def test_an_edited_manifest_is_refused(name: Any, place: Path) -> None:
    path = place / name / "manifest.json"
    path.write_text(path.read_text().replace('"keep": 1', '"keep": 2'))
    with pytest.raises(MergestreamError, match="damaged or was edited"):
        Store(place / name)


@every_store
def test_a_damaged_step_is_found(name: Any, place: Path) -> None:
    store = moved(place, name)
    path = place / name / "steps" / "0002" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(MergestreamError, match="is damaged"):
        store.verify()
