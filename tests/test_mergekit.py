"""mergekit recipes: what is read, and which errors are raised."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from mergestream import SLERP, ModelStock, Weighted
from mergestream.errors import MergestreamError, UsageError
from mergestream.mergekit import Recipe, read_recipe


def recipe(method: str | None = "ties", **changes: Any) -> dict[str, Any]:
    models = [
        {"model": "org/one", "parameters": {"weight": 0.5, "density": 0.3}},
        {"model": "org/two", "parameters": {"weight": 0.25}},
    ]
    content = {"merge_method": method, "base_model": "org/base", "models": models, **changes}
    return {key: value for key, value in content.items() if value is not None}


def models(*names: str, **parameters: Any) -> list[dict[str, Any]]:
    return [{"model": name, "parameters": parameters} for name in names]


def slices(*ranges: list[int], **parameters: Any) -> list[dict[str, Any]]:
    return [{"sources": [{**model, "layer_range": one} for model in models("org/one", **parameters)]} for one in ranges]


def read(path: Path, content: object) -> Recipe:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return read_recipe(path, seed=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recipe.yaml"


def test_parameters_of_a_model_override_shared_ones(path: Path) -> None:
    found = read(path, recipe(parameters={"density": 0.8, "weight": 2, "lambda": "1e-1", "normalize": False}))
    assert found.method == Weighted("0.5,0.25", "0.3,0.8", elect=True, scale=0.1)
    assert (found.base, [given.source for given in found.inputs]) == ("org/base", ["org/one", "org/two"])


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("task_arithmetic", Weighted("0.5,0.25")),
        ("ties", Weighted("0.5,0.25", "0.3,1.0", elect=True, normalize=True)),
        ("dare_linear", Weighted("0.5,0.25", "0.3,1.0", "random", rescale=True, seed=3)),
        ("dare_ties", Weighted("0.5,0.25", "0.3,1.0", "random", elect=True, rescale=True, seed=3)),
    ],
)
def test_defaults_are_those_of_mergekit(path: Path, name: str, method: Weighted) -> None:
    assert read(path, recipe(name)).method == method


def test_the_base_may_be_among_the_models(path: Path) -> None:
    found = read(path, recipe(models=[{"model": "org/base"}, *models("org/one", weight=1)]))
    assert [given.source for given in found.inputs] == ["org/one"]


def test_model_stock_has_no_weights(path: Path) -> None:
    found = read(path, recipe("model_stock", models=models("org/one", "org/two"), parameters={"filter_wise": False}))
    assert found.method == ModelStock()


def test_linear_may_start_from_any_model(path: Path) -> None:
    """Without a base_model it is the first, whose weight counts; a base_model is one of the models."""
    listed = [*models("org/one", weight=1), *models("org/two", weight=3)]
    found = read(path, recipe("linear", base_model=None, models=listed))
    assert (found.base, found.method) == ("org/one", Weighted("0.25,0.75"))
    assert [given.source for given in found.inputs] == ["org/one", "org/two"]
    found = read(path, recipe("linear", models=models("org/one", "org/two"), parameters={"weight": 1}))
    assert (found.base, found.method) == ("org/base", Weighted(f"{1 / 3},{1 / 3},{1 / 3}"))
    assert [given.source for given in found.inputs] == ["org/base", "org/one", "org/two"]
    found = read(path, recipe("linear", base_model=None, models=models("org/base+org/lora", "org/two", weight=1)))
    assert (found.base, found.method) == ("org/base", Weighted("0.5,0.5"))
    assert [given.source for given in found.inputs] == ["org/lora", "org/two"]


def test_a_model_with_an_adapter_merges_the_adapter(path: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "a+b").mkdir()
    listed = [f"{tmp_path}/./base+org/lora", f"{tmp_path}/a+b"]
    found = read(path, recipe(base_model=f"{tmp_path}/base", models=models(*listed, weight=1)))
    assert [given.source for given in found.inputs] == ["org/lora", f"{tmp_path}/a+b"]


@pytest.mark.parametrize(
    "content",
    [
        {"tokenizer_source": "base"},
        {"tokenizer_source": "org/base"},
        {"tokenizer": {"source": "base"}},
        {"dtype": "bfloat16", "out_dtype": "torch.float32"},
    ],
)
def test_harmless_settings_are_accepted(path: Path, content: dict[str, Any]) -> None:
    assert read(path, recipe(**content)).dtype == ("float32" if "dtype" in content else None)


def test_differences_from_mergekit_are_noted(path: Path) -> None:
    assert not read(path, recipe()).notes
    (note,) = read(path, recipe(parameters={"int8_mask": True})).notes
    assert "int8_mask has no effect" in note
    assert "density has no effect" in read(path, recipe("task_arithmetic")).notes[0]
    assert "--seed chooses" in read(path, recipe("dare_ties")).notes[0]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("merge_method: [", "is not the YAML of one recipe (line 1)"),
        (
            "merge_method: ties\n---\nmerge_method: ties\n",
            "is not the YAML of one recipe (line 2); write each recipe to its own file",
        ),
        ("", "Expected `object`, got `null`"),
        ("- 1", "Expected `object`, got `array`"),
        ("!!python/object/apply:os.system ['true']", "is not the YAML of one recipe (line 1)"),
        (recipe(models=None, slices=slices([0, 2], [4, 8])), "has slices that stack layers"),
        (recipe(models=None, slices=slices([2, 8])), "has slices that stack layers"),
        (recipe(models=None, slices=[*slices([0, 2], weight=1), *slices([2, 8], weight=2)]), "has slices that stack"),
        (recipe(slices=slices([0, 8])), "has slices that stack layers"),
        (recipe(models=None, slices=[{"sources": [{"model": "org/one"}]}]), "has slices that stack layers"),
        (recipe(modules={}), "has a recipe for every module"),
        (recipe(chat_template="auto"), "sets a chat_template"),
        ({"experts": [], "gate_mode": "hidden"}, "mixture of experts (mergekit-moe)"),
        ({"genome": {}}, "searches for weights (mergekit-evolve)"),
        (recipe(merge_methd="ties"), "Object contains unknown field `merge_methd`"),
        (recipe("tie"), "merges by tie; did you mean ties?"),
        (recipe(None), "Object missing required field `merge_method`"),
        (recipe("slerp", models=models("org/one", "org/two")), "merges 3 models by slerp, which is for two"),
        (
            recipe("slerp", models=models("org/one"), parameters={"t": [0, 1]}),
            "at `$.parameters.t`; give one number for all",
        ),
        (recipe("slerp", models=models("org/one"), parameters={"t": 2}), "slerp: t=2.0 must be between 0 and 1"),
        (recipe("nuslerp"), "merges by nuslerp; did you mean slerp?"),
        (recipe("della"), "merges by della (supported: linear, task_arithmetic"),
        (recipe(base_model=None), "has no base_model, which ties needs"),
        (recipe(base_model="org/base+org/lora"), "has an adapter in its base_model"),
        (recipe(models=None), "has no list of models"),
        (recipe(models=[]), "has no list of models"),
        (recipe(models=["org/one"]), "Expected `object`, got `str` - at `$.models[0]`"),
        (recipe(models=[{"model": True}]), "Expected `str`, got `bool` - at `$.models[0].model`"),
        (recipe(models=[{"model": [3]}]), "Expected `str`, got `array` - at `$.models[0].model`"),
        (recipe(models=[{"model": "org/base"}], parameters={"weight": 1}), "merges nothing into its base"),
        (recipe(models=models("org/one", "org/one", weight=1)), "lists org/one twice"),
        (recipe(models=models("org/one", wieght=1)), "unknown field `wieght` - at `$.models[0].parameters`"),
        (recipe(models=models("org/one", **{"lambda": 2})), "unknown field `lambda` - at `$.models[0].parameters`"),
        (recipe("model_stock"), "has the parameter density, which model_stock does not take"),
        (recipe("model_stock", models=models("org/one"), parameters={"filter_wise": True}), "has filter_wise: true"),
        (recipe(models=models("org/one")), "has no weight for org/one, which ties needs"),
        (recipe("linear", models=models("org/one", weight=1)), "has no weight for org/base, which linear needs"),
        (
            recipe(models=models("org/one", weight=[0, 1])),
            "at `$.models[0].parameters.weight`; give one number for all layers",
        ),
        (
            recipe(models=models("org/one", weight=[{"filter": "mlp", "value": 1}, {"value": 0}])),
            "at `$.models[0].parameters.weight`; give one number for all layers and tensors",
        ),
        (recipe(models=models("org/one", weight="much")), "got `str` - at `$.models[0].parameters.weight`"),
        (recipe(models=models("org/one", weight=True)), "got `bool` - at `$.models[0].parameters.weight`"),
        (recipe(models=models("org/one", weight=float("nan"))), "got `str` - at `$.models[0].parameters.weight`"),
        (
            recipe(models=models("org/one", weight=1, density=0)),
            "Expected `float` > 0.0 - at `$.models[0].parameters.density`",
        ),
        (recipe(parameters={"normalize": "maybe"}), "got `str` - at `$.parameters.normalize`"),
        (recipe(parameters={"rescale": True}), "has rescale: true"),
        (recipe(parameters={"gamma": 0.1}), "unknown field `gamma` - at `$.parameters`"),
        (
            recipe("linear", base_model=None, parameters={"density": 1}),
            "has the parameter density, which linear does not take",
        ),
        (
            recipe("linear", base_model=None, models=models("a", "b", weight=1), parameters={"normalize": False}),
            "weights whose sum is 2",
        ),
        (
            recipe("linear", base_model=None, models=[*models("a", weight=1), *models("b", weight=-1)]),
            "has weights whose sum is 0",
        ),
        (recipe(models=models("org/other+org/lora", weight=1)), "has an adapter of org/other in org/other+org/lora"),
        (recipe(models=models("org/base+a+b", weight=1)), "with more than one adapter"),
        (recipe(tokenizer_source="union"), "takes the tokenizer of union; only the base's is supported"),
        (
            recipe(tokenizer={"source": "base", "pad_to_multiple_of": 8}),
            "unknown field `pad_to_multiple_of` - at `$.tokenizer`",
        ),
        (recipe(tokenizer={}), "takes the tokenizer of union"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_unsupported_recipes_are_refused(path: Path, content: object, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        read(path, content)
    assert str(error.value).startswith(f"{path} ") and sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_slices_of_the_same_models_are_models(path: Path) -> None:
    found = read(path, recipe(models=None, slices=slices([0, 4], [4, 9], weight=2)))
    assert ([given.source for given in found.inputs], found.layers) == (["org/one"], 9)
    assert read(path, recipe()).layers is None


def test_slerp_is_for_the_base_and_another_model(path: Path) -> None:
    for listed in (models("org/one"), models("org/base", "org/one"), models("org/one", "org/base")):
        found = read(path, recipe("slerp", models=listed, parameters={"t": 0.25}))
        assert found.method == SLERP(0.25)
        assert [given.source for given in found.inputs] == ["org/base", "org/one"]


@pytest.mark.parametrize("weight", ["12:30:45", "1_0", "１", "0x10", "1e999", "9" * 900, "!!int x", "-.inf", "'1_0'"])
def test_only_plain_numbers_are_weights(path: Path, weight: str) -> None:
    with pytest.raises(
        UsageError, match=r"is no recipe that is supported: .* at `\$\.models\[0\]\.parameters\.weight`"
    ):
        read(path, f"merge_method: ties\nbase_model: b\nmodels: [{{model: org/one, parameters: {{weight: {weight}}}}}]")


LAUGHS = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (f"a0: &a0 ha\n{LAUGHS}merge_method: *a9", "has too many aliases or levels (line 3)"),
        ("base_model: x\nmerge_method: [&a [x], *a]", "Expected `str`, got `array` - at `$.merge_method`"),
        ("merge_method: " + "[" * 100, "has too many aliases or levels (line 1)"),
        (f"merge_method: {'x' * 1001}", "has a value of more than 1000 characters (line 1)"),
        (f"merge_method: {'x' * 900}", f"merges by {'x' * 900} (supported"),
        (f"merge_method: {'9' * 5000}", "has a value of more than 1000 characters"),
        (f"merge_method: true{' ' * 200_000}", "is no recipe: it is longer than 131072 bytes"),
        (recipe("linear", models=None) | {"slices": 1}, "Expected `array | null`, got `float` - at `$.slices`"),
        ("slices:\n- &a {sources: [*a]}\n- *a\nmerge_method: linear", "unknown field `sources`"),
        (
            "slices:\n- sources: &s [{model: a, layer_range: [0, 1], parameters: &p {p: *p}}]\n"
            "- sources: [{model: a, layer_range: [1, 2], parameters: &q {p: *q}}]\nmerge_method: linear",
            "unknown field `p`",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_recipe_is_bounded(path: Path, content: object, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        read(path, content)
    assert sentence in str(error.value) and len(str(error.value)) < 1500


def test_an_endless_file_and_a_pipe_are_read_up_to_the_bound(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="/dev/zero is no recipe: it is longer than"):
        read_recipe(Path("/dev/zero"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(yaml.safe_dump(recipe()),))
    writer.start()
    assert read_recipe(pipe).merge_method == "ties"
    writer.join()


def test_a_name_that_no_file_can_have_is_refused(path: Path) -> None:
    with pytest.raises(UsageError, match=r"recipe\.yaml names a model that cannot be opened: File name too long"):
        read(path, recipe(base_model="x" * 500))
    for name in ("a\0b", "a\nb", "\ud800", ""):
        for content in (recipe(base_model=name), recipe(models=[{"model": name}])):
            path.write_text(json.dumps(content))
            with pytest.raises(UsageError, match=r"Expected `str` matching regex .* - at `\$\.(base_)?model"):
                read_recipe(path)


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_recipe(path)


def test_without_pyyaml_the_extra_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(MergestreamError, match=r"pip install 'mergestream\[mergekit\]'"):
        read_recipe(path)
