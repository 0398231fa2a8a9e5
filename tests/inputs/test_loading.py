"""Which model, tokenizer and chat template are loaded, and a sentence for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergestream.errors import MergestreamError
from mergestream.inputs.reading import Inputs, Sample, read_inputs
from mergestream.progress import NoProgress
from tests import speaking
from tests.inputs import conftest as families
from tests.inputs.conftest import TEXTS, assert_moments, expected_moments, expert_of, measure, save_with_companions
from tests.workshop import transformers

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}the{% endif %}"


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def samples(*records: Any) -> list[Sample]:
    return read_inputs(records, progress=NoProgress())


def test_conversations_go_through_the_experts_template(tmp_path: Path) -> None:
    """With the answer that is given, or after the prompt of an answer."""
    base = save_with_companions(families.llama(), tmp_path / "base")
    expert = expert_of(base, tmp_path / "expert")
    chats = [
        [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on"}],
        [{"role": "user", "content": "a dog"}],
    ]
    with pytest.raises(MergestreamError, match=r"input 1 cannot be run by the model: .*chat_template"):
        measure(base, expert, samples(*[{"messages": chat} for chat in chats]))
    tokens = transformers.AutoTokenizer.from_pretrained(expert)
    tokens.chat_template = TEMPLATE
    tokens.save_pretrained(expert)
    found = measure(base, expert, samples(*[{"messages": chat} for chat in chats]), Inputs([], tokens=1))
    model = speaking.auto(expert).eval()
    one, two = (tokens(text, return_tensors="pt").input_ids for text in ("the cat sat on", "a dog the"))
    two = torch.cat([two, model(two).logits[:, -1:].argmax(-1)], 1)
    assert_moments(found, expected_moments(model, lambda model: [model(one), model(two)]))
    prompts = [tokens(text, return_tensors="pt").input_ids for text in ("the cat the", "a dog the")]
    states = [speaking.auto(base).eval()(ids, output_hidden_states=True).hidden_states[-1].mean(1) for ids in prompts]
    assert found.features is not None
    torch.testing.assert_close(found.features.mean, torch.cat(states).mean(0).detach(), rtol=1e-5, atol=1e-6)


def test_long_text_is_cut(tmp_path: Path) -> None:
    """To what the model takes, with room for the answer."""
    base = save_with_companions(families.gpt2(), tmp_path / "base")
    found = measure(base, base, samples("the cat sat " * 50, "a dog"), Inputs([], tokens=6))
    tokens, model = transformers.AutoTokenizer.from_pretrained(base), speaking.auto(base).eval()
    prompts = [tokens(text, return_tensors="pt").input_ids for text in ("the cat sat " * 3 + "the", "a dog")]
    assert prompts[0].shape[1] == 16 - 6
    features = [model(ids, output_hidden_states=True).hidden_states[-1].mean(1) for ids in prompts]
    assert found.features is not None
    torch.testing.assert_close(found.features.mean, torch.cat(features).mean(0).detach())


def test_the_class_and_the_names_of_a_task_model(tmp_path: Path, texts: list[Sample]) -> None:
    """The base is an encoder without the prefix; the expert has a head, a prefix and a wrapper."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**families.SMALL, vocab_size=13, max_position_embeddings=16)
    base = save_with_companions(transformers.BertModel(config, add_pooling_layer=False), tmp_path / "base")
    torch.manual_seed(5)
    task = transformers.BertForSequenceClassification(config)
    expert = save_with_companions(task, tmp_path / "expert")
    weights = {f"module.{name}": value for name, value in load_file(expert / "model.safetensors").items()}
    save_file(weights, expert / "model.safetensors", metadata={"format": "pt"})
    found = measure(base, expert, texts, ignore=["*classifier*", "*pooler*"])
    assert "encoder.layer.0.attention.self.query.weight" in found.layers.shared
    batch = transformers.AutoTokenizer.from_pretrained(base)(TEXTS, padding=True, return_tensors="pt")
    expected = expected_moments(
        task.double().eval(), lambda model: model(**batch), {batch["input_ids"].shape[1]: batch["attention_mask"]}
    )
    encoder = {name.removeprefix("bert."): part for name, part in expected.items() if "encoder" in name}
    assert_moments(found, encoder)


def test_what_cannot_be_loaded(tmp_path: Path, texts: list[Sample]) -> None:
    base = save_with_companions(families.llama(), tmp_path / "base")
    expert = expert_of(base, tmp_path / "expert")
    config = (expert / "config.json").read_text()
    edit(expert / "config.json", architectures=["Mine"], model_type="mine", auto_map={"AutoConfig": "mine.Mine"})
    (expert / "mine.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(MergestreamError, match=r"transformers cannot load .*expert: .*remote code|custom code"):
        measure(base, expert, texts)
    (expert / "config.json").write_text(config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (expert / name).unlink()
        (base / name).unlink()
    with pytest.raises(MergestreamError, match="there is no tokenizer or image processor beside the model"):
        measure(base, expert, texts)
    arrays = [Sample({"input_ids": torch.tensor([[2, 3]])}, "a"), Sample({"input_ids": torch.tensor([[4]])}, "b")]
    assert measure(base, expert, arrays).layers.moments
    edit(expert / "config.json", num_hidden_layers=3)
    with pytest.raises(MergestreamError, match=r"expert cannot be run: it lacks model\.layers\.2"):
        measure(base, expert, arrays)
    (base / "config.json").unlink()
    (expert / "config.json").unlink()
    with pytest.raises(MergestreamError, match=r"expert has no config\.json, by which transformers would load it"):
        measure(base, expert, arrays)
    other = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(MergestreamError, match="the module has none of the tensors of"):
        measure(base, expert, arrays, Inputs([], model=other))
