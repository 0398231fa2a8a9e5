"""Task models and their encoders in one store, and the export of each task's model."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mergestream import Average, Merger, Store
from mergestream.errors import MergestreamError, MergestreamWarning
from mergestream.methods import make_method
from tests.conftest import RunCommand
from tests.workshop import TEXT, VISION, gpt2, llama, peft, transformers

pytestmark = pytest.mark.filterwarnings("ignore::mergestream.errors.MergestreamWarning")
LABELS = {"spam": 2, "news": 5, "mood": 3}


class Family(NamedTuple):
    base: Callable[[], Any]
    auto: Any
    head: str
    prefix: str


def bert() -> Any:
    return transformers.BertModel(transformers.BertConfig(**TEXT, max_position_embeddings=16))


def dinov2() -> Any:
    return transformers.Dinov2Model(transformers.Dinov2Config(**VISION, mlp_ratio=2))


def vit() -> Any:
    """Its classifiers have no pooler."""
    return transformers.ViTModel(transformers.ViTConfig(**VISION))


SEQUENCES = transformers.AutoModelForSequenceClassification
FAMILIES = {
    "bert": Family(bert, SEQUENCES, "classifier", "bert."),
    "dinov2": Family(dinov2, transformers.AutoModelForImageClassification, "classifier", "dinov2."),
    "vit": Family(vit, transformers.AutoModelForImageClassification, "classifier", "vit."),
    "llama": Family(lambda: llama(pad_token_id=0).model, SEQUENCES, "score", "model."),
    "gpt2": Family(lambda: gpt2().transformer, SEQUENCES, "score", "transformer."),
}


class Place(NamedTuple):
    """Where a base and its classifiers are; they are shared: never write to them."""

    family: Family
    base: Path
    experts: dict[str, Path]

    @property
    def heads(self) -> str:
        return f"{self.family.head}.*"

    def store(self, path: Path, base: Path | None = None, method: str = "average") -> Store:
        return Store.create(path, base or self.base, make_method(method), heads=[self.heads])


def make_place(family: Family, place: Path) -> Place:
    torch.manual_seed(0)
    base = family.base()
    if base.config.model_type == "gpt2":
        base.config.pad_token_id = 0
    base.save_pretrained(place / "base")
    experts = {}
    for name, classes in LABELS.items():
        labels = {number: f"{name}-{number}" for number in range(classes)}
        model = family.auto.from_pretrained(place / "base", num_labels=classes, id2label=labels)
        for parameter in model.parameters():
            parameter.data += 0.004 * torch.randn_like(parameter)
        model.save_pretrained(place / name)
        experts[name] = place / name
    return Place(family, place / "base", experts)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Place]:
    made: dict[str, Place] = {}

    def place(name: str) -> Place:
        if name not in made:
            made[name] = make_place(FAMILIES[name], tmp_path_factory.mktemp(name))
        return made[name]

    return place


@pytest.fixture
def classifiers(places: Callable[[str], Place]) -> Place:
    return places("bert")


def weights(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def without_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def mean_encoder(place: Place) -> dict[str, Tensor]:
    experts = [without_prefix(weights(path), place.family.prefix) for path in place.experts.values()]
    return {name: torch.stack([expert[name] for expert in experts]).mean(0) for name in experts[0]}


def loaded(auto: Any, directory: Path, **options: Any) -> Any:
    model, told = auto.from_pretrained(directory, output_loading_info=True, **options)
    assert not any(told.values()), told
    return model.eval()


def logits(model: Any) -> Tensor:
    text = {"input_ids": torch.arange(2, 10)[None]}
    image = {"pixel_values": torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8)}
    with torch.inference_mode():
        return model(**(image if model.config.model_type in ("dinov2", "vit") else text)).logits  # type: ignore[no-any-return]


def export(store: Store, out: Path, **options: Any) -> Path:
    return store.export(out, **options)


def check_tasks(place: Place, store: Store) -> None:
    """The merged encoder with the head and the labels of each expert, as the expert's own class loads it."""
    for name, path in place.experts.items():
        out = export(store, store.path.with_name(f"for-{name}"), task=name)
        model, expert = loaded(place.family.auto, out), loaded(place.family.auto, path)
        assert type(model) is type(expert) and model.config.id2label == expert.config.id2label
        encoder = {place.family.prefix + key: tensor for key, tensor in mean_encoder(place).items()}
        expected = shutil.copytree(path, store.path.with_name(f"expected-{name}"))
        save_file({**weights(path), **encoder}, expected / "model.safetensors", metadata={"format": "pt"})
        torch.testing.assert_close(logits(model), logits(loaded(place.family.auto, expected)), atol=1e-5, rtol=1e-4)
        assert logits(model).shape == (1, LABELS[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_one_store_for_classifiers_with_different_labels(
    name: Any, places: Callable[[str], Place], done: Callable[..., str], tmp_path: Path
) -> None:
    place, store = places(name), tmp_path / "store"
    done("init", store, "--base", place.base, "--heads", place.heads, "--method", "average")
    done("add", store, *place.experts.values())
    done("verify", store)
    check_tasks(place, Store(store))
    merged = export(Store(store), tmp_path / "merged")
    assert weights(merged).keys() == weights(place.base).keys(), "the base's names"
    loaded(transformers.AutoModel, merged)


@pytest.mark.parametrize("page", ["docs/how-to/heads.md"])
def test_the_example_works_as_it_is_written(
    page: str, classifiers: Place, done: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    example = next(block for block in re.findall(r"```\n(.*?)```", text, re.DOTALL) if "--heads" in block)
    (tmp_path / "path" / "to").mkdir(parents=True)
    for name, model in {"encoder": classifiers.base, **classifiers.experts}.items():
        (tmp_path / "path" / "to" / name).symlink_to(model)
    monkeypatch.chdir(tmp_path)
    for line in example.splitlines():
        done(*shlex.split(line, comments=True)[1:])
    model = next(path.parent for path in tmp_path.glob("*/config.json") if "news" in path.parent.name)
    assert loaded(SEQUENCES, model).config.id2label == {number: f"news-{number}" for number in range(5)}


def test_a_ledger_reads_a_task_back(classifiers: Place, tmp_path: Path) -> None:
    store = classifiers.store(tmp_path / "store", method="ledger")
    for expert in classifiers.experts.values():
        store.add(expert)
    export(store, tmp_path / "news", task="news", readout="expert:news")
    model, expert = (loaded(SEQUENCES, path) for path in (tmp_path / "news", classifiers.experts["news"]))
    assert torch.equal(model.classifier.weight, expert.classifier.weight)
    base = loaded(transformers.AutoModel, classifiers.base).embeddings.LayerNorm.weight
    assert torch.dist(model.bert.embeddings.LayerNorm.weight, expert.bert.embeddings.LayerNorm.weight) < 0.1 * (
        torch.dist(base, expert.bert.embeddings.LayerNorm.weight)
    )


def test_the_error_offers_extra_tensors_of_a_classifier_as_a_head(
    classifiers: Place, mergestream: RunCommand, done: Callable[..., str], tmp_path: Path
) -> None:
    done("init", tmp_path / "store", "--base", classifiers.base)
    refused = mergestream("add", tmp_path / "store", classifiers.experts["spam"])
    assert refused.code == 1 and "--heads 'classifier.*'" in refused.err
    assert "--ignore 'classifier.*'" in refused.err and "103 tensors" not in refused.err


def test_a_store_begins_to_keep_heads_when_an_expert_has_one(
    classifiers: Place, mergestream: RunCommand, done: Callable[..., str], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    done("init", store, "--base", classifiers.base, "--method", "average")
    transformers.AutoModel.from_pretrained(classifiers.experts["mood"]).save_pretrained(tmp_path / "bare")
    done("add", store, tmp_path / "bare")
    before = Store(store).manifest
    done("inspect", store, classifiers.experts["spam"], "--heads", "classifier.*")
    assert Store(store).manifest == before
    done("add", store, classifiers.experts["spam"], "--heads", "classifier.*")
    done("add", store, classifiers.experts["news"])
    done("verify", store)
    with_heads = classifiers.store(tmp_path / "other")
    for path in (tmp_path / "bare", classifiers.experts["spam"], classifiers.experts["news"]):
        with_heads.add(path)
    assert Store(store).manifest.base == with_heads.manifest.base
    news = [
        weights(export(found, found.path.with_name(f"{found.path.name}-news"), task="news"))
        for found in (Store(store), with_heads)
    ]
    assert all(torch.equal(tensor, news[1][name]) for name, tensor in news[0].items())
    refused = mergestream("add", store, classifiers.experts["mood"], "--heads", "pooler.*")
    assert refused.code == 2 and "--heads pooler.* matches pooler.dense.bias, which is merged" in refused.err


def test_the_note_comes_once_and_is_kept(classifiers: Place, mergestream: RunCommand, tmp_path: Path) -> None:
    store = classifiers.store(tmp_path / "store").path
    expert = classifiers.experts["spam"]
    sentence = f"{expert}: the prefix bert. of its names is removed, because the base has none"
    assert f"note: {sentence}\n" == mergestream("inspect", store, expert).err
    assert f"note: {sentence}\n" == mergestream("add", store, expert).err
    assert f"note on spam: {sentence}" in mergestream("log", store).out
    again = mergestream("add", store, expert)
    assert again.code == 1 and "absorbed already, as spam" in again.err


def test_the_bare_encoder_is_the_same_expert(classifiers: Place, done: Callable[..., str], tmp_path: Path) -> None:
    """And so it is refused, or compared, in either form."""
    bare = tmp_path / "bare"
    shutil.copytree(classifiers.base, bare)
    save_file(without_prefix(weights(classifiers.experts["spam"]), "bert."), bare / "model.safetensors")
    store = classifiers.store(tmp_path / "store")
    for name in ("spam", "news"):
        store.add(classifiers.experts[name], ignore=["classifier.*"])
    with pytest.raises(MergestreamError, match="absorbed already, as spam"):
        store.add(bare)
    assert json.loads(done("diff", store.path, bare, classifiers.experts["spam"], "--json"))["total"]["distance"] == 0


def test_an_interrupted_step_resumes(classifiers: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = classifiers.store(tmp_path / "whole"), classifiers.store(tmp_path / "cut")
    absorb, calls = Average.absorb, count(1)

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == 9:
            raise KeyboardInterrupt
        return absorb(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Average, "absorb", interrupted)
        cut.add(classifiers.experts["spam"])
    assert (cut.path / "steps" / "0001" / "journal").read_text().count("\n") > 0
    monkeypatch.setattr(Average, "absorb", lambda *arguments: next(calls) and absorb(*arguments))
    entries = [store.add(classifiers.experts["spam"]) for store in (cut, whole)]
    assert entries[0].digest == entries[1].digest and entries[0].state == entries[1].state
    assert next(calls) - 10 < 2 * len(weights(classifiers.base)), "what was done is not done again"


@pytest.mark.parametrize("form", ["bare", "task"])
def test_a_task_model_as_the_base(form: str, classifiers: Place, tmp_path: Path) -> None:
    """Its names are the export's, whatever those of the experts are."""
    store = classifiers.store(tmp_path / "store", classifiers.experts["spam"])
    for name in ("news", "mood"):
        expert = classifiers.experts[name]
        if form == "bare":
            transformers.AutoModel.from_pretrained(expert).save_pretrained(tmp_path / name)
            expert = tmp_path / name
        store.add(expert)
    export(store, tmp_path / "merged")
    merged, spam = loaded(SEQUENCES, tmp_path / "merged"), loaded(SEQUENCES, classifiers.experts["spam"])
    assert torch.equal(merged.classifier.weight, spam.classifier.weight) and merged.config.num_labels == 2
    experts = [weights(classifiers.experts[name]) for name in ("news", "mood")]
    key = "bert.encoder.layer.0.output.dense.weight"
    torch.testing.assert_close(merged.state_dict()[key], (experts[0][key] + experts[1][key]) / 2)
    if form == "task":
        export(store, tmp_path / "news-again", task="news")
        assert loaded(SEQUENCES, tmp_path / "news-again").config.num_labels == 5


def test_another_class_as_the_base(
    classifiers: Place, mergestream: RunCommand, done: Callable[..., str], tmp_path: Path
) -> None:
    """The head of a masked language model has no place in a classifier."""
    torch.manual_seed(1)
    model = transformers.BertForMaskedLM.from_pretrained(classifiers.base)
    model.save_pretrained(tmp_path / "base")
    done("init", tmp_path / "store", "--base", tmp_path / "base")
    refused = mergestream("add", tmp_path / "store", classifiers.experts["news"])
    options = ["--heads", "bert.pooler.*", "--heads", "classifier.*"]
    assert " ".join(f"{a} '{b}'" for a, b in zip(options[::2], options[1::2], strict=True)) in refused.err
    done("add", tmp_path / "store", classifiers.experts["news"], *options)
    done("init", tmp_path / "other", "--base", tmp_path / "base", "--heads", "cls.*", *options)
    done("add", tmp_path / "other", classifiers.experts["news"])
    for store in ("store", "other"):
        export(Store(tmp_path / store), tmp_path / f"news-{store}", task="news")
        loaded(SEQUENCES, tmp_path / f"news-{store}")


class Module(nn.Module):
    """As Lightning wraps a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "DDP": nn.DataParallel,
    "compile": torch.compile,
    "both": lambda model: nn.DataParallel(torch.compile(model)),
    "Lightning": Module,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_prefixes_of_training_wrappers_are_removed(wrap: Any, classifiers: Place, tmp_path: Path) -> None:
    model = loaded(SEQUENCES, classifiers.experts["news"])
    torch.save(wrap(model).state_dict(), tmp_path / "news.pt")
    store = classifiers.store(tmp_path / "store")
    store.add(classifiers.experts["spam"])
    entry = store.add(tmp_path / "news.pt")
    assert entry.digest == classifiers.store(tmp_path / "other").add(classifiers.experts["news"]).digest
    with pytest.warns(MergestreamWarning, match=r"news has no config\.json, so the base's is written"):
        export(store, tmp_path / "out", task="news")
    merged = loaded(SEQUENCES, tmp_path / "out", num_labels=5)
    assert torch.equal(merged.classifier.weight, model.classifier.weight)


def test_names_that_are_in_memory_only(places: Callable[[str], Place], tmp_path: Path) -> None:
    """transformers calls some tensors otherwise than it stores them: a state dict has the one, a base the other."""
    place = places("dinov2")
    model = loaded(place.family.auto, place.experts["news"])
    torch.save(nn.DataParallel(model).state_dict(), tmp_path / "news.pt")
    store = place.store(tmp_path / "store")
    entry = store.add(tmp_path / "news.pt")
    assert entry.digest == place.store(tmp_path / "other").add(place.experts["news"]).digest
    export(store, tmp_path / "out", task="news")
    torch.testing.assert_close(logits(loaded(place.family.auto, tmp_path / "out", num_labels=5)), logits(model))


def test_the_prefix_of_a_wrapped_base_stays(classifiers: Place, tmp_path: Path) -> None:
    base = loaded(transformers.AutoModel, classifiers.base)
    torch.save(nn.DataParallel(base).state_dict(), tmp_path / "base.pt")
    store = classifiers.store(tmp_path / "store", tmp_path / "base.pt")
    store.add(classifiers.experts["spam"])
    export(store, tmp_path / "out")
    assert weights(tmp_path / "out").keys() == {f"module.{name}" for name in base.state_dict()}


def test_an_adapter_of_a_classifier(classifiers: Place, tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = SEQUENCES.from_pretrained(classifiers.base, num_labels=5)
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], r=2, init_lora_weights=False)
    tuned = peft.get_peft_model(model, config)
    tuned.save_pretrained(tmp_path / "adapter")
    store = classifiers.store(tmp_path / "store")
    store.add(tmp_path / "adapter")
    export(store, tmp_path / "out", task="adapter")
    assert all(name.startswith(("bert.", "classifier.")) for name in weights(tmp_path / "out"))
    expected = logits(tuned.merge_and_unload().eval())
    torch.testing.assert_close(logits(loaded(SEQUENCES, tmp_path / "out", num_labels=5)), expected)


@pytest.mark.parametrize("method", ["average", "opcm", "ties"])
def test_a_one_shot_merge(method: str, classifiers: Place, mergestream: RunCommand, tmp_path: Path) -> None:
    experts = classifiers.experts.values()
    command = ("merge", "--base", classifiers.base, *experts, "-o", tmp_path / "out", "--method", method)
    told = mergestream(*command, "--ignore", "classifier.*")
    assert told.code == 0 and told.err.count("the prefix bert. of its names is removed") == len(experts)
    merged = weights(tmp_path / "out")
    assert merged.keys() == weights(classifiers.base).keys()
    if method == "average":
        expected = mean_encoder(classifiers)
        for name, tensor in merged.items():
            torch.testing.assert_close(tensor, expected[name])


def test_a_merger_in_memory(classifiers: Place) -> None:
    base = loaded(transformers.AutoModel, classifiers.base)
    merger = Merger(base.state_dict(), make_method("average"))
    for path in classifiers.experts.values():
        model = torch.compile(loaded(SEQUENCES, path))
        with pytest.warns(MergestreamWarning, match=r"the prefix _orig_mod\.bert\. of its names is removed"):
            merger.add(model.state_dict(), ignore=["classifier.*"])  # type: ignore[attr-defined]
    base.load_state_dict(merger.state_dict())
    expected = mean_encoder(classifiers)["encoder.layer.1.output.dense.weight"]
    torch.testing.assert_close(base.encoder.layer[1].output.dense.weight.data, expected)


def test_legacy_names_are_mapped_to_the_model(classifiers: Place, tmp_path: Path) -> None:
    """As in BERT's first checkpoints; transformers knows them."""
    old = tmp_path / "old"
    shutil.copytree(classifiers.base, old)
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in weights(classifiers.base).items()
    }
    save_file(renamed, old / "model.safetensors", metadata={"format": "pt"})
    store = classifiers.store(tmp_path / "store", old)
    store.add(classifiers.experts["spam"])
    export(store, tmp_path / "out", task="spam")
    spam = loaded(SEQUENCES, classifiers.experts["spam"])
    torch.testing.assert_close(logits(loaded(SEQUENCES, tmp_path / "out")), logits(spam))


def test_a_classifier_gets_no_sentence_transformers_modules(classifiers: Place, tmp_path: Path) -> None:
    base = shutil.copytree(classifiers.base, tmp_path / "base")
    kind = "sentence_transformers.models.Pooling"
    (base / "modules.json").write_text(json.dumps([{"idx": 1, "name": "1", "path": "1_Pooling", "type": kind}]))
    (base / "1_Pooling").mkdir()
    (base / "1_Pooling" / "config.json").write_text("{}")
    store = classifiers.store(tmp_path / "store", base)
    store.add(classifiers.experts["news"])
    encoder, task = export(store, tmp_path / "encoder"), export(store, tmp_path / "task", task="news")
    assert (encoder / "1_Pooling" / "config.json").is_file() and (encoder / "modules.json").is_file()
    assert not (task / "1_Pooling").exists() and not (task / "modules.json").exists()
    libraries = [(model / "README.md").read_text().splitlines()[1] for model in (encoder, task)]
    assert libraries == ["library_name: sentence-transformers", "library_name: transformers"]


def test_an_export_without_a_task_says_whose_head_it_has(
    classifiers: Place, mergestream: RunCommand, tmp_path: Path
) -> None:
    bare = classifiers.store(tmp_path / "bare")
    headed = classifiers.store(tmp_path / "headed", classifiers.experts["mood"])
    for store, head in ((bare, "no head, like the base"), (headed, "the base's head")):
        for name in ("spam", "news"):
            store.add(classifiers.experts[name])
        out = tmp_path / f"from-{store.path.name}"
        told = mergestream("export", store.path, out)
        assert told.err == f"note: {out} has {head}; --task adds the head of an expert: spam, news\n"
        with warnings.catch_warnings():
            warnings.simplefilter("error", MergestreamWarning)
            export(store, tmp_path / "news", task="news", overwrite=True)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_one_expert_comes_back_with_its_head(
    family: str, places: Callable[[str], Place], done: Callable[..., str], tmp_path: Path
) -> None:
    place, whole = places(family), make_method("ledger", {"budget": 8.0, "entries": "float32"})
    store = Store.create(tmp_path / "store", place.base, whole, heads=[place.heads])
    for name in ("spam", "news"):
        store.add(place.experts[name])
    done("export", store.path, tmp_path / "news", "--readout", "expert:news")
    back, original = loaded(place.family.auto, tmp_path / "news"), loaded(place.family.auto, place.experts["news"])
    assert back.config.id2label == original.config.id2label
    torch.testing.assert_close(logits(back), logits(original), rtol=1e-3, atol=1e-4)
    assert "* Head: from `news`" in (tmp_path / "news" / "README.md").read_text()
    assert json.loads((tmp_path / "news" / "mergestream.json").read_text())["readout"]["task"] == "news"
    export(store, tmp_path / "mixed", readout="expert:spam", task="news")
    assert loaded(place.family.auto, tmp_path / "mixed").config.num_labels == 5, "another head can be chosen"


def test_one_expert_without_a_head_comes_back_as_before(classifiers: Place, tmp_path: Path) -> None:
    store = classifiers.store(tmp_path / "store", method="ledger")
    store.add(classifiers.experts["spam"])
    store.add(classifiers.experts["news"], ignore=["classifier.*"])
    export(store, tmp_path / "news", readout="expert:news")
    loaded(transformers.AutoModel, tmp_path / "news")


def test_the_error_for_a_missing_head_names_experts_with_one(
    classifiers: Place, mergestream: RunCommand, tmp_path: Path
) -> None:
    store = classifiers.store(tmp_path / "store")
    store.add(classifiers.experts["spam"])
    transformers.AutoModel.from_pretrained(classifiers.experts["news"]).save_pretrained(tmp_path / "bare")
    store.add(tmp_path / "bare")
    told = mergestream("export", store.path, tmp_path / "out", "--task", "bare")
    assert told.code == 1 and "expert bare has no head of its own; these have: spam" in told.err
