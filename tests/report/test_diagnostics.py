from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergestream import Store
from mergestream.base.names import layer_of, natural
from mergestream.errors import UsageError
from mergestream.report.facts import Facts
from tests.conftest import RunCommand, files, save_model
from tests.report.conftest import EXPERTS, known, make_ledger


def flat_delta(models: Path, name: str) -> torch.Tensor:
    base, tuned = load_file(models / "base/model.safetensors"), load_file(models / name / "model.safetensors")
    return torch.cat([(tuned[tensor] - base[tensor]).reshape(-1).double() for tensor in sorted(base)])


def exact_cosine(models: Path, one: str, other: str) -> float:
    a, b = flat_delta(models, one), flat_delta(models, other)
    return float(a @ b / (a.norm() * b.norm()))


def test_similarity_is_known_without_the_experts(ledger: Store, models: Path) -> None:
    found = ledger.similarity()
    assert found.experts == EXPERTS
    for i, one in enumerate(EXPERTS):
        for j, other in enumerate(EXPERTS):
            assert found.cosines[i][j] == pytest.approx(exact_cosine(models, one, other), abs=1e-5)


def test_a_cosine_is_of_what_the_entries_hold_over_the_whole_norms(tmp_path: Path, models: Path) -> None:
    store = make_ledger(tmp_path / "store", models, ("giant", "cars"), entries="float32")
    deltas = []
    base = load_file(models / "base/model.safetensors")
    for name in ("giant", "cars"):
        tuned = load_file(models / name / "model.safetensors")
        deltas.append({tensor: (tuned[tensor] - base[tensor]).double() for tensor in base})
    product = 0.0
    for tensor in base:
        held = []
        for delta in deltas:
            value = delta[tensor]
            if value.ndim == 2:
                u, s, vh = torch.linalg.svd(value, full_matrices=False)
                kept = min(value.shape) // 8
                value = u[:, :kept] @ torch.diag(s[:kept]) @ vh[:kept]
            held.append(value.reshape(-1))
        product += float(held[0] @ held[1])
    norms = [math.sqrt(sum(float(x.square().sum()) for x in delta.values())) for delta in deltas]
    found = store.similarity().cosines
    assert found[0][1] == found[1][0] == pytest.approx(product / math.prod(norms), abs=1e-5)
    assert found[0][0] == found[1][1] == 1


def test_an_expert_that_is_the_base_has_no_cosine(tmp_path: Path, models: Path) -> None:
    store = make_ledger(tmp_path / "store", models, ("cars",))
    store.add(models / "base", allow_duplicate=True)
    assert store.similarity().cosines == ((1.0, None), (None, None))


def test_an_accumulator_knows_no_cosines(scored: Store, models: Path) -> None:
    with pytest.raises(UsageError, match="only a ledger knows the cosines of its experts, and this store uses opcm"):
        scored.similarity()
    assert scored.inspect(models / "giant").cosines == {}
    assert "cosines" not in scored.inspect(models / "giant").to_json()
    assert {"similarity", "conflicts"}.isdisjoint(Facts.of(scored).to_json())


def test_survival_adds_up_to_what_the_history_says(scored: Store) -> None:
    for found in (scored.survival(), scored.survival().by_layer()):
        for norms, kept, entry in zip(found.norm, found.kept, scored.history, strict=True):
            energy = math.fsum(norm**2 for norm in norms)
            entered = math.fsum(share * norm**2 for share, norm in zip(kept, norms, strict=True))
            assert math.sqrt(energy) == pytest.approx(entry.norm)
            assert entered / energy == pytest.approx(entry.kept)


def test_the_first_expert_survives_whole_and_later_ones_do_not(scored: Store) -> None:
    found = scored.survival()
    projected = [i for i in range(len(found.parts)) if found.protected[-1][i] is not None]
    assert projected and set(found.kept[0]) == {1.0}
    for i in projected:
        assert all(row[i] < 1 for row in found.kept[1:]) and min(known(row[i] for row in found.protected[1:])) > 0


def test_layers_come_in_their_order(scored: Store) -> None:
    layers = [layer for layer in scored.survival().by_layer().parts if "layer" in layer]
    assert layers == ["encoder.layer.1", "encoder.layer.2", "encoder.layer.10"]


