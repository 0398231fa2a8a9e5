"""Chat template, special tokens and generation settings of an export, as transformers reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mergestream import Average, Store, merge
from mergestream.checkpoints.settings import read_settings
from mergestream.errors import MergestreamError, MergestreamWarning, UsageError
from tests.conftest import RunCommand
from tests.workshop import llama, peft, transformers

WORDS = ["<s>", "</s>", "<unk>", "<|end|>", *(f"word{number}" for number in range(36))]
TEMPLATE = "{% for message in messages %}word1 {{ message['content'] }} <|end|>{% endfor %}"
CHAT = [{"role": "user", "content": "word5"}]


def save_tokenizer(directory: Path, template: str | None = None, **fields: Any) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", **fields}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **tokens)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)


def save_expert(base: Path, directory: Path, seed: int, template: str | None = TEMPLATE, **generation: Any) -> Path:
    """An instruction tune of the base: its weights a little away, with a chat template and an end of its own."""
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    model.config.eos_token_id = 3
    settings = {"bos_token_id": 0, "eos_token_id": [3, 1], "do_sample": True, "temperature": 0.5, **generation}
    model.generation_config = transformers.GenerationConfig(**settings)
    model.save_pretrained(directory)
    save_tokenizer(directory, template, eos_token="<|end|>")
    return directory


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base")
    return tmp_path / "base"


def store_of(base: Path, *experts: Path, method: Any = None) -> Store:
    store = Store.create(base.with_name("store"), base, method)
    for expert in experts:
        store.add(expert)
    return store


def told(directory: Path, name: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((directory / name).read_text())
    return fields


def check_chat(directory: Path) -> None:
    """The model ends its turns as the experts do."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "word1 word5 <|end|>"
    assert tokenizer.eos_token == "<|end|>" and tokenizer.eos_token_id == 3 and tokenizer.bos_token == "<s>"
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert not model.generation_config._from_model_config
    assert model.generation_config.eos_token_id == [3, 1] and model.config.eos_token_id == 3


@pytest.mark.parametrize("method", [None, Average()], ids=["ledger", "average"])
def test_what_the_experts_agree_on_is_taken(base: Path, tmp_path: Path, method: Any) -> None:
    experts = [save_expert(base, tmp_path / name, seed) for seed, name in enumerate(("law", "code"), 1)]
    out = store_of(base, *experts, method=method).export(tmp_path / "out")
    check_chat(out)
    assert transformers.GenerationConfig.from_pretrained(out).temperature == 0.5
    card = (out / "README.md").read_text()
    assert (
        "* Settings: from the experts `chat_template`, `eos_token`, `do_sample`, `eos_token_id`, `temperature`" in card
    )


def test_where_the_experts_differ_the_bases_is_kept_and_noted(
    base: Path, tmp_path: Path, mergestream: RunCommand
) -> None:
    law = save_expert(base, tmp_path / "law", 1)
    code = save_expert(base, tmp_path / "code", 2, "{{ messages[0]['content'] }}", temperature=0.9)
    store = store_of(base, law, code)
    found = mergestream("export", store.path, tmp_path / "out")
    note = (
        "the experts have different settings (chat_template, temperature), so the base's are kept; export --files-from "
        "NAME takes those of one expert"
    )
    assert f"note: {note}\n" in found.err
    assert not transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [3, 1], "they agree on this"
    assert "temperature" not in told(tmp_path / "out", "generation_config.json")
    differ = "from the base, because the experts differ, `chat_template`, `temperature`"
    assert differ in (tmp_path / "out" / "README.md").read_text()
    as_json = mergestream("export", store.path, tmp_path / "out", "--overwrite", "--json")
    assert note in json.loads(as_json.out)["notes"]
    chosen = mergestream("export", store.path, tmp_path / "out", "--files-from", "law", "--overwrite")
    assert chosen.code == 0 and not chosen.err
    check_chat(tmp_path / "out")
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.5
    assert told(tmp_path / "out", "mergestream.json")["readout"]["files_from"] == "law"
    store.export(tmp_path / "without", without=["code"])
    check_chat(tmp_path / "without")


