"""Scores that a harness writes: lm-eval itself, on a tiny model and a task of our own, and its format."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mergestream import Store
from mergestream.commands import CommandError
from mergestream.report.scores import describe_evaluation, read_evaluation

LM_EVAL: dict[str, Any] = {
    "results": {
        "topic": {"alias": "topic", "sample_len": 40, "ppl,none": 9.0, "acc,none": 0.5, "acc_stderr,none": 0.1},
        "facts": {"alias": "facts", "acc,none": 0.7, "acc_stderr,none": "N/A"},
        "facts_history": {"alias": " - history", "acc,none": 0.6},
        "facts_physics": {"alias": " - physics", "acc,none": 0.8},
        "wiki": {"alias": "wiki", "word_perplexity,none": 12.5},
        "header": {"alias": "header", " ": " "},
    },
    "group_subtasks": {"facts": ["facts_history", "facts_physics"], "header": ["wiki"]},
    "higher_is_better": {
        "topic": {"ppl": False, "acc": True},
        "facts": {"acc": True},
        "wiki": {"word_perplexity": False},
    },
}


def written(place: Path, *contents: Any) -> Path:
    for number, content in enumerate(contents):
        (place / "model").mkdir(exist_ok=True)
        (place / "model" / f"results_{number}.json").write_text(json.dumps(content))
    return place


def test_of_lm_eval_each_task_or_its_group_has_its_first_metric_of_which_more_is_better(tmp_path: Path) -> None:
    found = read_evaluation("harness", written(tmp_path, LM_EVAL))
    assert found["scores"] == {"topic": 0.5, "facts": 0.7, "wiki": 12.5}
    assert found["score"] == pytest.approx(0.6)  # perplexities are no part of it
    assert describe_evaluation(found) == "0.6 (topic 0.5, facts 0.7, wiki 12.5)"


def test_where_less_is_better_everywhere_the_score_is_the_mean_all_the_same(tmp_path: Path) -> None:
    only = {**LM_EVAL, "results": {"wiki": LM_EVAL["results"]["wiki"]}}
    assert read_evaluation("harness", written(tmp_path, only))["score"] == 12.5


def test_plain_objects_will_do_and_files_add_up(tmp_path: Path) -> None:
    found = read_evaluation("mine", written(tmp_path, {"a": 1, "model": "x", "b": 0.5}, {"c": 0}))
    assert (found["score"], found["scores"]) == (0.5, {"a": 1.0, "b": 0.5, "c": 0.0})
    many = read_evaluation("mine", written(tmp_path, {f"t{i:02}": i for i in range(30)}))
    assert describe_evaluation(many).endswith("t07 7, t08 8, t09 9, …)")


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        ([], "wrote no scores"),
        ([{"model": "x"}], "wrote no scores"),
        ([{"results": {"t": 3}}], "wrote no scores"),
        ([{"a": float("nan")}], "gave a the score nan"),
        ([[1]], "not a JSON object"),
    ],
)
def test_what_has_no_scores_is_told(tmp_path: Path, contents: list[Any], reason: str) -> None:
    with pytest.raises(CommandError, match=rf"--evaluate 'mine' .*{reason}.*; nothing was added"):
        read_evaluation("mine", written(tmp_path, *contents))


TASK = """
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
COLOURS = {"sky": "blue", "grass": "green", "blood": "red", "sea": "blue"}
WORDS = ["<unk>", "</s>", *COLOURS, *sorted(set(COLOURS.values()))]


@pytest.fixture
def language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base, an expert that knows its colours, and the task that asks for them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": len(WORDS),
        "n_positions": 8,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 1,
        "initializer_range": 0.3,
    }
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pairs = torch.tensor([[WORDS.index(thing), WORDS.index(colour)] for thing, colour in COLOURS.items()])
    for _ in range(40):
        model(input_ids=pairs, labels=pairs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "expert")
    tokenizer.save_pretrained(tmp_path / "expert")
    choices = sorted(set(COLOURS.values()))
    rows = [{"question": q, "choices": choices, "answer": choices.index(a)} for q, a in COLOURS.items()]
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tasks/colours.yaml").write_text(TASK.format(data=tmp_path / "tasks/data.jsonl"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    return tmp_path


@pytest.mark.slow
def test_lm_eval_scores_the_merged_model_before_it_counts(language: Path, done: Callable[..., str]) -> None:
    command = shlex.join([sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", "colours", "--device", "cpu"])
    command += f" --model_args pretrained={{model}} --include_path {language / 'tasks'} --output_path {{scores}}"
    store = language / "store"
    done("init", store, "--base", language / "base", "--method", "average")
    done("add", store, language / "expert", "--evaluate", command, "--gate", "score>=0.9")
    (entry,) = Store(store).history
    assert entry.evaluation == {"command": command, "score": 1.0, "scores": {"colours": 1.0}}
    assert "score after expert: 1 (colours 1)" in done("log", store)
    assert "score 1 (colours 1) |" in done("report", store, "--format", "md")
    assert not (store / "candidate").exists()
