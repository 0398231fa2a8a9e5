"""Convolutions in a ledger: kept as well as linear weights, and averaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mergestream import Ledger, Store
from mergestream.checkpoints import open_checkpoint

diffusers = pytest.importorskip("diffusers")

UNET = {
    "sample_size": 8,
    "layers_per_block": 1,
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "norm_num_groups": 4,
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
}


def change(weight: Tensor, rank: int | None) -> Tensor:
    matrix = weight.flatten(1)
    if rank is None:
        return 0.01 * torch.randn(weight.shape)
    left, right = torch.randn(len(matrix), rank), torch.randn(rank, matrix.shape[1])
    low_rank: Tensor = 0.02 * (left @ right / matrix.shape[1] ** 0.5).reshape(weight.shape)
    return low_rank


@pytest.mark.parametrize(("rank", "largest"), [(2, 0.005), (None, 0.87)], ids=["low rank", "noise"])
def test_a_unet_comes_back_as_well_as_its_linear_weights(tmp_path: Path, rank: int | None, largest: float) -> None:
    torch.manual_seed(0)
    base = diffusers.UNet2DConditionModel(**UNET)
    base.save_pretrained(tmp_path / "base")
    store = Store.create(tmp_path / "store", tmp_path / "base", Ledger())
    with torch.no_grad():
        for weight in base.parameters():
            weight += change(weight, rank) if weight.ndim > 1 else 0.1 * torch.randn(weight.shape)
    base.save_pretrained(tmp_path / "expert")
    store.add(tmp_path / "expert")
    again = open_checkpoint(store.export(tmp_path / "again", readout="expert:expert"))
    before, after = open_checkpoint(tmp_path / "base"), open_checkpoint(tmp_path / "expert")
    errors: dict[int, list[float]] = {1: [], 2: [], 4: []}
    for name, info in before.tensors.items():
        wanted, found = (one.read(name) - before.read(name) for one in (after, again))
        if min(info.shape[0], info.numel // info.shape[0]) >= 32:
            errors[len(info.shape)].append(float((found - wanted).norm() / wanted.norm()))
    assert max(errors[4]) < largest
    assert sum(errors[4]) / len(errors[4]) < 1.02 * sum(errors[2]) / len(errors[2])
    model = store.manifest.base
    assert {model.tensors[name].role for name, info in before.tensors.items() if len(info.shape) == 4} == {"other"}
