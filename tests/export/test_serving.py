"""The example that serves all experts of a store from one base."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from mergestream import Store
from tests.conftest import load_script
from tests.workshop import Workshop, llama, peft, transformers

SCRIPT = Path(__file__).parents[2] / "examples" / "serving" / "serve.py"


@pytest.fixture(scope="module")
def serving() -> ModuleType:
    return load_script(SCRIPT)


@pytest.fixture
def base(workshop: Workshop) -> Path:
    base = workshop.base(llama, max_position_embeddings=64)
    words = {word: number for number, word in enumerate(["<s>", "</s>", *(f"w{n}" for n in range(38))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(base)
    return base


@pytest.fixture
def experts(workshop: Workshop, base: Path) -> dict[str, Path]:
    # of rank 1, the share of a width of 8 that a ledger keeps of each expert: as little is cut as with real ones
    fields: dict[str, Any] = {"r": 1, "lora_alpha": 4, "target_modules": "all-linear"}
    return {name: workshop.adapter(base, name, seed, **fields) for seed, name in enumerate(("legal", "medical", "sql"))}


@pytest.fixture
def store(tmp_path: Path, base: Path, experts: dict[str, Path]) -> Store:
    store = Store.create(tmp_path / "store", base=base)
    for name, adapter in experts.items():
        store.add(adapter, name=name)
    return store


def test_each_request_is_answered_by_the_base_and_its_expert(
    serving: ModuleType, tmp_path: Path, workshop: Any, base: Path, experts: dict[str, Path], store: Store
) -> None:
    adapters = serving.write_adapters(store, tmp_path / "out")
    assert list(adapters) == [*experts, "merged"]
    served = serving.load(base, adapters)
    prompt = torch.arange(2, 22)[None]
    with torch.inference_mode():
        alone = workshop.load(base)(prompt).logits
        for name in [*experts, *reversed(experts)]:  # there and back: switching leaves nothing behind
            served.set_adapter(name)
            expected = peft.PeftModel.from_pretrained(workshop.load(base), experts[name])(prompt).logits
            moved = (expected - alone).norm()
            assert (served(prompt).logits - expected).norm() < 0.02 * moved, "bfloat16 holds three digits"
        served.set_adapter("merged")
        merged = workshop.load(store.export(tmp_path / "full"))(prompt).logits
        torch.testing.assert_close(served(prompt).logits.double(), merged.double(), rtol=1e-3, atol=1e-4)


def test_it_answers_and_counts_bytes(
    serving: ModuleType, base: Path, experts: dict[str, Path], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    serving.main([str(store.path), str(base), "legal: w1 w2", "sql: w1 w2", "merged: w3"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["legal", "sql", "merged"]
    assert lines[0].removeprefix("legal") != lines[1].removeprefix("sql")
    assert [re.sub(r"[\d.]+ MB", "…", line) for line in lines[3:]] == [
        "one store: …",
        "3 adapters: …",
        "3 full models: …",
    ]


def test_an_unknown_expert_is_told_with_those_there_are(
    serving: ModuleType, base: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        serving.main([str(store.path), str(base), "cooking: w1"])
    assert "there is no expert cooking; there are legal, medical, sql, merged" in capsys.readouterr().err


def test_the_bytes_are_those_on_disk(serving: ModuleType, tmp_path: Path, base: Path, store: Store) -> None:
    found = serving.sizes(store, base, serving.write_adapters(store, tmp_path / "out"))
    assert found["3 full models"] == 3 * (base / "model.safetensors").stat().st_size
    assert found["one store"] == sum(file.stat().st_size for file in store.path.rglob("*") if file.is_file())
