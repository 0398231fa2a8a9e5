"""Experts with new tokens, in stores and one-shot merges; transformers loads the result."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mergestream import Store
from mergestream.digest import tensor_digest, text_digest
from mergestream.errors import MergestreamError, MergestreamWarning, UsageError
from mergestream.experts.vocabulary import Vocab
from mergestream.export.one_shot import merge
from mergestream.files import write_json
from mergestream.ledger.method import Ledger
from mergestream.methods import make_method
from mergestream.store.steps import StepWriter
from tests.speaking import WORDS, auto, bert, expert_of, gpt2, llama, rows, save, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::mergestream.errors.MergestreamWarning")
MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert}


def made_family(place: Any, make: Any) -> Any:
    """A base and two experts, of whose new tokens one is the same."""
    torch.manual_seed(0)
    base = save(place / "base", make(), tokenizer())
    one = expert_of(base, place / "one", ["<a>", "<b>"], seed=1)
    two = expert_of(base, place / "two", ["<c>", "<b>"], seed=2)
    return base, one, two


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return made_family(tmp_path_factory.mktemp(request.param), MODELS[request.param])


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One family is enough where it makes no difference."""
    return made_family(tmp_path_factory.mktemp("tied"), gpt2)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return made_family(tmp_path_factory.mktemp("untied"), llama)


def made(place: Any, base: Any, method: Any = "average") -> Any:
    return Store.create(place, base, make_method(method, {}))


def tables(place: Any) -> Any:
    return load_file(place / "model.safetensors")


def plain_mean(base: Any, *experts: Any) -> Any:
    """The rows of the base's own tokens, as averaging merges them."""
    return torch.stack([rows(expert, WORDS) for expert in experts]).mean(0)


@pytest.mark.parametrize("method", ["average", "ledger"])
def test_a_grown_model_has_the_tokens_of_all_experts_in_the_order_added(
    method: str, family: Any, tmp_path: Path
) -> None:
    base, one, two = family
    store = made(tmp_path / "store", base, method)
    store.add(one, vocab="grow")
    store.add(two, vocab="grow")
    store.verify()
    out = store.export(tmp_path / "out")
    words = transformers.AutoTokenizer.from_pretrained(out)
    assert words.convert_tokens_to_ids(["<a>", "<b>", "<c>"]) == [12, 13, 14]
    assert words("the <c> sat").input_ids[-2:] == [14, 4]
    model = auto(out)
    assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == len(words) == 15
    assert_speaks_all(out, one, two)
    model(**words("the <a> sat <b> on", return_tensors="pt", return_token_type_ids=False))


def assert_speaks_all(out: Any, one: Any, two: Any) -> None:
    for output in (False, True):
        new = rows(out, ["<a>", "<b>", "<c>"], output)
        both = (rows(one, ["<b>"], output) + rows(two, ["<b>"], output)) / 2
        torch.testing.assert_close(new, torch.cat([rows(one, ["<a>"], output), both, rows(two, ["<c>"], output)]))


@pytest.mark.parametrize("method", ["opcm", "ties", "lawa", "magmax", "ema", "task_arithmetic"])
def test_new_rows_are_the_same_by_every_method(method: str, tied: Any, tmp_path: Path) -> None:
    base, one, two = tied
    store = made(tmp_path / "store", base, method)
    for expert in (one, two):
        store.add(expert, vocab="grow")
    assert_speaks_all(store.export(tmp_path / "out"), one, two)


def test_rows_in_common_are_merged_and_biases_are_rows_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = save(tmp_path / "base", bert(), tokenizer())
    one, two = (expert_of(base, tmp_path / name, [f"<{name}>"], seed) for seed, name in enumerate(("x", "y")))
    store = made(tmp_path / "store", base)
    for expert in (one, two):
        store.add(expert, vocab="grow")
    out = store.export(tmp_path / "out")
    torch.testing.assert_close(rows(out, WORDS), plain_mean(base, one, two))
    bias, first, second = (auto(place).cls.predictions.bias.detach() for place in (out, one, two))
    torch.testing.assert_close(bias, torch.cat([(first[:12] + second[:12]) / 2, first[12:], second[12:]]))


