"""Which base an expert was made from: by its weights, or by the model that an adapter names."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import mergestream
from mergestream import Average, MergestreamError, MergestreamWarning, Store
from mergestream.checkpoints import open_checkpoint
from tests.conftest import RunCommand, Toys, save_model, toy_base, toy_expert
from tests.handmade import handmade_adapter

LLAMA = {"model_type": "llama", "hidden_size": 8, "torch_dtype": "float32"}


def model(directory: Path, seed: int | None = None, **config: object) -> Path:
    """The toy base, or another model of its form, with a configuration."""
    save_model(directory, toy_base() if seed is None else stranger(seed))
    (directory / "config.json").write_text(json.dumps({**LLAMA, **config}))
    return directory


def stranger(seed: int = 99) -> dict[str, torch.Tensor]:
    """Of the same form, but never made from the base."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(tensor.shape, generator=generator) * 0.1).to(tensor.dtype)
        for name, tensor in toy_base().items()
    }


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return Store.create(tmp_path / "store", model(tmp_path / "base"), Average())


def adapter_of(named: object, place: Path) -> Path:
    return handmade_adapter(place / "adapter", 1, base_model_name_or_path=named)


def test_a_model_that_was_not_made_from_the_base_is_refused_unless_it_is_allowed(store: Any, tmp_path: Path) -> None:
    path = save_model(tmp_path / "stranger", stranger())
    with pytest.raises(MergestreamError, match=r"not fine-tuned from this base.*1\.\d\d times.*--allow-other-base"):
        store.add(path)
    assert store.history == ()
    with pytest.warns(MergestreamWarning, match="not fine-tuned from this base"):
        entry = store.add(path, allow_other_base=True)
    assert "not fine-tuned from this base" in entry.notes[0] and entry == Store(store.path).history[0]
    assert entry.options["allow_other_base"] and "allow_duplicate" not in entry.options


def test_a_part_of_such_a_model_is_refused_too(store: Any, tmp_path: Path) -> None:
    tensors = stranger()
    path = save_model(tmp_path / "part", {name: tensors[name] for name in ("layers.0.q.weight", "layers.0.up.weight")})
    with pytest.raises(MergestreamError, match="--allow-other-base"):
        store.add(path, partial=True)


def test_one_unchanged_matrix_proves_the_base(store: Any, tmp_path: Path) -> None:
    kept = {"layers.0.q.weight": toy_expert(1)["layers.0.q.weight"]}
    entry = store.add(save_model(tmp_path / "retrained", {**stranger(), **kept}))
    assert not entry.notes and not entry.options.get("allow_other_base")


@pytest.mark.parametrize("method", ["average", "opcm"])  # of which only the second passes through a store
def test_a_merge_refuses_it_as_well(method: str, tmp_path: Path, toys: Toys, mergestream: RunCommand) -> None:
    path = save_model(tmp_path / "stranger", stranger())
    words = ("merge", "--base", toys.base, "--method", method, toys.experts[0], path, "-o", tmp_path / "out")
    refused = mergestream(*words)
    assert refused.code == 1 and "--allow-other-base" in refused.err and not (tmp_path / "out").exists()
    allowed = mergestream(*words, "--allow-other-base")
    assert allowed.code == 0 and "note: " in allowed.err and (tmp_path / "out").is_dir()


def test_an_adapter_of_another_model_that_is_called_the_same_is_refused(store: Any, tmp_path: Path) -> None:
    named, difference = model(tmp_path / "elsewhere" / "base", seed=5), "has other values there"
    path = adapter_of(str(named), tmp_path)
    with pytest.raises(MergestreamError, match=rf"was made for \S*base, which is not the base.*{difference}.*--allow-"):
        store.add(path)
    with pytest.warns(MergestreamWarning, match=difference):
        assert store.add(path, allow_other_base=True).options["allow_other_base"]


