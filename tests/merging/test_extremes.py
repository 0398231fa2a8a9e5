"""Numbers at the ends of their types: the result is finite, or the tensor is named and nothing is written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mergestream
from mergestream import Average, Ledger, LocalEngine, Merger, MergestreamError, Store
from mergestream.methods.base import Method
from tests.conftest import StateDict, save_model
from tests.merging.test_driver import METHODS

ENGINE = LocalEngine(1)
SIZES = [
    (torch.float32, 3.3e38),
    (torch.bfloat16, 3e38),
    (torch.float64, 1.7e308),
    (torch.float64, 1e100),
    (torch.float32, 3e-45),
    (torch.float32, 1e-39),
    (torch.float64, 1e-170),
    (torch.float64, 1e-310),
]


def extreme(size: float, dtype: torch.dtype, seed: int) -> StateDict:
    """Every entry within a factor of two of the size, of either sign."""
    generator = torch.Generator().manual_seed(seed)

    def entries(*shape: int) -> torch.Tensor:
        values = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
        return ((values.sign() * 0.5 + values) * size).to(dtype)

    return {"a.weight": entries(12, 16), "embed_tokens.weight": entries(10, 8), "bias": entries(7)}


def finite(tensors: StateDict) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def readouts(method: Method) -> list[str | None]:
    ledger = [None, "tsv", "iso", "sum", "expert:1"]
    return ledger if isinstance(method, Ledger) else [None, "iso"] if method.additive else [None]


@pytest.mark.parametrize(
    ("dtype", "size", "at_zero"), [*((*form, True) for form in SIZES), (*SIZES[0], False), (*SIZES[2], False)], ids=str
)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_merge_is_finite_or_refused(method: Any, dtype: Any, size: Any, at_zero: Any) -> None:
    models = [extreme(size, dtype, seed) for seed in range(4)]
    try:
        merger = Merger({name: 0 * x for name, x in models[0].items()} if at_zero else models[0], method, engine=ENGINE)
    except MergestreamError as error:
        assert "tensor" in str(error) and size > 1e300
        return
    for model in models[1:]:
        try:
            totals = merger.add(model)
        except MergestreamError as error:
            assert "tensor" in str(error) or (dtype == torch.float64 and size < 1 and "too close" in str(error))
        else:
            assert all(value is None or math.isfinite(value) for value in vars(totals).values())
    for readout in readouts(method) if merger.history else ():
        try:
            assert finite(merger.state_dict(readout=readout))
        except MergestreamError as error:
            assert "tensor" in str(error) and size > 1


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_denormal_differences_are_merged(method: Any) -> None:
    """They are not nothing, and their squares and inverses are numbers."""
    base = {name: torch.zeros_like(x) for name, x in extreme(1, torch.float32, 0).items()}
    merger = Merger(base, method, engine=ENGINE)
    for seed in range(1, 4):
        assert merger.add(extreme(1e-40, torch.float32, seed)).norm > 0
    assert any(bool(tensor.any()) for tensor in merger.state_dict().values())


@pytest.mark.parametrize("method", [Average(), Ledger()], ids=repr)
def test_one_go_refuses_what_leaves_float32(method: Any, tmp_path: Path) -> None:
    places = [save_model(tmp_path / str(n), extreme(2e38 if n else 0, torch.float32, n)) for n in range(4)]
    with pytest.raises(MergestreamError, match=r"tensor a\.weight (becomes too large for float32|cannot be merged)"):
        mergestream.merge(places[0], places[1:], tmp_path / "out", method, engine=ENGINE)
    assert not (tmp_path / "out").exists()


def test_one_go_refuses_a_base_with_nan_that_no_expert_touches(tmp_path: Path) -> None:
    base, expert = extreme(1, torch.float32, 0), extreme(1, torch.float32, 1)
    base["bias"][3] = math.nan
    del expert["bias"]
    places = [save_model(tmp_path / name, model) for name, model in (("base", base), ("expert", expert))]
    with pytest.raises(MergestreamError, match="tensor bias"):
        mergestream.merge(places[0], places[1:], tmp_path / "out", Average(), partial=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("size", "dtype", "sentence"),
    [
        (1e37, "float16", r"tensor \S+ has values that float16 cannot hold; export with --dtype bfloat16 or float32"),
        (1e37, "float32", None),
        (3.4025e38, "bfloat16", r"tensor \S+ has values that bfloat16 cannot hold; export with --dtype float32"),
        (3.5e38, "float32", r"tensor \S+ has values that float32 cannot hold; export with --dtype float64"),
        (3.5e38, None, None),
    ],
)
def test_every_narrowing_is_checked(size: float, dtype: str | None, sentence: str | None, tmp_path: Path) -> None:
    """The base is at home in float64, and the expert hardly moves it."""
    base = {name: torch.full_like(x, size) for name, x in extreme(1, torch.float64, 0).items()}
    expert = {name: x * (1 - 1e-9) for name, x in base.items()}
    store = Store.create(tmp_path / "store", save_model(tmp_path / "base", base), Average(), engine=ENGINE)
    store.add(save_model(tmp_path / "expert", expert))
    for run, out in (
        (lambda out: store.export(out, dtype=dtype), tmp_path / "stored"),
        (
            lambda out: mergestream.merge(tmp_path / "base", [tmp_path / "expert"], out, Average(), dtype=dtype),
            tmp_path / "go",
        ),
    ):
        if sentence is None:
            run(out)
            assert finite(load_file(out / "model.safetensors"))
        else:
            with pytest.raises(MergestreamError, match=sentence):
                run(out)
            assert not out.exists()


def test_heads_and_factors_are_checked_too(tmp_path: Path) -> None:
    def model(seed: int, head: float) -> Path:
        own = torch.full((2, 3), head, dtype=torch.float64)
        return save_model(tmp_path / str(seed), {**extreme(1, torch.float64, seed), "head.weight": own})

    store = Store.create(tmp_path / "store", model(0, 1.0), Average(), heads=["head.*"], engine=ENGINE)
    store.add(model(1, 1e39), "one", allow_other_base=True)
    with pytest.raises(MergestreamError, match=r"tensor head\.weight has values that float32 cannot hold"):
        store.export(tmp_path / "out", task="one", dtype="float32")
    with pytest.raises(MergestreamError, match=r"tensor a\.weight has values that float16 cannot hold"):
        store.export_adapter(tmp_path / "out", rank=2, scale=1e12, dtype="float16")
    assert not (tmp_path / "out").exists()


def test_a_scale_beyond_the_type_is_refused(tmp_path: Path) -> None:
    places = [save_model(tmp_path / str(n), extreme(1, torch.float32, n)) for n in range(2)]
    store = Store.create(tmp_path / "store", places[0], Average(), engine=ENGINE)
    store.add(places[1], allow_other_base=True)
    with pytest.raises(MergestreamError, match=r"tensor \S+ becomes too large for float32"):
        store.export(tmp_path / "out", scale=1e300)


def test_an_expert_of_a_wider_type_that_the_base_cannot_hold(tmp_path: Path) -> None:
    base, expert = extreme(1, torch.float32, 0), extreme(1e100, torch.float64, 1)
    save_file(base, tmp_path / "base.safetensors")
    store = Store.create(tmp_path / "store", tmp_path / "base.safetensors", engine=ENGINE)
    with pytest.raises(MergestreamError, match=r"tensor \S+ in model\.safetensors of .* is too large to be merged"):
        store.add(save_model(tmp_path / "expert", expert))
    assert not store.history and not list((store.path / "steps").glob("*/model*"))
