"""Experts that are a part of the base, such as one tower of CLIP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergestream import MergestreamWarning, Store
from mergestream.errors import MergestreamError
from tests.workshop import clip, transformers

TOWERS = {"vision_model": transformers.CLIPVisionModel, "text_model": transformers.CLIPTextModel}


def save_tower(place: Path, tower: str, prefix: str = "") -> Path:
    """A tower of the base that was fine-tuned alone; its class has had a prefix, depending on the version."""
    model = TOWERS[tower].from_pretrained(place / "base")
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    model.save_pretrained(place / "tower")
    tensors = {f"{prefix}{name.removeprefix(f'{tower}.')}": tensor for name, tensor in load(place / "tower").items()}
    save_file(tensors, place / "tower/model.safetensors", metadata={"format": "pt"})
    return place / "tower"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    clip().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("prefixed", [False, True])
def test_a_tower_goes_into_a_store_of_the_whole_model(tower: str, prefixed: bool, base: Path, tmp_path: Path) -> None:
    expert = save_tower(tmp_path, tower, f"{tower}." if prefixed else "")
    tensors = load(expert)
    store = Store.create(tmp_path / "store", base, method="task_arithmetic")
    with pytest.warns(MergestreamWarning, match="of the base stay unchanged, because CLIP.*Model has none"):
        store.add(expert)
    merged, theta = load_file(store.export(tmp_path / "merged", scale=1) / "model.safetensors"), load(base)
    assert merged.keys() == theta.keys()
    for name, tensor in merged.items():
        stored = tensors.get(name if prefixed else name.removeprefix(f"{tower}.")) if name.startswith(tower) else None
        assert torch.allclose(tensor, theta[name] if stored is None else stored, atol=1e-6), name
    assert not any(transformers.CLIPModel.from_pretrained(tmp_path / "merged", output_loading_info=True)[1].values())


def test_a_tower_without_its_config_needs_partial(base: Path, tmp_path: Path) -> None:
    expert = save_tower(tmp_path, "vision_model")
    (expert / "config.json").unlink()
    store = Store.create(tmp_path / "store", base)
    with pytest.raises(MergestreamError, match="to leave them unchanged, pass --partial"):
        store.add(expert)
    with pytest.warns(MergestreamWarning, match=r"its names get the prefix vision_model\. of the base"):
        store.add(expert, partial=True)
    assert store.history[0].norm > 0


def load(directory: Path) -> dict[str, Any]:
    return load_file(directory / "model.safetensors")
