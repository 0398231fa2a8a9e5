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
from tests.methods.formulas import slerp, weighted

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
    assert main(["from-mergekit", "recipe.yaml", "out", "--overwrite", "--quiet", *words]) == 0
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


def test_linear_names_all_models_and_no_base(models: list[StateDict]) -> None:
    listed = [{"model": f"expert{number}.safetensors", "parameters": {"weight": 1}} for number in (1, 2)]
    run("linear", [], models=listed, base_model=None)
    card = Path("out/README.md").read_text()
    assert "# 2 models merged with weighted" in card and "* Base: none; config" in card
    assert "| 1 | expert1 |" in card and "| 2 | expert2 |" in card and "allow-duplicate" not in card
    run("ties", own())
    assert "* Base: `base.safetensors`" in Path("out/README.md").read_text()


def test_slerp_turns_from_the_base_to_the_other_model(models: list[StateDict]) -> None:
    other = {name: x + 2 * torch.randn_like(x) for name, x in models[0].items()}
    save_models(Path(), [models[0], other])
    listed = [{"model": "base.safetensors"}, {"model": "expert1.safetensors"}]
    merged = run("slerp", [], "--allow-other-base", models=listed, parameters={"t": 0.3})
    assert_moved(merged, models, slerp(models[0], [models[0], other], 0.3))
    assert "# 2 models merged with slerp" in Path("out/README.md").read_text()
    words = "merge --method slerp --set t=0.3 --base base.safetensors base.safetensors expert1.safetensors"
    assert main([*words.split(), "-o", "again", "--allow-other-base"]) == 0
    assert_same(load_model(Path("again")), merged, "without a recipe")
    words = words.replace(" base.safetensors expert1", " expert1", 1)
    assert main([*words.split(), "-o", "alone"]) == 2 and not Path("alone").exists()


def test_slices_must_cover_all_layers(models: list[StateDict], capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {f"layers.{number}.{name}.weight": (3, 2) for number in range(12) for name in "ab"} | {"norm.bias": (2,)}
    save_models(Path(), make_models(1, shapes=shapes))
    sources = {"model": "expert1.safetensors", "parameters": {"weight": 0.5}}
    expected = run("task_arithmetic", [], models=[sources])
    for ends in ([12], [5, 12]):
        slices = [
            {"sources": [{**sources, "layer_range": [start, end]}]}
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        assert_same(run("task_arithmetic", [], models=None, slices=slices), expected, "in slices")
    recipe = {"merge_method": "ties", "base_model": "base.safetensors", "slices": slices[:1]}
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["from-mergekit", "recipe.yaml", "elsewhere"]) == 2
    assert "the slices end at layer 5, and base.safetensors has 12" in capsys.readouterr().err


def test_the_output_is_given_once(models: list[StateDict], capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["out", "-o", "out"]):
        assert main(["from-mergekit", "recipe.yaml", *words]) == 2
        assert "give one output directory" in capsys.readouterr().err


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
    assert capsys.readouterr().out == "out: 3 models merged by ties as in recipe.yaml\n"
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
