"""What we write, PEFT loads: merged into the base it gives the sum that we meant."""

import json

import pytest
import torch

from mergestream import LocalEngine
from mergestream.algebra.lowrank import dense
from mergestream.checkpoints import TensorSpec, open_checkpoint
from mergestream.export.adapter_config import adapter_config
from mergestream.export.peft import AdaptedModule, write_adapter
from tests.workshop import bind, clip, gpt2, llama

KINDS = {"embed_tokens": "embedding", "wte": "embedding", "position_embedding": "embedding", "c_": "conv1d"}


def kind_of(name):
    return next((kind for part, kind in KINDS.items() if part in name), "linear")


def written(workshop, base, adapters, rank=None, whole=()):
    """The sum of some adapters, written by us: its directory, the sum, and what truncation lost."""
    bounds = [bind(adapter, base) for adapter in adapters]
    theta = open_checkpoint(base)
    names = [name for name in theta.tensors if any(bound.rank(name) for bound in bounds)]
    total = {
        name: sum((b.delta(name, torch.float64) for b in bounds[1:]), bounds[0].delta(name, torch.float64))
        for name in names
    }
    modules = {
        name: AdaptedModule(
            name.removesuffix(".weight"),
            kind_of(name),
            min(value.rank, rank or value.rank),
            tuple(value.shape),
        )
        for name, value in total.items()
    }
    out = workshop.directory / "written"
    energy = write_adapter(
        out,
        adapter_config(list(modules.values()), whole, {"base_model_name_or_path": str(base)}),
        modules,
        total.__getitem__,
        whole={name: TensorSpec("F64", theta.tensors[name].shape) for name in whole},
        read_whole=lambda name: theta.read(name) + 1,
        engine=LocalEngine(2),
        memory={},
        dtype="F64",
    )
    return out, total, energy


@pytest.mark.parametrize(
    ("model", "targets", "others"),
    [
        (llama, ["q_proj", "down_proj"], ["v_proj", "down_proj", "embed_tokens"]),
        (gpt2, "all-linear", ["attn.c_proj", "wte"]),
        (clip, "all-linear", ["q_proj", "patch_embedding", "position_embedding"]),
    ],
)
def test_peft_loads_the_sum_of_two_adapters(workshop, model, targets, others):
    base = workshop.base(model)
    adapters = [
        workshop.adapter(base, "one", r=2, target_modules=targets),
        workshop.adapter(base, "two", seed=2, r=3, lora_alpha=5, target_modules=others),
    ]
    out, total, energy = written(workshop, base, adapters)
    assert energy.lost_share < 1e-20
    assert len(json.loads((out / "adapter_config.json").read_text())["rank_pattern"]) > 0
    merged, theta = open_checkpoint(workshop.merged(base, out)), open_checkpoint(base)
    for name in theta.tensors:
        expected = dense(total[name]) if name in total else torch.zeros(1, dtype=torch.float64)
        assert torch.allclose(merged.read(name) - theta.read(name), expected, rtol=0, atol=1e-12), name


def test_whole_parameters_are_modules_to_save(workshop):
    base = workshop.base(llama)
    adapter = workshop.adapter(base, r=2, target_modules=["q_proj"])
    out, _, _ = written(workshop, base, [adapter], whole=["model.norm.weight", "lm_head.weight"])
    merged, theta = open_checkpoint(workshop.merged(base, out)), open_checkpoint(base)
    for name in ("model.norm.weight", "lm_head.weight"):
        assert torch.equal(merged.read(name), theta.read(name) + 1)


def test_a_chosen_rank_gives_the_nearest_matrix_and_tells_the_loss(workshop):
    base = workshop.base(llama)
    adapters = [workshop.adapter(base, f"a{seed}", seed=seed, r=4, target_modules=["q_proj"]) for seed in (1, 2)]
    out, total, energy = written(workshop, base, adapters, rank=3)
    merged, theta = open_checkpoint(workshop.merged(base, out)), open_checkpoint(base)
    lost = all_energy = 0.0
    for name, value in total.items():
        u, s, vh = torch.linalg.svd(dense(value))
        nearest = u[:, :3] * s[:3] @ vh[:3]
        assert torch.allclose(merged.read(name) - theta.read(name), nearest, rtol=0, atol=1e-12)
        lost, all_energy = lost + float(s[3:].square().sum()), all_energy + float(s.square().sum())
    assert energy.lost_share == pytest.approx(lost / all_energy)


def test_rank_below_the_room_is_padded(workshop):
    """Factors are laid out before they are known: what the numerical rank does not fill is zero."""
    base = workshop.base(llama)
    adapter = workshop.adapter(base, r=2, target_modules=["q_proj"])
    bound, theta = bind(adapter, base), open_checkpoint(base)
    name = next(iter(bound.terms))
    value = bound.delta(name, torch.float64)
    module = AdaptedModule(name.removesuffix(".weight"), "linear", 5, tuple(value.shape))
    out = workshop.directory / "padded"
    config, nothing = adapter_config([module], (), {}), {"whole": {}, "memory": {}}
    write_adapter(
        *(out, config, {name: module}, lambda _: value),
        read_whole=theta.read,
        engine=LocalEngine(1),
        dtype="F64",
        **nothing,
    )
    merged = open_checkpoint(workshop.merged(base, out))
    assert torch.allclose(merged.read(name) - theta.read(name), value.dense(), rtol=0, atol=1e-13)
