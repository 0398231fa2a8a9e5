"""Whatever is given to an engine is honoured or refused, whoever drives the step: store, Merger or one-shot merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mergestream
from mergestream import EMA, LAWA, OPCM, TIES, Average, Ledger, LocalEngine, MagMax, Merger, MergestreamError, Store
from mergestream.checkpoints import open_checkpoint
from mergestream.errors import UsageError
from mergestream.methods.base import Method
from mergestream.report.diff import compare
from tests.conftest import RunCommand, Toys, toy_base, toy_expert

METHODS = [Ledger(), OPCM(), OPCM(scaling="sqrt"), Average(), TIES(), TIES(mode="streaming"), EMA(), LAWA(), MagMax()]
every_method = pytest.mark.parametrize("method", METHODS, ids=repr)
TOO_LITTLE = LocalEngine(max_memory=1)


@every_method
def test_a_budget_that_is_too_small_is_refused_everywhere(method: Any, tmp_path: Path, toys: Toys) -> None:
    with pytest.raises(MergestreamError, match=r"tensor .* needs .* raise --max-memory"):
        mergestream.merge(toys.base, toys.experts[:2], tmp_path / "out", method, engine=TOO_LITTLE)
    assert not list(tmp_path.iterdir()), "nothing is left"
    store = Store.create(tmp_path / "store", toys.base, method, engine=TOO_LITTLE)
    with pytest.raises(MergestreamError, match="raise --max-memory"):
        store.add(toys.experts[0])
    with pytest.raises(MergestreamError, match="raise --max-memory"):
        Merger(toy_base(), method, engine=TOO_LITTLE).add(toy_expert(1))
    Store(store.path).add(toys.experts[0])
    with pytest.raises(MergestreamError, match="raise --max-memory"):
        store.export(tmp_path / "out")
    with pytest.raises(MergestreamError, match="raise --max-memory"):
        compare(Store(store.path, engine=TOO_LITTLE), "0", "1")


@every_method
def test_the_arithmetic_runs_on_the_engines_device_everywhere(
    method: Any, tmp_path: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no GPU here: a second name of the processor shows where tensors are put, and they can be read there."""
    moved: list[str] = []
    to = torch.Tensor.to

    def spy(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if arguments == ("cpu:0",):
            moved.append("there")
            return to(self, "cpu")
        return to(self, *arguments, **options)

    engine = LocalEngine(1, device="cpu:0")
    store = Store.create(tmp_path / "store", toys.base, method, engine=engine)
    monkeypatch.setattr(torch.Tensor, "to", spy)
    for run in (
        lambda: store.add(toys.experts[0]),
        lambda: store.export(tmp_path / "exported"),
        lambda: mergestream.merge(toys.base, toys.experts[:2], tmp_path / "merged", method, engine=engine),
        lambda: Merger(toy_base(), method, engine=engine).add(toy_expert(1)),
    ):
        moved.clear()
        run()
        assert moved


# --- the scale is decided when the model is read out --------------------------------------------------------


def merged_by(method: Method, experts: int = 3, **options: Any) -> dict[str, torch.Tensor]:
    merger = Merger(toy_base(), method)
    for number in range(1, experts + 1):
        merger.add(toy_expert(number))
    return merger.state_dict(**options)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=1e-5, atol=1e-7) for name in one if "weight" in name)


@pytest.mark.parametrize("scale", ["mean", 1 / 3, "0.3333333333333333"])
def test_methods_that_share_a_state_are_each_other_read_out_with_another_scale(scale: Any) -> None:
    average = merged_by(Average())
    assert same(merged_by(mergestream.TaskArithmetic(scale=0.7), scale=scale), average)
    assert not same(merged_by(mergestream.TaskArithmetic(scale=0.7)), average)


def test_opcm_is_read_out_by_either_rule_whatever_it_was_made_with() -> None:
    assert same(merged_by(OPCM(), scale="sqrt"), merged_by(OPCM(scaling="sqrt")))
    assert same(merged_by(OPCM(scaling="sqrt"), scale="adaptive"), merged_by(OPCM()))


@pytest.mark.parametrize("method", [OPCM(), OPCM(scaling="sqrt"), Average()], ids=repr)
@pytest.mark.parametrize("scale", ["adaptive", "sqrt", "mean", 0.25])
def test_a_store_reads_out_what_the_merger_does(method: Any, scale: float | str, tmp_path: Path, toys: Toys) -> None:
    store = Store.create(tmp_path / "store", toys.base, method)
    for expert in toys.experts[:3]:
        store.add(expert)
    with open_checkpoint(store.export(tmp_path / "out", scale=scale)) as found:
        expected = merged_by(method, scale=scale)
        assert all(torch.equal(found.read(name), expected[name]) for name in expected)


def test_adaptive_keeps_the_distance_at_the_mean_norm_for_any_sum(tmp_path: Path, toys: Toys) -> None:
    store = Store.create(tmp_path / "store", toys.base, Average())
    for expert in toys.experts[:3]:
        assert store.add(expert).distance is None, "nobody asked for it"
    out = store.export(tmp_path / "out", scale="adaptive")
    distance = compare(store, "0", str(out)).total.distance
    assert distance == pytest.approx(store.history[-1].mean_norm, rel=1e-2)  # rounded to bfloat16 in part
    assert f"‖merged − θ⁰‖ = {store.history[-1].mean_norm:.6g}" in (out / "README.md").read_text()


@pytest.mark.parametrize("method", [EMA(), LAWA(), MagMax(), TIES()], ids=repr)
def test_rules_for_sums_are_refused_for_what_is_no_sum_and_numbers_are_not(
    method: Any, tmp_path: Path, toys: Toys
) -> None:
    store = Store.create(tmp_path / "store", toys.base, method)
    store.add(toys.experts[0])
    for rule in ("adaptive", "sqrt", "mean"):
        with pytest.raises(UsageError, match=rf"{method.name} does not add up.*{rule}.*pass a number"):
            store.export(tmp_path / "out", scale=rule)
    with open_checkpoint(store.export(tmp_path / "base", scale=0)) as found:
        assert all(torch.equal(found.read(name), tensor) for name, tensor in toy_base().items())


@pytest.mark.parametrize(("scale", "sentence"), [("sqr", "did you mean sqrt"), ("nan", "finite"), ("much", "adaptive")])
def test_a_scale_that_is_none_is_wrong_usage(
    scale: str, sentence: str, tmp_path: Path, toys: Toys, mergestream: RunCommand
) -> None:
    mergestream("init", tmp_path / "store", "--base", toys.base)
    mergestream("add", tmp_path / "store", toys.experts[0])
    result = mergestream("export", tmp_path / "store", tmp_path / "out", "--scale", scale)
    assert (result.code, result.out) == (2, "")
    assert sentence in result.err
    assert not (tmp_path / "out").exists()
