"""mergekit recipes give what the plain formulas say; `benchmarks.recipes` compares with mergekit itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mergestream import DARE, ModelStock
from mergestream.cli import main
from mergestream.testing import (
    StateDict,
    assert_close,
    assert_same,
    load_model,
    make_models,
    merged_in_memory,
    pieces_of,
    save_models,
)
from mergestream.testing.models import saved_adapters
from tests.methods.formulas import weighted

WEIGHTS = (0.5, -0.3, 0.9)
DENSITIES = (0.3, 1.0, 0.01)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[StateDict]:
    """In the working directory, as base.safetensors and expert1.safetensors …"""
    made = make_models(3, torch.float64)
    save_models(tmp_path, made)
    monkeypatch.chdir(tmp_path)
    return made


def run(method: str, given: Sequence[dict[str, float]], *words: str, **others: Any) -> StateDict:
    names = [f"expert{number}.safetensors" for number in range(1, len(given) + 1)]
    listed = [{"model": name, "parameters": parameters} for name, parameters in zip(names, given, strict=True)]
    recipe = {"merge_method": method, "base_model": "base.safetensors", "models": listed, **others}
    Path("recipe.yaml").write_text(yaml.safe_dump({key: value for key, value in recipe.items() if value is not None}))
    assert main(["from-mergekit", "recipe.yaml", "-o", "out", "--overwrite", "--quiet", *words]) == 0
    return load_model(Path("out"))


def own(densities: Sequence[float] = (1.0, 1.0, 1.0)) -> list[dict[str, float]]:
    return [{"weight": weight, "density": density} for weight, density in zip(WEIGHTS, densities, strict=True)]


def assert_moved(merged: StateDict, models: Sequence[StateDict], moved: StateDict) -> None:
    for name, x in models[0].items():
        torch.testing.assert_close(merged[name], x + moved[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("normalize", [False, True])
def test_task_arithmetic(models: list[StateDict], normalize: bool) -> None:
    merged = run("task_arithmetic", own(), parameters={"lambda": 0.7, "normalize": normalize})
    assert_moved(merged, models, weighted(models[0], models[1:], "0.5,-0.3,0.9", normalize=normalize, scale=0.7))


@pytest.mark.parametrize("normalize", [True, False])
def test_ties(models: list[StateDict], normalize: bool) -> None:
    """A density of 0.01 is less than one entry of a tiny tensor: one entry is kept."""
    merged = run("ties", own(DENSITIES), parameters={"normalize": normalize, "lambda": 0.7})
    settings = {"elect": True, "normalize": normalize, "scale": 0.7}
    assert_moved(merged, models, weighted(models[0], models[1:], "0.5,-0.3,0.9", "0.3,1,0.01", **settings))


@pytest.mark.parametrize("base", [None, "base.safetensors"])
def test_linear_is_the_weighted_mean(models: list[StateDict], base: str | None) -> None:
    """A base_model is one of the models, with the same weight as all."""
    given = [{"weight": 0.5}, {"weight": 1.5}, {"weight": 1.0}]
    merged = run("linear", given, base_model=base, parameters={"weight": 2.0})
    weights = [2.0 if base else 0.0, 0.5, 1.5, 1.0]
    for name, x in merged.items():
        mean = sum(w * model[name] for w, model in zip(weights, models, strict=True)) / sum(weights)
        torch.testing.assert_close(x, mean, rtol=1e-9, atol=1e-12)


def test_model_stock_is_the_method_of_that_name(models: list[StateDict]) -> None:
    assert_same(run("model_stock", [{}, {}, {}]), merged_in_memory(ModelStock(), models[0], models[1:]), "by a recipe")


def test_dare_linear_is_dare_with_weights(models: list[StateDict]) -> None:
    given = [{"weight": 0.3, "density": 0.5}] * 3
    merged = run("dare_linear", given, "--seed", "5")
    as_method = merged_in_memory(DARE(density=0.5, seed=5), models[0], models[1:])
    assert_close(merged, as_method, models[0], 1e-9, "by a recipe")
    assert not torch.equal(run("dare_linear", given)["a.weight"], merged["a.weight"])
    settings = {"thin": "random", "seed": 5}
    half = run("dare_linear", given, "--seed", "5", parameters={"rescale": False})
    assert_moved(half, models, weighted(models[0], models[1:], "0.3", "0.5", **settings))


def test_dare_ties_elects_signs_among_the_kept_entries(models: list[StateDict]) -> None:
    merged = run("dare_ties", own(DENSITIES), parameters={"normalize": True})
    settings = {"thin": "random", "elect": True, "normalize": True, "rescale": True}
    assert_moved(merged, models, weighted(models[0], models[1:], "0.5,-0.3,0.9", "0.3,1,0.01", **settings))


@pytest.mark.parametrize("method", ["ties", "dare_ties"])
def test_pieces_and_workers_make_no_difference(models: list[StateDict], method: str) -> None:
    whole = run(method, own(DENSITIES))
    with pieces_of(7):
        assert_same(run(method, own(DENSITIES), "--workers", "3"), whole, "in pieces")


def test_adapters_are_merged_without_full_models(monkeypatch: pytest.MonkeyPatch) -> None:
    with saved_adapters() as (directory, path, base, _experts, adapters):
        monkeypatch.chdir(directory)
        as_models = run("ties", [{"weight": 1.0, "density": 0.5}] * 3)
        listed = [{"model": f"{path.name}+{adapter}", "parameters": {"weight": 1.0}} for adapter in adapters]
        merged = run("ties", [], models=listed, parameters={"density": 0.5})
    assert_close(merged, as_models, base, 1e-9, "as adapters")


def test_dtype_comes_from_the_recipe_or_the_command(models: list[StateDict]) -> None:
    same = [{"weight": 1.0}] * 3
    assert run("ties", same, dtype="float32", out_dtype="bfloat16")["a.bias"].dtype == torch.bfloat16
    assert run("ties", same, "--dtype", "float16", dtype="float32")["a.bias"].dtype == torch.float16
    assert run("ties", same)["a.bias"].dtype == torch.float64


def test_output_as_text_and_json(models: list[StateDict], capsys: pytest.CaptureFixture[str]) -> None:
    run("ties", own(DENSITIES))
    assert capsys.readouterr().out == "out: 3 experts merged by ties as in recipe.yaml\n"
    card = Path("out/README.md").read_text()
    assert "elect = True" in card and "weights = 0.5,-0.3,0.9" in card and "expert2" in card
    run("dare_linear", own(DENSITIES), "--json", "--seed", "2", parameters={"int8_mask": True})
    result = json.loads(capsys.readouterr().out)
    assert result["merge_method"] == "dare_linear" and result["base"] == "base.safetensors"
    assert result["experts"][1] == {"source": "expert2.safetensors", "weight": -0.3, "density": 1.0}
    assert result["parameters"]["seed"] == 2 and len(result["notes"]) == 2


def test_the_output_does_not_replace_the_recipe(models: list[StateDict], capsys: pytest.CaptureFixture[str]) -> None:
    run("ties", own())
    Path("recipe.yaml").rename("out/recipe.yaml")
    assert main(["from-mergekit", "out/recipe.yaml", "-o", "out", "--overwrite"]) == 1
    assert "out holds out/recipe.yaml, which the merge is made of" in capsys.readouterr().err
    assert main(["from-mergekit", "nowhere.yaml", "-o", "elsewhere"]) == 2
    assert capsys.readouterr().err == "error: nowhere.yaml cannot be read: No such file or directory\n"