def test_base_leaves_new_tokens_out(tied: Any, tmp_path: Path) -> None:
    base, one, _ = tied
    store = made(tmp_path / "store", base)
    with pytest.warns(
        MergestreamWarning, match=r"one has 2 tokens \(<a>, <b>\) that the base does not have: they are left out"
    ):
        entry = store.add(one, vocab="base")
    assert entry.options["vocab"] == "base"
    assert any("left out" in note for note in entry.notes)
    out = store.export(tmp_path / "out")
    assert len(transformers.AutoTokenizer.from_pretrained(out)) == auto(out).config.vocab_size == len(WORDS)
    torch.testing.assert_close(rows(out, WORDS), rows(one, WORDS))
    assert not (store.path / "experts" / "0001" / "heads.safetensors").exists()


def test_union_keeps_new_tokens_with_their_expert(family: Any, tmp_path: Path) -> None:
    base, one, two = family
    store = made(tmp_path / "store", base, "ledger")
    store.add(one, vocab="union")
    store.add(two, vocab="union")
    with pytest.warns(MergestreamWarning, match="the model leaves out the tokens of one, two; --task one"):
        plain = store.export(tmp_path / "plain")
    assert auto(plain).config.vocab_size == len(WORDS)
    for place, choice in (("task", {"task": "two"}), ("back", {"readout": "expert:two"})):
        out = store.export(tmp_path / place, **choice)
        words = transformers.AutoTokenizer.from_pretrained(out)
        assert words.convert_tokens_to_ids(["<c>", "<b>"]) == [12, 13] and len(words) == 14
        assert auto(out).config.vocab_size == 14
        for output in (False, True):
            torch.testing.assert_close(rows(out, ["<c>", "<b>"], output), rows(two, ["<c>", "<b>"], output))


def test_new_tokens_need_an_option_and_the_error_lists_all_choices(tied: Any, tmp_path: Path) -> None:
    base, one, _ = tied
    store = made(tmp_path / "store", base)
    sentence = (
        r"one has 2 tokens \(<a>, <b>\) that the base does not have; pass --vocab base to leave them out, "
        "--vocab union to keep them with this expert, or --vocab grow"
    )
    for call in (store.add, store.inspect):
        with pytest.raises(MergestreamError, match=sentence) as refused:
            call(one)
        assert "ignore" not in str(refused.value)
    with pytest.raises(MergestreamError, match=sentence):
        merge(base, [one], tmp_path / "out", make_method("average", {}))
    with pytest.raises(UsageError, match="--vocab none is not one of base, union, grow"):
        store.add(one, vocab="none")
    assert store.inspect(one, vocab="grow").fates["tokens"] >= 1


@pytest.mark.parametrize("method", ["average", "opcm", "ledger"])
def test_one_shot_merges_grow_as_a_store_does(method: str, untied: Any, tmp_path: Path) -> None:
    base, one, two = untied
    store = made(tmp_path / "store", base, method)
    for expert in (one, two):
        store.add(expert, vocab="grow")
    expected = tables(store.export(tmp_path / "stored"))
    merge(base, [one, two], tmp_path / "merged", make_method(method, {}), vocab="grow")
    found = tables(tmp_path / "merged")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)
    for name in ("tokenizer.json", "config.json"):
        assert json.loads((tmp_path / "merged" / name).read_text()) == json.loads(
            (tmp_path / "stored" / name).read_text()
        )
    with pytest.raises(UsageError, match="base or grow"):
        merge(base, [one], tmp_path / "union", make_method(method, {}), vocab="union")


def test_removing_an_expert_removes_its_tokens(untied: Any, tmp_path: Path) -> None:
    base, one, two = untied
    store = made(tmp_path / "store", base, "ledger")
    for expert in (one, two):
        store.add(expert, vocab="grow")
    store.remove("one")
    out = store.export(tmp_path / "out")
    words = transformers.AutoTokenizer.from_pretrained(out)
    assert words.convert_tokens_to_ids(["<c>", "<b>"]) == [12, 13]
    torch.testing.assert_close(rows(out, ["<b>"]), rows(two, ["<b>"]))
    for _ in range(3):  # brings back the one, then takes back both
        store.undo()
    store.add(one, vocab="union")
    store.verify()


