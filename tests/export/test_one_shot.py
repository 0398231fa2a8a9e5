"""A one-shot merge gives what a store gives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

import mergestream
from mergestream import EMA, LAWA, OPCM, TIES, Average, LocalEngine, MagMax, MergestreamError, Store, TaskArithmetic
from tests.conftest import Toys, files, save_model, toy_base, toy_expert

METHODS = [
    OPCM(alpha=0.3),
    Average(),
    TaskArithmetic(scale=0.4),
    TIES(),
    TIES(mode="streaming"),
    TIES(mode="reference", trim="tensor"),
    EMA(beta=0.7),
    LAWA(window=2),
    MagMax(),
]


def numbers(card: str) -> list[list[str]]:
    """The scale, and of each expert what does not depend on the day: name, digest, ‖Δ‖, kept share and scale."""
    rows = [line.split(" | ") for line in card.splitlines() if line.startswith(("| ", "* Scale"))]
    return [[cell for column, cell in enumerate(row) if column not in (2, 4, 8)] for row in rows]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_merge_equals_a_store_bit_for_bit(method: Any, tmp_path: Path, toys: Toys) -> None:
    store = Store.create(tmp_path / "store", toys.base, method)
    for expert in toys.experts:
        store.add(expert)
    store.export(tmp_path / "through-a-store", max_shard_size=1000)
    for workers in (1, 3):
        out = tmp_path / f"merged-{workers}"
        mergestream.merge(toys.base, toys.experts, out, method, max_shard_size=1000, engine=LocalEngine(workers))
        written = ".safetensors", ".index.json"
        assert files(out, *written) == files(tmp_path / "through-a-store", *written)
        found, expected = (numbers((place / "README.md").read_text()) for place in (out, tmp_path / "through-a-store"))
        assert len(found) == 2 + len(toys.experts) and found == expected
    assert not list(tmp_path.glob(".*")), "no temporary store is left"


@pytest.mark.parametrize("method", [OPCM(), Average()], ids=repr)
def test_the_next_merge_removes_what_a_killed_one_left(method: Any, tmp_path: Path, toys: Toys) -> None:
    for left in (".[a]*.mergestream/store", ".[a]*.mergestream/model", ".b.mergestream/store"):
        save_model(tmp_path / left, toy_base())
    mergestream.merge(toys.base, toys.experts[:2], tmp_path / "[a]*", method)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".b.mergestream", "[a]*"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError])
def test_an_interrupted_merge_leaves_no_files(
    failure: Any, tmp_path: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        assert list((tmp_path / ".out.mergestream" / "store" / "steps").iterdir())
        raise failure

    monkeypatch.setattr(OPCM, "absorb", interrupted)
    with pytest.raises((failure, MergestreamError)):
        mergestream.merge(toys.base, toys.experts[:2], tmp_path / "out", OPCM())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", [OPCM(), Average()], ids=repr)
def test_duplicates_and_the_base_are_refused_unless_allowed(method: Any, tmp_path: Path, toys: Toys) -> None:
    for experts, sentence in (
        ([toys.experts[0], toys.experts[0]], "expert-1"),
        ([toys.experts[0], toys.base], "the base"),
    ):
        with pytest.raises(MergestreamError, match=rf"{sentence}.*--allow-duplicate"):
            mergestream.merge(toys.base, experts, tmp_path / "merged", method)
        assert list(tmp_path.iterdir()) == [], "nothing is left"
    mergestream.merge(toys.base, [toys.experts[0], toys.experts[0]], tmp_path / "merged", method, allow_duplicate=True)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == toy_base().keys()


@pytest.mark.parametrize("method", [OPCM(), Average()], ids=repr)
def test_partial_and_ignored_tensors_merge_as_in_a_store(method: Any, tmp_path: Path, toys: Toys) -> None:
    part = {name: tensor for name, tensor in toy_expert(5).items() if name != "layers.0.q.weight"}
    experts = [toys.experts[0], save_model(tmp_path / "part", part)]
    store = Store.create(tmp_path / "store", toys.base, method)
    for expert in experts:
        store.add(expert, partial=True, ignore=["embed*"])
    store.export(tmp_path / "through-a-store")
    mergestream.merge(toys.base, experts, tmp_path / "merged", method, partial=True, ignore=["embed*"])
    assert files(tmp_path / "merged", ".safetensors") == files(tmp_path / "through-a-store", ".safetensors")


@pytest.mark.parametrize("method", [OPCM(), Average()], ids=repr)
def test_nan_is_refused_and_nothing_is_written(method: Any, tmp_path: Path, toys: Toys) -> None:
    bad = toy_expert(1)
    bad["layers.0.up.weight"][0, 0] = torch.inf
    with pytest.raises(MergestreamError, match=r"layers.0.up.weight in model.safetensors of \S*bad holds NaN or Inf"):
        mergestream.merge(toys.base, [toys.experts[1], save_model(tmp_path / "bad", bad)], tmp_path / "out", method)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]


SHAPES = {"wide": (300, 400), "none": (0, 7), "tall": (500, 300), "short": (5,)}
"""Enough that only a sample of the magnitudes is sorted, and a tensor that has none."""


@pytest.fixture
def large(tmp_path: Path) -> Any:
    """A base and two experts, in their directories."""
    for seed, name in enumerate(("base", "expert-1", "expert-2")):
        generator = torch.Generator().manual_seed(seed)
        save_model(tmp_path / name, {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()})
    return [tmp_path / name for name in ("base", "expert-1", "expert-2")]


def weights(directory: Any) -> Any:
    return load_file(directory / "model.safetensors")


def trimmed(vector: Any, over: Any) -> Any:
    """The vector with all but 30 % of its entries zeroed, found by sorting them all."""
    vector = {name: tensor.clone() for name, tensor in vector.items()}
    for names in [list(vector)] if over == "model" else [[name] for name in vector]:
        magnitudes = torch.cat([vector[name].abs().flatten() for name in names]).sort(descending=True).values
        count = int(0.3 * len(magnitudes))
        for name in names:
            vector[name][vector[name].abs() < (magnitudes[count - 1] if count else torch.inf)] = 0
    return vector


def agreeing(a: Any, b: Any) -> Any:
    """What of both has the sign of their sum."""
    both = torch.stack([a, b])
    return both * (both.sign() == both.sum(0).sign())


@pytest.mark.parametrize("over", ["model", "tensor"])
def test_ties_where_only_a_sample_is_sorted(over: Literal["model", "tensor"], large: Any, tmp_path: Path) -> None:
    base, *experts = map(weights, large)
    first, second = ({name: tensor - base[name] for name, tensor in expert.items()} for expert in experts)

    method = TIES(density=0.3, scale=0.5, mode="streaming", trim=over)
    mergestream.merge(large[0], large[1:], tmp_path / "streaming", method, allow_other_base=True)
    a, b = trimmed(first, over), trimmed(second, over)
    for name, merged in weights(tmp_path / "streaming").items():
        parts = agreeing(a[name], b[name])
        expected = base[name] + 0.5 * parts.sum(0) / parts.count_nonzero(0).clamp(min=1)
        assert torch.allclose(merged, expected, atol=1e-6), name

    method = TIES(density=0.3, scale=0.5, mode="continual", trim=over)
    mergestream.merge(large[0], large[1:], tmp_path / "continual", method, allow_other_base=True)
    a = trimmed({name: 0.5 * tensor for name, tensor in first.items()}, over)
    for name, merged in weights(tmp_path / "continual").items():
        assert torch.allclose(merged, base[name] + 0.5 * agreeing(a[name], b[name]).sum(0), atol=1e-6), name


def test_the_card_of_a_merge_does_not_depend_on_the_time(
    tmp_path: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, time in (("one", "2026-01-01"), ("two", "2027-01-01")):
        monkeypatch.setattr("mergestream.store.add.datetime", SimpleNamespace(now=lambda _, t=time: Clock(t)))
        mergestream.merge(toys.base, toys.experts[:2], tmp_path / name, OPCM())
    assert files(tmp_path / "one") == files(tmp_path / "two")


class Clock(str):
    def isoformat(self, **_: object) -> str:
        return str(self)