def test_shapes_are_compared_where_there_is_no_configuration(store: Any, tmp_path: Path) -> None:
    named = save_model(tmp_path / "named", {**toy_base(), "embed_tokens.weight": torch.ones(25, 8)})
    with pytest.raises(MergestreamError, match=r"embed_tokens.weight has the shape \[25, 8\] there and \[24, 8\] here"):
        store.add(adapter_of(str(named), tmp_path))


def test_a_copy_of_the_base_is_the_base(store: Any, tmp_path: Path) -> None:
    copies = [tmp_path / "base", shutil.copytree(tmp_path / "base", tmp_path / "copy"), tmp_path / "link"]
    copies[2].symlink_to(tmp_path / "base")
    (tmp_path / "copy" / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": "float16", "eos_token_id": 3}))
    for number, named in enumerate(copies):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store.add(handmade_adapter(tmp_path / f"{number}", number, base_model_name_or_path=str(named)))
    assert not any(entry.notes for entry in store.history)


def test_a_base_that_has_moved_is_still_the_base(store: Any, tmp_path: Path) -> None:
    moved = (tmp_path / "base").rename(tmp_path / "moved")
    store.relocate(moved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry = store.add(adapter_of(str(moved), tmp_path))
    assert not entry.notes and store.history == (entry,)


@pytest.mark.parametrize(
    "named", [None, "org/model", "/somewhere/else/model", "other", "", "~nobody/model", "a\0b", "x" * 5000, "\x1b[2J"]
)
def test_an_unknown_base_is_noted_and_the_shapes_decide(
    named: Any, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.warns(MergestreamWarning, match=r"cannot be compared|does not say which model"):
        entry = store.add(adapter_of(named, tmp_path))
    assert entry.notes and not entry.options.get("allow_other_base")


@pytest.mark.parametrize("named", ["base", "/somewhere/else/base", "org/Base", "org/base@main"])
def test_a_base_of_the_same_name_elsewhere_is_not_noted(
    named: str, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not store.add(adapter_of(named, tmp_path)).notes


@pytest.mark.parametrize("named", [{"quantization_config": {"bits": 4}}, {"dtype": torch.float16}, {"weights": None}])
def test_what_cannot_be_compared_bit_by_bit_is_noted(named: Any, store: Any, tmp_path: Path) -> None:
    place = model(tmp_path / "named", quantization_config=named.get("quantization_config"))
    if "dtype" in named:
        half = {n: t.half() if t.is_floating_point() else t for n, t in toy_base().items()}
        save_model(place, half)
    elif "weights" in named:
        (place / "model.safetensors").unlink()
    with pytest.warns(MergestreamWarning, match="cannot be compared"):
        store.add(adapter_of(str(place), tmp_path))


def test_a_hub_id_is_compared_without_its_commit(store: Any, tmp_path: Path) -> None:
    import dataclasses

    base = dataclasses.replace(store.manifest.base, source="Org/Model@0123abc")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mergestream.store.Manifest, "open_base", lambda self: open_checkpoint(tmp_path / "base"))
        dataclasses.replace(store.manifest, base=base).save(store.storage)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            entry = Store(store.path).add(adapter_of("org/model", tmp_path))
    assert not entry.notes


def test_notes_are_in_every_output(store: Any, tmp_path: Path, mergestream: RunCommand) -> None:
    path = adapter_of("org/unknown", tmp_path)
    inspected = json.loads(mergestream("inspect", store.path, path, "--json", "--quiet").out)
    added = mergestream("add", store.path, path, "--json", "--quiet")
    assert added.code == 0 and added.err == ""
    note = "was made for org/unknown, which cannot be compared"
    assert note in inspected["notes"][0] and note in json.loads(added.out)[0]["notes"][0]
    assert note in mergestream("log", store.path).out
    assert note in json.loads(mergestream("log", store.path, "--json").out)[0]["notes"][0]
    for form in ("md", "json", "html"):
        out = tmp_path / f"report.{form}"
        assert mergestream("report", store.path, "-o", out).code == 0
        assert note in out.read_text()