def test_rows_of_shared_tokens_are_weighted_like_their_experts(tied: Any, tmp_path: Path) -> None:
    base, one, two = tied
    store = Store.create(tmp_path / "store", base, Ledger())
    for expert in (one, two):
        store.add(expert, vocab="grow")
    out = store.export(tmp_path / "weighted", weights={"one": 3.0})
    torch.testing.assert_close(rows(out, ["<b>"]), (3 * rows(one, ["<b>"]) + rows(two, ["<b>"])) / 4)
    out = store.export(tmp_path / "only", only=["two"])
    assert auto(out).config.vocab_size == 14
    torch.testing.assert_close(rows(out, ["<b>"]), rows(two, ["<b>"]))


def test_an_expert_that_differs_in_new_rows_only_is_no_duplicate(untied: Any, tmp_path: Path) -> None:
    base, one, _ = untied
    other = tmp_path / "other"
    shutil.copytree(one, other)
    changed = load_file(other / "model.safetensors")
    for tensor in changed.values():
        if tensor.shape[0] == 14:
            tensor[12:] += 1
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    store = made(tmp_path / "store", base)
    store.add(one, vocab="grow")
    with pytest.raises(MergestreamError, match="has been absorbed already, as one"):
        store.add(one, vocab="grow")
    store.add(other, vocab="grow")
    left_out = made(tmp_path / "left-out", base)
    left_out.add(one, vocab="base")
    with pytest.raises(MergestreamError, match="has been absorbed already"):
        left_out.add(other, vocab="base")


# --- padding ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def padded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A base with 16 rows for 12 tokens."""
    place = tmp_path_factory.mktemp("padded")
    torch.manual_seed(0)
    return save(place / "base", MODELS[request.param](16), tokenizer())


def test_new_tokens_take_the_padding_first(padded: Any, tmp_path: Path) -> None:
    one = expert_of(padded, tmp_path / "one", ["<a>"], rows=16)
    two = expert_of(padded, tmp_path / "two", [f"<{number}>" for number in range(5)], seed=2)
    store = made(tmp_path / "store", padded)
    with pytest.warns(MergestreamWarning, match="merged model .1 in rows that are padding or other tokens in the base"):
        store.add(one, vocab="grow")
    out = store.export(tmp_path / "first")
    assert auto(out).config.vocab_size == 16
    torch.testing.assert_close(rows(out, [*WORDS, "<a>"]), rows(one, [*WORDS, "<a>"]))
    store.add(two, vocab="grow")
    out = store.export(tmp_path / "second")
    words = transformers.AutoTokenizer.from_pretrained(out)
    assert words.convert_tokens_to_ids(["<a>", "<0>", "<4>"]) == [12, 13, 17]
    assert auto(out).config.vocab_size == len(words) == 18
    for output in (False, True):
        torch.testing.assert_close(rows(out, ["<a>"], output), rows(one, ["<a>"], output))
        torch.testing.assert_close(rows(out, ["<0>", "<4>"], output), rows(two, ["<0>", "<4>"], output))
    torch.testing.assert_close(rows(out, WORDS), plain_mean(padded, one, two))


def test_a_token_in_a_padding_row_is_noted_without_an_option(padded: Any, tmp_path: Path) -> None:
    one = expert_of(padded, tmp_path / "one", ["<a>"], rows=16)
    store = made(tmp_path / "store", padded)
    with pytest.warns(
        MergestreamWarning, match=r"1 token \(<a>\) in rows that are padding .* merged row by row. Pass --vocab base"
    ):
        store.add(one)
    assert "vocab" not in store.history[0].options


