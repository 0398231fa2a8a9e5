"""The same tiny suite with LoRA adapters as experts: trained by PEFT, scored by PEFT, merged by mergestream."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.finetuning import add_row
from benchmarks.suites.trained import TrainedSuite
from benchmarks.suites.training import Recipe, save_model
from mergestream.checkpoints import open_checkpoint
from mergestream.evaluation.bench import Plan, run_bench
from mergestream.evaluation.rows import parse_rows
from mergestream.evaluation.streams import model_digest, score
from mergestream.methods.average import Average
from mergestream.store.store import Store
from tests.benchmarks.suites.test_trained import tiny_trained_suite


@pytest.fixture
def suite() -> TrainedSuite:
    return tiny_trained_suite().with_lora()


def whole(suite: TrainedSuite, task: str, output: Path) -> Path:
    """The expert of a task, merged into the base by PEFT."""
    save_model(suite.load(suite.expert(task)), suite.base(), output)
    return output


@pytest.mark.slow
def test_adapters_are_trained_merged_and_scored(suite: TrainedSuite, tmp_path: Path) -> None:
    plan = Plan(parse_rows("average,opcm"), orders=1, workers=1)
    run_bench(suite, plan, tmp_path / "out", lambda *_: None)
    results = add_row(suite, tmp_path / "out")
    assert results.suite == "tiny-lora"
    assert all(results.fine_tuned[task] > results.pretrained[task] for task in suite.tasks)
    tuned = results.methods["continual_finetuning"][0]
    first, last = tuned.order[0], tuned.order[-1]
    assert tuned.steps[0]["accuracies"][first] == results.fine_tuned[first]
    assert tuned.steps[1]["accuracies"][last] > results.pretrained[last]
    assert results.model_bytes > 0
    recipe = json.loads((tmp_path / "out" / "results.json").read_text())["settings"]["protocol"]["recipe"]
    assert recipe == asdict(suite.recipe) and (recipe["rank"], recipe["learning_rate"]) == (16, 1e-2)


def test_an_expert_is_a_directory_of_pefts(suite: TrainedSuite) -> None:
    expert = suite.expert("rows")
    config = json.loads((expert / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"], config["bias"]) == (16, 32, 0, "none")
    assert config["base_model_name_or_path"] == suite.base().name
    files = {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert {file.name for file in expert.iterdir()} == files
    assert not any(str(suite.base().parent).encode() in (expert / file).read_bytes() for file in files)
    modules = suite.load(suite.base()).named_modules()
    linear = {name for name, module in modules if isinstance(module, torch.nn.Linear)}
    with open_checkpoint(expert / "adapter_model.safetensors") as weights:
        factors = {name.removesuffix(".lora_A.weight") for name in weights.tensors if "lora_A" in name}
    assert factors == {f"base_model.model.{name}" for name in linear}


def test_training_is_deterministic_and_cached(
    suite: TrainedSuite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expert = suite.expert("rows")
    written = (expert / "adapter_model.safetensors").stat().st_mtime_ns
    torch.manual_seed(1)  # whatever was drawn before
    assert tiny_trained_suite().with_lora().expert("rows") == expert
    assert (expert / "adapter_model.safetensors").stat().st_mtime_ns == written
    monkeypatch.setenv("MERGESTREAM_CACHE", str(tmp_path / "other-cache"))
    again = tiny_trained_suite().with_lora().expert("rows")
    assert again != expert and model_digest(again) == model_digest(expert)


def test_the_same_factors_scaled_otherwise_are_another_model(suite: TrainedSuite) -> None:
    expert = suite.expert("rows")
    digest, path = model_digest(expert), expert / "adapter_config.json"
    path.write_text(path.read_text().replace('"lora_alpha": 32', '"lora_alpha": 16'))
    assert model_digest(expert) != digest


def test_data_and_heads_are_the_plain_suites(suite: TrainedSuite, own_cache: Any) -> None:
    plain = tiny_trained_suite()
    assert torch.equal(suite.head("rows").weight, plain.head("rows").weight)
    assert suite.expert_directory("rows") != plain.expert_directory("rows")
    assert [path.name for path in (own_cache / "data").iterdir()] == ["tiny"]
    assert [path.name for path in (own_cache / "heads").iterdir()] == ["tiny"]


def test_the_recipe_of_full_experts_has_no_more_fields() -> None:
    """They are part of the name under which an expert is cached: one more, and all are trained again."""
    assert set(asdict(Recipe())) == {"samples", "epochs", "batch_size", "learning_rate", "seed"}


def test_peft_and_mergestream_make_the_same_model_of_an_adapter(suite: TrainedSuite, tmp_path: Path) -> None:
    expected = suite.load(whole(suite, "rows", tmp_path / "whole")).state_dict()
    store = Store.create(tmp_path / "store", base=suite.base(), method=Average())
    store.add(suite.expert("rows"))
    merged = suite.load(store.export(tmp_path / "merged")).state_dict()
    base = suite.load(suite.base()).state_dict()
    assert any(not torch.equal(tensor, base[name]) for name, tensor in merged.items())
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_adapters_are_scored_as_the_whole_models_are(
    suite: TrainedSuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = [score(suite, suite.expert(task), [task]) for task in suite.tasks]
    models = {task: whole(suite, task, tmp_path / task) for task in suite.tasks}
    monkeypatch.setattr(suite, "expert", models.__getitem__)
    assert [score(suite, suite.expert(task), [task]) for task in suite.tasks] == scores


def test_peft_is_imported_where_it_is_needed_only() -> None:
    code = "import sys, benchmarks.suites.text_lora, benchmarks.suites.vision_lora; sys.exit('peft' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True)