def test_q_of_a_layer_is_the_mean_over_its_projected_weights(scored: Store) -> None:
    found, layers = scored.survival(), scored.survival().by_layer()
    ranks = dict(zip(found.parts, found.protected[1], strict=True))
    of_layer = dict(zip(layers.parts, layers.protected[1], strict=True))
    up, down = known(ranks[f"encoder.layer.1.{part}.weight"] for part in ("up", "down"))
    assert of_layer["encoder.layer.1"] == (up + down) / 2
    assert of_layer["embeddings"] is None


@pytest.mark.parametrize(
    ("tensor", "layer"),
    [
        ("bert.encoder.layer.3.attention.self.query.weight", "bert.encoder.layer.3"),
        ("model.layers.0.mlp.experts.5.up_proj.weight", "model.layers.0"),
        ("0.weight", "0"),
        ("pooler.dense.bias", "pooler.dense"),
        ("conv1.weight", "conv1"),
        ("temperature", "temperature"),
    ],
)
def test_layer_of_a_tensor(tensor: str, layer: str) -> None:
    assert layer_of(tensor) == layer


def test_natural_order() -> None:
    names = ["layer.10.a", "layer.9.a", "layer.9.b", "embedding", "10.x", "9.x"]
    assert sorted(names, key=natural) == ["9.x", "10.x", "embedding", "layer.9.a", "layer.9.b", "layer.10.a"]


def test_inspect_tells_interference_and_size(store: Store, models: Path) -> None:
    before = files(store.path, ".json", ".safetensors")
    inspection = store.inspect(models / "giant")
    assert "outweighs" in inspection.notes[0] and inspection.relative_norm > 5
    shares = {name: tensor.kept for name, tensor in inspection.tensors.items()}
    assert min(shares.values()) < 1
    told = json.loads(json.dumps(inspection.to_json()))["tensors"]
    assert {name: tensor["kept"] for name, tensor in told.items()} == shares
    assert files(store.path, ".json", ".safetensors") == before


def test_inspect_tells_the_cosines_to_the_experts_of_a_ledger(ledger: Store, models: Path) -> None:
    inspection = ledger.inspect(models / "giant")
    assert tuple(inspection.cosines) == EXPERTS
    for name, cosine in inspection.cosines.items():
        assert cosine == pytest.approx(exact_cosine(models, "giant", name), abs=1e-4)
    assert json.loads(json.dumps(inspection.to_json()))["cosines"] == inspection.cosines


def test_inspect_prints_them(store: Store, ledger: Store, models: Path, mergestream: RunCommand) -> None:
    told = mergestream("inspect", store.path, models / "giant")
    assert "cosine" not in told.out and "tensors: 12 merged" in told.out
    assert told.err.startswith("note: ") and "outweighs" in told.err
    assert mergestream("inspect", store.path, models / "pets").err == ""
    cosine = ledger.inspect(models / "giant").cosines["cars"]
    (row,) = (
        line.split()
        for line in mergestream("inspect", ledger.path, models / "giant").out.splitlines()
        if line.startswith("cars")
    )
    assert row[2] == f"{cosine:.3f}"


def test_add_notes_an_expert_that_outweighs_the_others(store: Store, models: Path, mergestream: RunCommand) -> None:
    result = mergestream("add", store.path, models / "giant")
    assert result.code == 0
    assert "times as long as the mean of the experts before it" in result.err


def test_an_adapter_has_the_cosines_of_the_model_that_it_makes(tmp_path: Path, models: Path) -> None:
    base, name = load_file(models / "base/model.safetensors"), "encoder.layer.1.up"
    generator = torch.Generator().manual_seed(5)
    a, b = torch.randn(2, 16, generator=generator), torch.randn(32, 2, generator=generator)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    prefix = f"base_model.model.{name}"
    save_file({f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": [name]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    dense = save_model(tmp_path / "dense", {**base, f"{name}.weight": base[f"{name}.weight"] + 2 * b @ a})
    store = make_ledger(tmp_path / "store", models, ("cars",), budget=8.0)
    store.add(adapter)
    cosines = store.inspect(dense).cosines
    assert cosines["adapter"] == pytest.approx(1, abs=1e-3)
    similarity = store.similarity().cosines[0][1]
    assert similarity == pytest.approx(exact_cosine(models, "cars", str(dense)), abs=0.01)
