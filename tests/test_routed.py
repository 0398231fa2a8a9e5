"""Routed serving: each input is answered by its own expert, exactly as that expert alone answers it."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from mergestream import Ledger, MergestreamError, RoutedModel, Store, TaskArithmetic
from mergestream.checkpoints import open_checkpoint
from mergestream.cli import main
from mergestream.errors import UsageError
from mergestream.export.routed import read_router, save_router
from mergestream.ledger.routing import FeatureStatistics
from mergestream.progress import NoProgress
from mergestream.routed import Route
from tests import speaking
from tests.inputs import conftest as families
from tests.inputs.conftest import save_with_companions
from tests.workshop import Workshop

WORDS = {"cats": ["the", "cat", "sat"], "dogs": ["dog", "ran", "off"], "mats": ["on", "a", "mat", "and"]}
"""Each expert has words of its own"""
EXACT = Ledger(budget=8, entries="float32")


def texts(expert: str, start: int = 0, count: int = 20) -> list[str]:
    """Texts of an expert's words; other numbers are other texts."""
    made = [" ".join(words) for words in itertools.product(WORDS[expert], repeat=4)]
    return made[start::3][:count]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, three adapters of it, a store that knows inputs of each, and its export."""
    place = tmp_path_factory.mktemp("routed")
    workshop = Workshop(place)
    base = save_with_companions(families.llama(), place / "base")
    store = Store.create(place / "store", base, EXACT, progress=NoProgress())
    for seed, name in enumerate(WORDS):
        adapter = workshop.adapter(base, name, seed, r=2 + seed, target_modules="all-linear")
        store.add(adapter, name, inputs=texts(name))
    store.export_routed(place / "out", dtype="float64", with_base=True)
    return place


@pytest.fixture
def routed(home: Path) -> RoutedModel:
    return RoutedModel.from_pretrained(home / "out", fallback=0)


def test_loading_prints_nothing(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No progress bar of transformers stands between the lines of a command."""
    RoutedModel.from_pretrained(home / "out")
    assert capfd.readouterr() == ("", "")


def batch(routed: RoutedModel, given: Sequence[str]) -> dict[str, Any]:
    """The model's arguments for texts of several lengths, padded before their beginning."""
    tokens = routed.processor(list(given), padding=True, padding_side="left", return_tensors="pt")
    return {name: tokens[name] for name in ("input_ids", "attention_mask")}


def alone(home: Path, expert: str) -> Any:
    return peft.PeftModel.from_pretrained(speaking.auto(home / "base"), home / expert)


MIXED = [texts("dogs", 1)[3], "the cat", texts("mats", 1)[5] + " on a mat", texts("dogs", 1)[7], texts("cats", 1)[2]]
OWNERS = ["dogs", "cats", "mats", "dogs", "cats"]


def test_new_inputs_go_to_the_right_expert(routed: RoutedModel) -> None:
    for name in WORDS:
        routes = routed.route(texts(name, 1))
        assert sum(route.expert == name for route in routes) >= 0.9 * len(routes)
        assert all(1 / 3 < route.confidence <= 1 and route.adapter == route.expert for route in routes)
    conversation = {"prompt": "the cat sat"}
    assert routed.route([conversation]) == routed.route("the cat sat") == routed.route({"text": "the cat sat"})


def test_a_batch_is_routed_like_its_inputs_without_padding(routed: RoutedModel) -> None:
    together = routed.route(batch(routed, MIXED))
    assert [route.expert for route in together] == OWNERS
    for text, route in zip(MIXED, together, strict=True):
        assert route.confidence == pytest.approx(routed.route([text])[0].confidence, rel=1e-9)


def test_it_generates_what_each_expert_alone_generates(home: Path, routed: RoutedModel) -> None:
    inputs = batch(routed, MIXED)
    answers = routed.generate(**inputs, max_new_tokens=6, do_sample=False)
    width = inputs["input_ids"].shape[1]
    plain = speaking.auto(home / "base").generate(**inputs, max_new_tokens=6, do_sample=False)
    assert not torch.equal(answers[:, : plain.shape[1]], plain[:, : answers.shape[1]]), "the experts differ"
    for row, (text, owner) in enumerate(zip(MIXED, OWNERS, strict=True)):
        expert = alone(home, owner)
        asked = batch(routed, [text])
        expected = expert.generate(**asked, max_new_tokens=6, do_sample=False)[0, asked["input_ids"].shape[1] :]
        assert answers[row, width:][: len(expected)].tolist() == expected.tolist()


