"""Adapters in a store: the same as their dense forms, for every method, in factors where the method allows it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mergestream import EMA, LAWA, OPCM, TIES, Average, LocalEngine, MagMax, Store, TaskArithmetic, merge
from mergestream.algebra.lowrank import LowRank
from mergestream.checkpoints import open_checkpoint
from tests.workshop import Workshop, clip, gpt2, llama

FACTORED = [
    OPCM(),
    OPCM(projection="paper"),
    OPCM(projection="block", alpha=0.8),
    OPCM(scaling="sqrt"),
    Average(),
    TaskArithmetic(),
    EMA(beta=0.7),
    LAWA(window=2),
]
DENSE = [TIES(), TIES(mode="streaming"), TIES(mode="reference", trim="tensor"), MagMax()]
ADAPTERS: list[dict[str, Any]] = [
    {"r": 2, "target_modules": ["q_proj", "down_proj"]},
    {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "embed_tokens"]},
    {"r": 1, "rank_pattern": {"k_proj": 4}, "target_modules": ["k_proj", "q_proj"]},
]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], list[Path]]:
    """A Llama in float64, three adapters that target different modules, and what PEFT makes of each."""
    workshop = Workshop(tmp_path_factory.mktemp("material"))
    base = workshop.base(llama)
    adapters = [workshop.adapter(base, f"adapter{i}", seed=i, **fields) for i, fields in enumerate(ADAPTERS)]
    return base, adapters, [workshop.merged(base, adapter, f"merged{i}") for i, adapter in enumerate(adapters)]


def store_of(path: Any, base: Any, experts: Any, method: Any, **options: Any) -> Any:
    store = Store.create(path, base, method, **options)
    for number, expert in enumerate(experts):
        store.add(expert, f"expert{number}")
    return store


def assert_same_model(one: Path, other: Path, base: Path, tolerance: float = 1e-11) -> None:
    left, right, theta = open_checkpoint(one), open_checkpoint(other), open_checkpoint(base)
    assert left.tensors.keys() == right.tensors.keys()
    for name in left.tensors:
        scale = 1 + float((right.read(name).double() - theta.read(name).double()).abs().max())
        difference = float((left.read(name).double() - right.read(name).double()).abs().max())
        assert difference < tolerance * scale, name


def in_factors(store: Store) -> dict[str, bool]:
    state = store.snapshot().state
    names = [name for name, tensor in store.manifest.base.tensors.items() if tensor.merges]
    return {name: state.ranks(name) is not None for name in names}


@pytest.mark.parametrize("method", [*FACTORED, *DENSE], ids=str)
def test_adapters_equal_their_dense_forms(
    tmp_path: Path, material: tuple[Path, list[Path], list[Path]], method: Any
) -> None:
    base, adapters, merged = material
    ours = store_of(tmp_path / "ours", base, adapters, method)
    dense = store_of(tmp_path / "dense", base, merged, method)
    assert set(in_factors(ours).values()) == {method in FACTORED}
    for mine, theirs in zip(ours.history, dense.history, strict=True):
        for field in ("norm", "kept", "scale", "mean_norm", "direction_norm", "distance"):
            if getattr(mine, field) is None:
                assert method.scale_rule != "adaptive" and getattr(theirs, field) is None
                continue
            assert getattr(mine, field) == pytest.approx(getattr(theirs, field), rel=1e-9), field
    ours.verify()
    assert_same_model(ours.export(tmp_path / "a"), dense.export(tmp_path / "b"), base)


@pytest.mark.parametrize("method", [OPCM(), Average(), LAWA(window=2), TIES(mode="streaming")], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_full_checkpoints_and_adapters_in_one_store(
    tmp_path: Path, material: tuple[Path, list[Path], list[Path]], method: Any, order: Any
) -> None:
    base, adapters, merged = material
    mixed = [adapters[0], merged[1], adapters[2]]
    ours = store_of(tmp_path / "ours", base, [mixed[i] for i in order], method)
    dense = store_of(tmp_path / "dense", base, [merged[i] for i in order], method)
    assert not any(in_factors(ours).values())
    assert_same_model(ours.export(tmp_path / "a"), dense.export(tmp_path / "b"), base)


def test_whole_modules_make_only_their_tensors_dense(tmp_path: Path, workshop: Any) -> None:
    base = workshop.base(gpt2)
    fields = {"r": 2, "target_modules": ["c_attn", "c_proj"]}
    adapters = [
        workshop.adapter(base, "one", seed=1, **fields, bias="lora_only"),
        workshop.adapter(base, "two", seed=2, **fields, modules_to_save=["ln_f"]),
    ]
    merged = [workshop.merged(base, adapter, f"{adapter.name}-merged") for adapter in adapters]
    ours = store_of(tmp_path / "ours", base, adapters, OPCM())
    dense = store_of(tmp_path / "dense", base, merged, OPCM())
    kinds = in_factors(ours)
    assert kinds["transformer.h.0.attn.c_attn.weight"]
    assert not kinds["transformer.h.0.attn.c_attn.bias"]
    assert not kinds["transformer.ln_f.weight"]
    assert kinds["transformer.wte.weight"]
    assert_same_model(ours.export(tmp_path / "a"), dense.export(tmp_path / "b"), base)


def test_clip_adapters_with_convolutions(tmp_path: Path, workshop: Any) -> None:
    base = workshop.base(clip)
    adapters = [
        workshop.adapter(base, f"a{seed}", seed=seed, r=2, target_modules=["q_proj", "fc2", "patch_embedding"])
        for seed in range(3)
    ]
    merged = [workshop.merged(base, adapter, f"{adapter.name}-merged") for adapter in adapters]
    ours = store_of(tmp_path / "ours", base, adapters, OPCM())
    dense = store_of(tmp_path / "dense", base, merged, OPCM())
    assert_same_model(ours.export(tmp_path / "a"), dense.export(tmp_path / "b"), base)


@pytest.mark.slow
def test_twenty_adapters_until_dense_is_cheaper(tmp_path: Path, workshop: Any) -> None:
    base = workshop.base(llama)
    adapters = [
        workshop.adapter(base, f"a{seed}", seed=seed, r=1 + seed % 2, target_modules=["q_proj", "up_proj"])
        for seed in range(20)
    ]
    store, kinds = Store.create(tmp_path / "store", base, OPCM()), []
    for adapter in adapters:
        store.add(adapter)
        kinds.append(in_factors(store)["model.layers.0.mlp.up_proj.weight"])
        store.verify()
    assert kinds[0]
    assert not kinds[-1]
    assert kinds == sorted(kinds, reverse=True)  # once dense, it stays dense
    assert in_factors(store)["model.layers.0.mlp.down_proj.weight"]  # never touched: factors of rank 0
    merged = [workshop.merged(base, adapter, f"{adapter.name}-merged") for adapter in adapters]
    dense = store_of(tmp_path / "dense", base, merged, OPCM())
    assert store.history[-1].scale == pytest.approx(dense.history[-1].scale, rel=1e-6)
    assert_same_model(store.export(tmp_path / "a"), dense.export(tmp_path / "b"), base, 1e-6)


def test_bytes_do_not_depend_on_workers(tmp_path: Path, material: tuple[Path, list[Path], list[Path]]) -> None:
    base, adapters, _ = material
    one = store_of(tmp_path / "one", base, adapters, OPCM(), engine=LocalEngine(1))
    four = store_of(tmp_path / "four", base, adapters, OPCM(), engine=LocalEngine(4))
    for path in sorted((one.path / "steps" / "0003").iterdir()):
        assert path.read_bytes() == (four.path / "steps" / "0003" / path.name).read_bytes(), path.name


def test_steps_share_the_blocks_of_their_bases(tmp_path: Path, material: tuple[Path, list[Path], list[Path]]) -> None:
    base, adapters, _ = material
    store = store_of(tmp_path / "store", base, adapters, OPCM(), keep=2)
    first = store.path / "steps" / "0001" / "factors-0001.safetensors"
    last = store.path / "steps" / "0003" / "factors-0001.safetensors"
    assert first.stat().st_ino == last.stat().st_ino
    store.undo()
    store.undo()
    store.verify()
    for number in (1, 2):
        store.add(adapters[number])
    store.verify()
    again = store_of(tmp_path / "again", base, adapters, OPCM())
    assert store.history[-1].state == again.history[-1].state


def test_zero_and_duplicate_adapters(tmp_path: Path, workshop: Any) -> None:
    base = workshop.base(llama)
    adapter = workshop.adapter(base, "one", r=2, target_modules=["q_proj"])
    zero = workshop.adapter(base, "zero", r=2, target_modules=["q_proj"])
    state = open_checkpoint(zero / "adapter_model.safetensors")
    from safetensors.torch import save_file

    zeros = {name: torch.zeros_like(state.read(name)) for name in state.tensors}
    save_file(zeros, zero / "adapter_model.safetensors")
    store = Store.create(tmp_path / "store", base, OPCM())
    with pytest.raises(Exception, match="identical to the base"):
        store.add(zero)
    store.add(zero, "nothing", allow_duplicate=True)
    store.add(adapter)
    with pytest.raises(Exception, match="absorbed already"):
        store.add(adapter)
    store.add(adapter, "again", allow_duplicate=True)
    store.verify()
    value = store.snapshot().state.read("model.layers.0.self_attn.q_proj.weight")["sum"]
    assert isinstance(value, LowRank) and value.rank == 2
    assert store.history[-1].kept < 1e-20  # all of it lies on the diagonal


def test_one_shot_merges_take_adapters(tmp_path: Path, material: tuple[Path, list[Path], list[Path]]) -> None:
    base, adapters, merged = material
    for method in (Average(), OPCM(), TIES(mode="streaming")):
        merge(base, [adapters[0], merged[1], adapters[2]], tmp_path / f"{method}a", method)
        merge(base, merged, tmp_path / f"{method}b", method)
        assert_same_model(tmp_path / f"{method}a", tmp_path / f"{method}b", base)


def test_inspect_predicts_what_add_does(tmp_path: Path, material: tuple[Path, list[Path], list[Path]]) -> None:
    base, adapters, _ = material
    store = store_of(tmp_path / "store", base, adapters[:2], OPCM())
    inspection = store.inspect(adapters[2])
    entry = store.add(adapters[2])
    assert inspection.norm == entry.norm
    assert inspection.kept == entry.kept
    assert inspection.lambda_ == pytest.approx(entry.lambda_)
    name = "model.layers.0.self_attn.k_proj.weight"
    assert inspection.tensors[name].fate == "merged"
    assert inspection.tensors["model.norm.weight"].fate == "unchanged"
    assert math.isclose(inspection.distance, entry.distance)


def test_float32_store_is_accurate_to_1e_5(tmp_path: Path, workshop: Any) -> None:
    torch.manual_seed(0)
    base = workshop.directory / "single"
    llama().float().save_pretrained(base)
    adapters = [workshop.adapter(base, f"a{s}", seed=s, r=1, target_modules=["q_proj"]) for s in range(6)]
    exact_base = workshop.base(llama, "double")
    merged = [workshop.merged(exact_base, adapter, f"{adapter.name}-merged") for adapter in adapters]
    ours = store_of(tmp_path / "ours", base, adapters, OPCM())
    dense = store_of(tmp_path / "dense", exact_base, merged, OPCM())
    name = "model.layers.0.self_attn.q_proj.weight"
    exact = dense.snapshot().state.read(name)["sum"]
    error = (ours.snapshot().state.read(name)["sum"].dense().double() - exact).norm() / exact.norm()
    assert float(error) < 1e-5