def test_padding_alone_needs_no_option(padded: Any, tmp_path: Path) -> None:
    longer = expert_of(padded, tmp_path / "longer", rows=24)
    shorter = expert_of(padded, tmp_path / "shorter", rows=12, seed=2)
    store = made(tmp_path / "store", padded)
    for expert in (longer, shorter):
        with pytest.warns(MergestreamWarning, match="for the same tokens and padding"):
            store.add(expert)
    out = store.export(tmp_path / "out")
    assert auto(out).config.vocab_size == 16
    torch.testing.assert_close(rows(out, WORDS), plain_mean(padded, longer, shorter))
    rest = auto(out).get_input_embeddings().weight[12:]
    base, grown = (auto(place).get_input_embeddings().weight for place in (padded, longer))
    torch.testing.assert_close(rest, (base[12:] + grown[12:16]) / 2)  # the shorter one leaves them alone


# --- tokens that are elsewhere ----------------------------------------------------------------------------


def test_rows_are_matched_by_token_not_by_position(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = save(tmp_path / "base", llama(), tokenizer())
    swapped = [*WORDS[:2], "cat", "the", *WORDS[4:-1]]
    model = auto(base)
    with torch.no_grad():
        for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            table[[2, 3]] = table[[3, 2]]
        model.model.norm.weight += 0.1
    model.resize_token_embeddings(11)
    expert = save(tmp_path / "expert", model, tokenizer(swapped))
    store = made(tmp_path / "store", base)
    with pytest.raises(MergestreamError, match=r"has 2 tokens \(the, cat\) of the base in other rows .*--vocab base"):
        store.add(expert)
    with pytest.warns(MergestreamWarning, match=r"lacks 1 token \(off\) of the base: they stay unchanged"):
        store.add(expert, vocab="base")
    out = store.export(tmp_path / "out")
    for output in (False, True):
        torch.testing.assert_close(rows(out, WORDS, output), rows(base, WORDS, output), atol=0, rtol=0)


def test_a_vocabulary_of_its_own_cannot_be_added(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = save(tmp_path / "base", gpt2(), tokenizer())
    other = auto(base)
    other.resize_token_embeddings(13, mean_resizing=False)
    expert = save(tmp_path / "expert", other, tokenizer([*WORDS, "house"]))
    store = made(tmp_path / "store", base)
    with pytest.raises(MergestreamError, match=r"vocabulary of its own: 1 token \(house\).*--vocab base"):
        store.add(expert, vocab="grow")


def test_without_tokenizers_the_first_rows_are_those_of_the_base(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = save(tmp_path / "base", gpt2(), tokenizer())
    expert = expert_of(base, tmp_path / "expert", ["<a>", "<b>"])
    for place in (base, expert):
        (place / "tokenizer.json").unlink()
    store = made(tmp_path / "store", base)
    with pytest.raises(
        MergestreamError, match=r"wte.weight in model.safetensors .* has 14 rows and the base has 12.*--vocab union"
    ):
        store.add(expert)
    with pytest.raises(MergestreamError, match=r"no tokenizer.json.*--vocab base or --vocab union"):
        store.add(expert, vocab="grow")
    with pytest.warns(MergestreamWarning, match="first rows are taken for the base's, the others are named"):
        store.add(expert, vocab="union")
    assert any("<12>, <13>" in note for note in store.history[0].notes)
    with pytest.warns(MergestreamWarning):
        plain = store.export(tmp_path / "plain")
    assert auto(plain).config.vocab_size == 12
    out = store.export(tmp_path / "out", task="expert")
    torch.testing.assert_close(auto(out).transformer.wte.weight, auto(expert).transformer.wte.weight)


# --- heads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", ["base", "union", "grow"])
def test_a_classifier_with_a_token_for_padding(vocab: Vocab, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = gpt2().config
    base = save(tmp_path / "base", transformers.GPT2ForSequenceClassification(config), tokenizer())
    model, words = auto(base), transformers.AutoTokenizer.from_pretrained(base)
    words.add_tokens(["<other>"])
    words.add_special_tokens({"pad_token": "[PAD]"})
    model.resize_token_embeddings(len(words), mean_resizing=False)
    model.config.pad_token_id = words.pad_token_id
    with torch.no_grad():
        model.score.weight += 1
        model.transformer.wte.weight += 0.01
    expert = save(tmp_path / "expert", model, words)
    store = Store.create(tmp_path / "store", base, make_method("average", {}), heads=["score*"])
    store.add(expert, vocab=vocab)
    out = store.export(tmp_path / "out", task="expert")
    loaded = auto(out)
    torch.testing.assert_close(loaded.score.weight, model.score.weight)
    size, pad = (12, None) if vocab == "base" else (14, 13)
    assert loaded.config.vocab_size == len(transformers.AutoTokenizer.from_pretrained(out)) == size
    assert loaded.config.pad_token_id == pad


def test_a_head_over_the_vocabulary_has_rows_for_its_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = save(tmp_path / "base", llama(16), tokenizer())
    expert = expert_of(base, tmp_path / "expert", [f"<{number}>" for number in range(5)])
    store = Store.create(tmp_path / "store", base, make_method("average", {}), heads=["lm_head*"])
    store.add(expert, vocab="union")
    out = store.export(tmp_path / "out", task="expert")
    for output in (False, True):
        torch.testing.assert_close(rows(out, [*WORDS, "<4>"], output), rows(expert, [*WORDS, "<4>"], output))


def test_a_head_that_the_base_lacks_has_rows_for_its_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = save(tmp_path / "whole", llama(), tokenizer())
    base = save(tmp_path / "base", auto(whole).model, tokenizer())
    expert = expert_of(whole, tmp_path / "expert", ["<a>", "<b>"])
    store = Store.create(tmp_path / "store", base, make_method("average", {}), heads=["lm_head*"])
    store.add(expert_of(base, tmp_path / "other", ["<c>"], seed=2), vocab="grow")
    store.add(expert, vocab="grow")
    out = store.export(tmp_path / "out", task="expert")
    words = transformers.AutoTokenizer.from_pretrained(out)
    assert words.convert_tokens_to_ids(["<c>", "<a>", "<b>"]) == [12, 13, 14]
    torch.testing.assert_close(rows(out, [*WORDS, "<b>"], output=True), rows(expert, [*WORDS, "<b>"], output=True))
    torch.testing.assert_close(rows(out, ["<c>"]), rows(tmp_path / "other", ["<c>"]))
    assert auto(store.export(tmp_path / "headless")).config.vocab_size == 15


# --- what is kept -----------------------------------------------------------------------------------------


def test_kept_rows_of_tokens_are_checked(tied: Any, tmp_path: Path) -> None:
    base, one, _ = tied
    store = made(tmp_path / "store", base)
    store.add(one, vocab="union")
    record = json.loads((store.path / "experts" / "0001" / "tensors.json").read_text())
    assert [token["content"] for token in record["tokens"]] == ["<a>", "<b>"]
    kept = store.path / "experts" / "0001" / "heads.safetensors"
    tensors = load_file(kept)
    assert all(name.startswith("tokens:") for name in tensors)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, kept)
    with pytest.raises(MergestreamError, match=r"the digest of tokens:.* does not match"):
        store.verify()


@pytest.mark.parametrize("forge", [lambda rows: rows[:, :3], lambda rows: rows[:1]], ids=["narrow", "few"])
def test_rows_that_do_not_fit_are_an_error(forge: Any, tied: Any, tmp_path: Path) -> None:
    base, one, _ = tied
    store = made(tmp_path / "store", base)
    store.add(one, vocab="grow")
    place = store.path / "experts" / "0001"
    record = json.loads((place / "tensors.json").read_text())
    forged = {name: forge(tensor).contiguous() for name, tensor in load_file(place / "heads.safetensors").items()}
    save_file(forged, place / "heads.safetensors")
    record["heads"] = {name: tensor_digest(tensor) for name, tensor in forged.items()}
    write_json(place / "tensors.json", record)
    entry = dataclasses.replace(store.history[0], record=text_digest((place / "tensors.json").read_text()))
    store.manifest.replacing(store.history[0], entry).save(store.storage)
    with pytest.raises(MergestreamError, match="was not written by mergestream"):
        store.export(tmp_path / "out")


def test_an_interrupted_add_resumes_with_the_same_tokens_only(
    untied: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, one, _ = untied
    store = made(tmp_path / "store", base)
    record = StepWriter.record

    def cut_short(self: StepWriter, name: Any, *rest: Any) -> None:
        record(self, name, *rest)
        raise KeyboardInterrupt

    def resumed(vocab: Any) -> Any:
        monkeypatch.setattr(StepWriter, "record", cut_short)
        with pytest.raises(KeyboardInterrupt):
            store.add(one, vocab="grow")
        monkeypatch.setattr(StepWriter, "record", record)
        done: list[Any] = []
        begin = StepWriter._begin

        def begun(self: StepWriter, *rest: Any) -> Any:
            result = begin(self, *rest)
            done.extend(self.done)
            return result

        monkeypatch.setattr(StepWriter, "_begin", begun)
        store.add(one, vocab=vocab)
        monkeypatch.setattr(StepWriter, "_begin", begin)
        return done

    assert resumed("grow")
    expected = tables(store.export(tmp_path / "resumed"))
    store.undo()
    assert not resumed("base")
    store.undo()
    store.add(one, vocab="grow")
    found = tables(store.export(tmp_path / "whole"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_missing_tokenizer_is_an_error(tied: Any, tmp_path: Path) -> None:
    base, one, _ = tied
    own = tmp_path / "base"
    shutil.copytree(base, own)
    store = made(tmp_path / "store", own)
    store.add(one, vocab="grow")
    (own / "tokenizer.json").unlink()
    with pytest.raises(MergestreamError, match="the tokenizer of the base has changed since <a> was added; restore it"):
        store.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- adapters ---------------------------------------------------------------------------------------------


def adapter_of(base: Any, place: Any, words: Any, **fields: Any) -> Any:
    """LoRA on a model whose embedding was resized for these tokens, as PEFT saves it."""
    torch.manual_seed(3)
    model, tokens = auto(base), transformers.AutoTokenizer.from_pretrained(base)
    tokens.add_tokens(words)
    model.resize_token_embeddings(len(tokens), mean_resizing=False)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=1, init_lora_weights=False, **fields))
    adapted.save_pretrained(place, save_embedding_layers="modules_to_save" in fields)
    tokens.save_pretrained(place)
    return save(place.with_name(f"{place.name}-merged"), adapted.merge_and_unload(), tokens)


@pytest.mark.parametrize("method", ["average", "ledger"])
def test_an_embedding_that_an_adapter_saved_whole_can_be_exported(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = save(tmp_path / "base", llama(), tokenizer())
    both = ["embed_tokens", "lm_head"]
    merged = adapter_of(base, tmp_path / "expert", ["<a>"], target_modules=["q_proj"], modules_to_save=both)
    store = made(tmp_path / "store", base, method)
    with pytest.raises(MergestreamError, match=r"1 token \(<a>\) that the base does not have.*--vocab union"):
        store.add(tmp_path / "expert")
    store.add(tmp_path / "expert", vocab="grow")
    store.verify()
    out = store.export(tmp_path / "out", readout="expert:expert" if method == "ledger" else None)
    found, expected = tables(out), tables(merged)
    assert len(transformers.AutoTokenizer.from_pretrained(out)) == 13
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-2 if method == "ledger" else 1e-6, rtol=0)
    with pytest.warns(MergestreamWarning, match="cannot hold the new tokens of expert; export with --format full"):
        store.export_adapter(tmp_path / "adapter", rank=2)


def test_factors_of_a_resized_embedding_are_an_error(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = save(tmp_path / "base", llama(), tokenizer())
    adapter_of(base, tmp_path / "expert", ["<a>"], target_modules=["embed_tokens"])
    with pytest.raises(MergestreamError, match="its vocabulary was resized; merge the adapter into its model"):
        made(tmp_path / "store", base).add(tmp_path / "expert", vocab="grow")