def test_files_from_the_base_are_the_bases(base: Path, tmp_path: Path) -> None:
    store = store_of(base, save_expert(base, tmp_path / "law", 1))
    out = store.export(tmp_path / "out", files_from="base")
    names = {path.name for path in base.iterdir() if path.suffix in (".json", ".jinja")}
    assert names == {path.name for path in out.iterdir() if path.suffix in (".json", ".jinja")} - {"mergestream.json"}
    assert all((out / name).read_bytes() == (base / name).read_bytes() for name in names)
    with pytest.raises(MergestreamError, match="no expert named lew has been absorbed; did you mean law"):
        store.export(tmp_path / "other", files_from="lew")


def test_one_expert_brings_its_own_files(base: Path, tmp_path: Path) -> None:
    """Also where the base has something that the expert does not have."""
    save_tokenizer(base, "{{ 'of the base' }}", pad_token="<unk>", padding_side="left")
    generation = base / "generation_config.json"
    generation.write_text(json.dumps({**told(base, "generation_config.json"), "top_k": 7}))
    law = save_expert(base, tmp_path / "law", 1)
    plain = save_expert(base, tmp_path / "plain", 2, None)
    edit = law / "config.json"
    edit.write_text(json.dumps({**json.loads(edit.read_text()), "max_position_embeddings": 4096}))
    store = store_of(base, law, plain)
    check_chat(store.export(tmp_path / "out", readout="expert:law"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.pad_token is None and tokenizer.padding_side == "right"
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.max_position_embeddings == 4096 and "top_k" not in told(tmp_path / "out", "generation_config.json")
    out = store.export(tmp_path / "plain-again", readout="expert:plain")
    assert transformers.AutoTokenizer.from_pretrained(out).chat_template is None
    store.export(tmp_path / "based", readout="expert:law", files_from="base")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "based").pad_token == "<unk>"


def test_an_adapter_may_carry_a_tokenizer(base: Path, tmp_path: Path) -> None:
    for seed, name in enumerate(("law", "bare"), 1):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM.from_pretrained(base)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        peft.get_peft_model(model, config).save_pretrained(tmp_path / name)
    save_tokenizer(tmp_path / "law", TEMPLATE, eos_token="<|end|>")
    out = store_of(base, tmp_path / "law", tmp_path / "bare").export(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token == "<|end|>"


@pytest.mark.parametrize("form", ["text", "named"])
def test_a_template_inside_the_tokenizers_config_counts(base: Path, tmp_path: Path, form: str) -> None:
    """As transformers wrote it before it had a file of its own."""
    law = save_expert(base, tmp_path / "law", 1)
    (law / "chat_template.jinja").unlink()
    template = TEMPLATE if form == "text" else [{"name": "default", "template": TEMPLATE}]
    path = law / "tokenizer_config.json"
    path.write_text(json.dumps({**told(law, path.name), "chat_template": template}))
    check_chat(store_of(base, law).export(tmp_path / "out"))


def test_a_token_that_the_merged_model_lacks_is_not_taken(base: Path, tmp_path: Path) -> None:
    law = save_expert(base, tmp_path / "law", 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(law)
    tokenizer.add_special_tokens({"eos_token": "<|new|>"})
    tokenizer.save_pretrained(law)
    model = transformers.LlamaForCausalLM.from_pretrained(law)
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = model.config.eos_token_id = 40
    model.save_pretrained(law)
    store = Store.create(tmp_path / "store", base)
    with pytest.warns(MergestreamWarning, match="they are left out"):
        store.add(law, vocab="base")
    with pytest.warns(MergestreamWarning, match="eos_token of the experts would be tokens that the merged model does"):
        out = store.export(tmp_path / "out")
    assert transformers.AutoTokenizer.from_pretrained(out).eos_token == "</s>"
    assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == 1
    store.undo()
    with pytest.warns(MergestreamWarning, match="they are added"):
        store.add(law, vocab="grow")
    out = store.export(tmp_path / "grown")
    assert transformers.AutoTokenizer.from_pretrained(out).eos_token_id == 40
    assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == 40


def test_a_merge_without_a_store_takes_them_too(base: Path, tmp_path: Path) -> None:
    experts = [save_expert(base, tmp_path / name, seed) for seed, name in enumerate(("law", "code"), 1)]
    for method in ("average", "opcm"):
        merge(base, experts, tmp_path / method, method)
        check_chat(tmp_path / method)
    other = save_expert(base, tmp_path / "other", 3, temperature=0.9)
    with pytest.warns(MergestreamWarning, match="different settings .* so the base's are kept$"):
        merge(base, [*experts, other], tmp_path / "out", "average")


# --- what the store keeps


def test_the_settings_are_in_the_record_and_go_with_the_expert(base: Path, tmp_path: Path) -> None:
    store = store_of(base, save_expert(base, tmp_path / "law", 1), save_expert(base, tmp_path / "code", 2))
    record = told(store.path / "experts" / "0001", "tensors.json")
    assert record["settings"]["chat_template"] == {"chat_template": TEMPLATE}
    assert record["settings"]["tokenizer"]["eos_token"] == "<|end|>"
    assert not {"name_or_path", "_name_or_path", "added_tokens_decoder"} & record["settings"]["tokenizer"].keys()
    shutil.rmtree(tmp_path / "law")
    check_chat(store.export(tmp_path / "out"))
    store.remove("law")
    store.keep(0)  # until then undo could bring it back
    assert not (store.path / "experts" / "0001").exists()
    path = store.path / "experts" / "0002" / "tensors.json"
    path.write_text(path.read_text().replace("word1", "word2"))
    with pytest.raises(MergestreamError, match=r"0002/tensors.json is damaged: its digest does not match"):
        store.verify()


def test_old_stores_export_the_files_of_the_base(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    law = save_expert(base, tmp_path / "law", 1)
    with monkeypatch.context() as patch:
        patch.setattr("mergestream.store.records.read_settings", lambda directory: {})
        store = store_of(base, law)
    out = store.export(tmp_path / "out", readout="expert:law")
    assert (out / "tokenizer_config.json").read_bytes() == (base / "tokenizer_config.json").read_bytes()
    with pytest.raises(UsageError, match="no such files of this expert; add it again to keep them"):
        store.export(tmp_path / "other", files_from="law")


@pytest.mark.parametrize("fault", ["large", "link", "pipe", "list", "broken", "text", "infinite"])
def test_files_that_cannot_be_kept_are_left_out(tmp_path: Path, fault: str) -> None:
    import os

    (tmp_path / "secret").write_text('{"eos_token": "secret"}')
    model = tmp_path / "models" / "of" / "law"
    model.mkdir(parents=True)
    (model / "generation_config.json").write_text('{"temperature": 0.5}')
    path = model / "tokenizer_config.json"
    faults: dict[str, Callable[[], object]] = {
        "large": lambda: path.write_text(json.dumps({"eos_token": "x" * 300_000})),
        "link": lambda: path.symlink_to(tmp_path / "secret"),
        "pipe": lambda: os.mkfifo(path),
        "list": lambda: path.write_text("[]"),
        "broken": lambda: path.write_text("{"),
        "text": lambda: path.write_bytes(b"\xff"),
        "infinite": lambda: path.write_text('{"model_max_length": Infinity}'),
    }
    faults[fault]()
    expected: dict[str, Any] = {"generation": {"temperature": 0.5}}
    if fault == "large":
        expected["chat_template"] = {}
    assert read_settings(model) == expected


def test_the_option_is_for_full_models(tmp_path: Path, mergestream: RunCommand) -> None:
    found = mergestream("export", tmp_path / "store", tmp_path / "out", "--format", "lora", "--files-from", "a")
    assert found.code == 2 and "--files-from is for full models" in found.err
