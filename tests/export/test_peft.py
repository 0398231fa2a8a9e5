"""PEFT loads what export_adapter writes, and merges it into the base to the sum of the experts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from mergestream import Ledger, Store, TaskArithmetic
from mergestream.algebra.lowrank import dense
from mergestream.checkpoints import open_checkpoint
from tests.conftest import RunCommand
from tests.workshop import Workshop, bind, clip, gpt2, llama


def store_of_sum(workshop: Workshop, base: Path, adapters: Sequence[Path]) -> Store:
    store = Store.create(workshop.directory / "store", base, TaskArithmetic(scale=1.0))
    for adapter in adapters:
        store.add(adapter, allow_duplicate=True)
    return store


def sum_of(base: Path, adapters: Sequence[Path]) -> dict[str, Tensor]:
    """Σ Δ of the adapters' factors, in float64."""
    bounds = [bind(adapter, base) for adapter in adapters]
    return {
        name: torch.stack([dense(bound.delta(name, torch.float64)) for bound in bounds]).sum(0)
        for name in open_checkpoint(base).tensors
    }


@pytest.mark.parametrize(
    ("model", "targets", "others"),
    [
        (llama, ["q_proj", "down_proj"], ["v_proj", "down_proj", "embed_tokens"]),
        (gpt2, "all-linear", ["attn.c_proj", "wte"]),
        (clip, "all-linear", ["q_proj", "patch_embedding", "position_embedding"]),
    ],
)
def test_peft_loads_the_sum_of_two_adapters(
    workshop: Workshop, model: Callable[..., Any], targets: str | list[str], others: list[str]
) -> None:
    base, out = workshop.base(model), workshop.directory / "written"
    adapters = [
        workshop.adapter(base, "one", r=2, target_modules=targets),
        workshop.adapter(base, "two", seed=2, r=3, lora_alpha=5, target_modules=others),
    ]
    energy = store_of_sum(workshop, base, adapters).export_adapter(out, dtype="float64")
    assert energy.lost_share < 1e-20
    assert len(json.loads((out / "adapter_config.json").read_text())["rank_pattern"]) > 0
    merged, theta = open_checkpoint(workshop.merged(base, out)), open_checkpoint(base)
    for name, expected in sum_of(base, adapters).items():
        assert torch.allclose(merged.read(name) - theta.read(name), expected, rtol=0, atol=1e-12), name


def test_whole_parameters_are_modules_to_save(workshop: Workshop) -> None:
    base, out = workshop.base(llama), workshop.directory / "written"
    whole = {"model.norm.weight": "norm", "lm_head.weight": "lm_head"}
    adapter = workshop.adapter(base, r=2, target_modules=["q_proj"], modules_to_save=[*whole.values()])
    store_of_sum(workshop, base, [adapter]).export_adapter(out, dtype="float64", rank=16)
    merged, theirs = (open_checkpoint(workshop.merged(base, each, f"merged-{each.name}")) for each in (out, adapter))
    for name in whole:
        assert torch.allclose(merged.read(name), theirs.read(name), rtol=0, atol=1e-12), name
        assert not torch.equal(merged.read(name), open_checkpoint(base).read(name)), name


def test_a_chosen_rank_gives_the_nearest_matrix_and_reports_the_loss(workshop: Workshop) -> None:
    base, out = workshop.base(llama), workshop.directory / "written"
    adapters = [workshop.adapter(base, f"a{seed}", seed=seed, r=4, target_modules=["q_proj"]) for seed in (1, 2)]
    energy = store_of_sum(workshop, base, adapters).export_adapter(out, dtype="float64", rank=3)
    merged, theta = open_checkpoint(workshop.merged(base, out)), open_checkpoint(base)
    lost = total = 0.0
    for name, value in sum_of(base, adapters).items():
        if not value.any():
            continue
        u, s, vh = torch.linalg.svd(value)
        nearest = u[:, :3] * s[:3] @ vh[:3]
        assert torch.allclose(merged.read(name) - theta.read(name), nearest, rtol=0, atol=1e-12)
        lost, total = lost + float(s[3:].square().sum()), total + float(s.square().sum())
    assert energy.lost_share == pytest.approx(lost / total)


def test_factors_are_padded_with_zeros_beyond_the_numerical_rank(workshop: Workshop) -> None:
    """Factors are laid out before their rank is known: the sum of the same adapter twice has half the rank."""
    base, out = workshop.base(llama), workshop.directory / "padded"
    adapter = workshop.adapter(base, r=2, target_modules=["q_proj"])
    store_of_sum(workshop, base, [adapter, adapter]).export_adapter(out, dtype="float64")
    merged, theta = open_checkpoint(workshop.merged(base, out)), open_checkpoint(base)
    for name, expected in sum_of(base, [adapter, adapter]).items():
        assert torch.allclose(merged.read(name) - theta.read(name), expected, rtol=0, atol=1e-13), name


@pytest.mark.parametrize(
    ("entries", "options", "said"),
    [
        ("float32", [], "exactly"),
        ("bfloat16", [], "in full rank, rounded to bfloat16"),
        ("float32", ["--dtype", "fp16"], "in full rank, rounded to float16"),
        ("float32", ["--rank", 2], "of the energy left out"),
    ],
)
@torch.no_grad()
def test_exactly_is_said_only_of_an_adapter_with_the_same_logits(
    workshop: Workshop,
    mergestream: RunCommand,
    entries: Literal["float32", "bfloat16"],
    options: list[object],
    said: str,
) -> None:
    base, out = workshop.base(llama), workshop.directory / "written"
    adapter = workshop.adapter(base, r=4, target_modules=["q_proj", "down_proj"])
    store = Store.create(workshop.directory / "store", base, Ledger(entries=entries))
    store.add(adapter, name="law")
    run = mergestream("export", store.path, out, "--format", "lora", "--readout", "expert:law", *options)
    assert said in run.out and run.out.endswith(", exactly\n") == (said == "exactly")
    models = [base, *(workshop.merged(base, each, f"merged-{each.name}") for each in (adapter, out))]
    before, wanted, found = (workshop.load(model)(torch.arange(8)[None]).logits for model in models)
    assert (said == "exactly") == bool((found - wanted).norm() < 1e-5 * (wanted - before).norm())