def test_the_outputs_of_a_mixed_batch_are_in_its_order(home: Path, routed: RoutedModel) -> None:
    inputs = batch(routed, MIXED)
    output = routed(**inputs, labels=inputs["input_ids"], output_hidden_states=True)
    assert output.loss is None and output.past_key_values is None
    for row, owner in enumerate(OWNERS):
        one = {name: value[row : row + 1] for name, value in inputs.items()}
        with torch.no_grad():
            expected = alone(home, owner)(**one, output_hidden_states=True)
        torch.testing.assert_close(output.logits[row], expected.logits[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(output.hidden_states[-1][row], expected.hidden_states[-1][0], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        same = routed(**{name: value[[1, 4]] for name, value in inputs.items()}, labels=inputs["input_ids"][[1, 4]])
    assert same.loss is not None, "one adapter answers, so its whole output is there"


def test_several_answers_per_input_stay_together(routed: RoutedModel) -> None:
    inputs = batch(routed, MIXED)
    twice = routed.generate(**inputs, max_new_tokens=4, num_beams=2, num_return_sequences=2, do_sample=False)
    assert torch.equal(twice[:, : inputs["input_ids"].shape[1]], inputs["input_ids"].repeat_interleave(2, 0))


def test_an_unsure_router_leaves_the_answer_to_the_merged_adapter(home: Path, routed: RoutedModel) -> None:
    inputs = batch(routed, MIXED)
    routed.threshold = 1.1
    routes = routed.route(inputs)
    assert [route.expert for route in routes] == OWNERS
    assert {route.adapter for route in routes} == {"merged"}
    merged = peft.PeftModel.from_pretrained(speaking.auto(home / "base"), home / "out" / "merged")
    with torch.no_grad():
        torch.testing.assert_close(routed(**inputs).logits, merged(**inputs).logits)
    forced = [Route(owner, 1.0, owner) for owner in OWNERS]
    assert not torch.equal(routed(**inputs, routes=forced).logits, routed(**inputs).logits)


def test_the_threshold_is_a_quantile_of_the_experts_own_inputs(tmp_path: Path, home: Path) -> None:
    torch.manual_seed(3)
    mixing = torch.randn(6, 6)
    features = {name: torch.randn(6) + torch.randn(400, 6) @ mixing for name in WORDS}
    save_router(
        tmp_path / "router", list(WORDS), {name: FeatureStatistics.of(rows, 6) for name, rows in features.items()}
    )
    experts, router, quantiles = read_router(tmp_path / "router")
    assert experts == ("cats", "dogs", "mats")
    assert router is not None and quantiles is not None
    _, confidences = router.route(torch.cat(list(features.values())))
    for percent in (5, 20, 50, 80):
        assert abs(float((confidences < quantiles[percent]).double().mean()) - percent / 100) < 0.04
    thresholds = [RoutedModel.from_pretrained(home / "out", fallback=share).threshold for share in (0, 0.05, 0.5)]
    _, _, quantiles = read_router(home / "out" / "router.safetensors")
    assert quantiles is not None and thresholds == [0, quantiles[5], quantiles[50]]


def test_one_base_is_in_memory_and_is_left_as_it_was(home: Path, routed: RoutedModel) -> None:
    before = {name: value.clone() for name, value in open_base(home).items()}
    routed.generate(**batch(routed, MIXED), max_new_tokens=2)
    state = routed._adapters.model.state_dict()
    base = {name.replace(".base_layer.", "."): value for name, value in state.items() if "lora_" not in name}
    assert base.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in base.items())


def open_base(home: Path) -> dict[str, Tensor]:
    with open_checkpoint(home / "out" / "base") as base:
        return {name: base.read(name) for name in base.tensors}


def test_an_adapter_keeps_its_scaling(home: Path, routed: RoutedModel, tmp_path: Path) -> None:
    """An expert that was trained further with PEFT may take the place of its export."""
    out = shutil.copytree(home / "out", tmp_path / "out")
    shutil.rmtree(out / "experts" / "cats")
    shutil.copytree(home / "cats", out / "experts" / "cats")
    config = json.loads((home / "cats" / "adapter_config.json").read_text())
    assert config["lora_alpha"] != config["r"]
    inputs, cats = batch(routed, ["the cat sat"]), [Route("cats", 1.0, "cats")]
    found = RoutedModel.from_pretrained(out)(**inputs, routes=cats).logits
    torch.testing.assert_close(found, routed(**inputs, routes=cats).logits, rtol=1e-4, atol=1e-5)


def test_the_copy_of_the_base_is_the_base(home: Path) -> None:
    with open_checkpoint(home / "base") as theirs:
        ours = open_base(home)
        assert ours.keys() == theirs.tensors.keys()
        assert all(torch.equal(ours[name], theirs.read(name)) for name in ours)
    assert (home / "out" / "base" / "tokenizer.json").exists()


def test_arrow_takes_the_same_adapters(home: Path, tmp_path: Path) -> None:
    """PEFT's own router needs adapters of one rank."""
    Store(home / "store", progress=NoProgress()).export_routed(tmp_path / "out", rank=2)
    paths = [str(tmp_path / "out" / "experts" / name) for name in WORDS]
    arrow = peft.create_arrow_model(speaking.auto(home / "base").float(), paths, peft.ArrowConfig(top_k=2, rng_seed=1))
    tokens = torch.arange(2, 8)[None]
    with torch.no_grad():
        routed = arrow(tokens).logits
        with arrow.disable_adapter():
            assert not torch.allclose(routed, arrow(tokens).logits)


# --- without inputs


def test_without_inputs_the_experts_own_directions_decide(tmp_path: Path) -> None:
    """Each expert responds to the inputs of its own words only."""
    base = save_with_companions(families.llama(), tmp_path / "base")
    store = Store.create(tmp_path / "store", base, EXACT, progress=NoProgress())
    tokens = transformers.AutoTokenizer.from_pretrained(base)
    for name in WORDS:
        store.add(expert_for(base, tokens, texts(name), tmp_path / name), name)
    with pytest.warns(UserWarning, match="62 % of images.*calibrate for cats, dogs, mats"):
        written = Store(tmp_path / "store").export_routed(tmp_path / "out", rank=2)
    assert written.without_inputs == written.experts == ("cats", "dogs", "mats")
    assert "62 % of images" in (tmp_path / "out" / "README.md").read_text("utf-8")
    routed = RoutedModel.from_pretrained(tmp_path / "out")
    assert routed.threshold == 0
    found = [route.expert == name for name in WORDS for route in routed.route(texts(name, 1))]
    assert sum(found) > 0.8 * len(found)
    assert [route.expert for route in routed.route(batch(routed, MIXED))] == [
        routed.route([text])[0].expert for text in MIXED
    ]


def expert_for(base: Path, tokens: Any, given: Sequence[str], place: Path) -> Path:
    """A checkpoint whose change of each layer answers to the leading directions of that layer's inputs."""
    model = speaking.auto(base)
    seen: dict[torch.nn.Linear, list[Tensor]] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda layer, args: seen.setdefault(layer, []).append(args[0].flatten(0, -2))
            )
    with torch.no_grad():
        for text in given:
            model(**{"input_ids": tokens(text, return_tensors="pt")["input_ids"]})
        for layer, inputs in seen.items():
            directions = torch.linalg.svd(torch.cat(inputs), full_matrices=False).Vh[:2]
            layer.weight += 0.1 * torch.randn(len(layer.weight), 2, dtype=torch.float64) @ directions
    return speaking.save(place, model)


# --- full fine-tunes


@pytest.mark.parametrize("family", ["bert", "gemma", "gpt2", "t5", "vit"])
def test_full_fine_tunes_with_biases_and_norms(tmp_path: Path, family: str) -> None:
    """Also with heads and encoders tied to an embedding, which Gemma scales, and with convolutions."""
    base = save_with_companions(getattr(families, family)(), tmp_path / "base")
    store = Store.create(tmp_path / "store", base, EXACT, progress=NoProgress())
    for seed, name in enumerate(("one", "two.0")):
        store.add(families.expert_of(base, tmp_path / name, seed), name)
    store.export_routed(tmp_path / "out", dtype="float64")
    routed = RoutedModel.from_pretrained(tmp_path / "out")
    torch.manual_seed(0)
    if family == "vit":
        given = {"pixel_values": torch.randn(3, 3, 8, 8, dtype=torch.float64)}
    else:
        given = {"input_ids": torch.randint(2, 12, (3, 5))}
    if family == "t5":
        given["decoder_input_ids"] = torch.randint(2, 12, (3, 4))
    routes = [Route(name, 1.0, name) for name in ("two.0", "one", "two.0")]
    found = routed(**given, routes=routes).logits
    assert len(routed.route(given)) == 3
    for row, route in enumerate(routes):
        with torch.no_grad():
            expected = speaking.auto(tmp_path / route.expert)(
                **{name: value[row:][:1] for name, value in given.items()}
            )
        torch.testing.assert_close(found[row], expected.logits[0], rtol=1e-4, atol=1e-4)


def test_for_vllm_ranks_are_padded_and_whole_parameters_left_out(tmp_path: Path, home: Path) -> None:
    store = Store(home / "store", progress=NoProgress())
    store.export_routed(tmp_path / "out", server="vllm")
    for folder in ("merged", *(f"experts/{name}" for name in WORDS)):
        config = json.loads((tmp_path / "out" / folder / "adapter_config.json").read_text())
        assert config["r"] in (8, 16) and not config["rank_pattern"] and config["bias"] == "none"
    routed, before = RoutedModel.from_pretrained(tmp_path / "out"), RoutedModel.from_pretrained(home / "out")
    inputs = batch(routed, MIXED)
    # The factors of the head are left out, so the last hidden state is the same, and the logits are not.
    ours, theirs = (model(**inputs, output_hidden_states=True).hidden_states[-1] for model in (routed, before))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


# --- refusals


def test_what_cannot_be_routed(tmp_path: Path, home: Path) -> None:
    out, store = tmp_path / "out", Store(home / "store", progress=NoProgress())
    with pytest.raises(UsageError, match=r"cats is the only expert.*--format lora"):
        store.export_routed(out, only=["cats"])
    summed = Store.create(tmp_path / "sum", home / "base", TaskArithmetic(), progress=NoProgress())
    summed.add(home / "cats")
    with pytest.raises(UsageError, match=r"only a ledger keeps single experts.*task_arithmetic.*--method ledger"):
        summed.export_routed(out)
    assert not out.exists()


def test_an_expert_called_like_the_merged_adapter(tmp_path: Path, home: Path) -> None:
    store = Store.create(tmp_path / "store", home / "base", progress=NoProgress())
    for name in ("cats", "dogs", "mats"):
        store.add(home / name, "merged" if name == "mats" else name)
    with pytest.raises(UsageError, match="--without merged"):
        store.export_routed(tmp_path / "out")
    written = store.export_routed(tmp_path / "out", without=["merged"])
    assert written.experts == ("cats", "dogs")


def test_experts_with_heads(tmp_path: Path) -> None:
    base = save_with_companions(families.bert(), tmp_path / "base")
    store = Store.create(tmp_path / "store", base, EXACT, heads=["classifier.*"], progress=NoProgress())
    for seed in (1, 2):
        store.add(families.expert_of(base, tmp_path / f"e{seed}", seed))
    with pytest.raises(UsageError, match="the heads of e1, e2; export a full model of each"):
        store.export_routed(tmp_path / "out")


def test_a_base_that_transformers_does_not_know(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(1)
    weight = torch.randn(16, 16)
    for name in ("base", "one", "two"):
        (tmp_path / name).mkdir()
        save_file({"layer.weight": weight}, tmp_path / name / "model.safetensors")
        weight = weight + 0.1 * torch.randn(16, 16)
    store = Store.create(tmp_path / "store", tmp_path / "base", linear=["*"], progress=NoProgress())
    store.add(tmp_path / "one")
    store.add(tmp_path / "two")
    with pytest.raises(UsageError, match=r"no config\.json.*export full models"):
        store.export_routed(tmp_path / "out")


def test_loading_what_is_not_there(tmp_path: Path, home: Path) -> None:
    with pytest.raises(MergestreamError, match=r"no router\.safetensors"):
        RoutedModel.from_pretrained(tmp_path)
    with pytest.raises(MergestreamError, match="share from 0 to 1"):
        RoutedModel.from_pretrained(home / "out", fallback=2)
    (tmp_path / "router.safetensors").write_bytes(b"no router")
    with pytest.raises(MergestreamError, match=r"router\.safetensors is no router of mergestream; export it again"):
        RoutedModel.from_pretrained(tmp_path)
    for name in ("../../elsewhere", "..", "", str(home / "cats")):
        save_router(tmp_path / "router.safetensors", ["dogs", name], None)
        with pytest.raises(MergestreamError, match=r"it names the expert .* not a folder beside it"):
            RoutedModel.from_pretrained(tmp_path)
    shutil.copytree(home / "out", tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "base")
    assert RoutedModel.from_pretrained(tmp_path / "out").experts == tuple(sorted(WORDS)), "where the base was"
    with pytest.raises(MergestreamError, match="elsewhere"):
        RoutedModel.from_pretrained(tmp_path / "out", base=tmp_path / "elsewhere")
    (tmp_path / "out" / "experts" / "cats" / "adapter_config.json").write_text('{"layers_pattern": "x", "r": "y"}')
    with pytest.raises(MergestreamError, match=r"experts/cats/adapter_config\.json"):
        RoutedModel.from_pretrained(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "experts" / "cats")
    narrow = save_with_companions(speaking.llama(rows=13), tmp_path / "narrow")
    Workshop(tmp_path / "out" / "experts").adapter(narrow, "cats", target_modules=["q_proj"])
    with pytest.raises(
        MergestreamError, match=r"experts/cats does not fit the base: .*q_proj\.weight has another shape"
    ):
        RoutedModel.from_pretrained(tmp_path / "out")


def test_another_base_is_refused(tmp_path: Path, home: Path) -> None:
    """Also one of the same shapes, on which the adapters would fit."""
    changed = speaking.auto(home / "base")
    with torch.no_grad():
        changed.model.norm.weight[0] += 1e-3
    other = save_with_companions(changed, tmp_path / "other")
    for directory in (home / "out", shutil.copytree(home / "out", tmp_path / "out")):
        with pytest.raises(MergestreamError, match=r"other is not the base of the adapters in .*/out"):
            RoutedModel.from_pretrained(directory, base=other)
    shutil.rmtree(tmp_path / "out" / "base")
    shutil.copytree(other, tmp_path / "out" / "base")
    with pytest.raises(MergestreamError, match="out/base is not the base of the adapters"):
        RoutedModel.from_pretrained(tmp_path / "out")


def test_a_base_that_the_store_never_read_is_not_compared(tmp_path: Path, home: Path) -> None:
    store = Store.create(tmp_path / "store", home / "base", EXACT, config_only=True, progress=NoProgress())
    for name in ("cats", "dogs"):
        store.add(home / name)
    with pytest.warns(UserWarning, match="calibrate for cats, dogs"):
        Store(tmp_path / "store").export_routed(tmp_path / "out")
    assert RoutedModel.from_pretrained(tmp_path / "out").experts == ("cats", "dogs")


def test_calls_that_cannot_be_answered(routed: RoutedModel) -> None:
    inputs = batch(routed, MIXED)
    with pytest.raises(MergestreamError, match="no tensor among the arguments"):
        routed.generate(max_new_tokens=3)
    with pytest.raises(MergestreamError, match="5 inputs, but 1 routes"):
        routed(**inputs, routes=[Route("cats", 1.0, "cats")])
    with pytest.raises(MergestreamError, match="call generate for each route"):
        routed.generate(**inputs, max_new_tokens=2, return_dict_in_generate=True)


def test_the_command(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, out = str(home / "store"), str(tmp_path / "out")
    main(["export", store, out, "--format", "routed", "--rank", "2", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["experts"] == sorted(WORDS) and answer["without_inputs"] == []
    assert answer["lost"].keys() == {"merged", *(f"experts/{name}" for name in WORDS)}
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "linear discriminant" in card and "Made with" in card
    main(["export", store, out, "--format", "routed", "--overwrite"])
    assert "3 experts, routed by inputs: cats, dogs, mats" in capsys.readouterr().out
    assert main(["export", store, str(tmp_path / "full"), "--with-base"]) == 2
    assert "--with-base is for --format routed" in capsys.readouterr().err
