from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergestream import Store
from mergestream.errors import MergestreamError
from mergestream.report.diff import compare


def flat(path: Path) -> torch.Tensor:
    tensors = load_file(path / "model.safetensors")
    return torch.cat([tensors[name].reshape(-1).double() for name in sorted(tensors)])


def test_two_steps_differ_as_their_exports_do(scored: Store, store: Store, models: Path, tmp_path: Path) -> None:
    found = compare(scored, "2", "3")
    a, b, base = (
        flat(store.export(tmp_path / "two")),
        flat(scored.export(tmp_path / "three")),
        flat(models / "base"),
    )
    assert found.total.norm_a == pytest.approx(float((a - base).norm()), rel=1e-4)
    assert found.total.norm_b == pytest.approx(float((b - base).norm()), rel=1e-4)
    assert found.total.distance == pytest.approx(float((a - b).norm()), rel=1e-4)
    cosine = float((a - base) @ (b - base) / ((a - base).norm() * (b - base).norm()))
    assert found.total.cosine == pytest.approx(cosine, abs=1e-4)
    assert found.a == "step 2 (digits)" and found.b == "step 3 (pets)"


def test_a_step_and_a_checkpoint(scored: Store, models: Path, tmp_path: Path) -> None:
    exported = scored.export(tmp_path / "merged")
    same = compare(scored, "3", str(exported)).total
    assert same.distance < 1e-5 * same.norm_a
    assert same.cosine == pytest.approx(1)
    other = compare(scored, "3", str(models / "cars")).total
    assert other.norm_b == pytest.approx(scored.history[0].norm, rel=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e200])
def test_numbers_that_cannot_be_compared_are_refused_by_name(
    scored: Store, models: Path, tmp_path: Path, value: float
) -> None:
    tensors = load_file(models / "cars" / "model.safetensors")
    name = next(name for name in scored.manifest.base.merged if tensors[name].ndim == 2)
    tensors[name] = tensors[name].double()
    tensors[name][0, 0] = value
    save_file(tensors, tmp_path / "strange.safetensors")
    with pytest.raises(MergestreamError, match=f"^{name} of step 3 .* or .*strange.* holds NaN, Inf or numbers that"):
        compare(scored, "3", str(tmp_path / "strange.safetensors"))


def test_the_base_is_step_zero(scored: Store) -> None:
    found = compare(scored, "0", "3").total
    assert (found.norm_a, found.cosine) == (0, None)
    assert found.distance == pytest.approx(scored.history[-1].distance, rel=1e-5)


def test_what_moved_most_comes_first_and_parts_add_up(scored: Store) -> None:
    found = compare(scored, "1", "3")
    for parts in (found.layers, found.tensors):
        distances = [part.distance for part in parts.values()]
        assert distances == sorted(distances, reverse=True)
        assert sum(distance**2 for distance in distances) == pytest.approx(found.total.distance**2)


@pytest.mark.parametrize(("which", "message"), [("4", "no step 4"), ("1", "no longer keeps step 1")])
def test_a_step_that_is_not_there(store: Store, models: Path, which: str, message: str) -> None:
    store.add(models / "pets")
    with pytest.raises(MergestreamError, match=message):
        compare(store, which, "3")


def test_the_command_prints_both_forms(scored: Store, done: Callable[..., str]) -> None:
    out = done("diff", scored.path, 2, 3)
    assert "layers with the largest differences" in out and "A: step 2 (digits)" in out
    data = json.loads(done("diff", scored.path, 2, 3, "--json"))
    assert data["total"]["distance"] > 0 and len(data["tensors"]) == 12
