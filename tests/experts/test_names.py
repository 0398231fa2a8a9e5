"""Prefixes of names: recognised by names and shapes, never guessed, and taken off or put on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mergestream.base.model import BaseModel
from mergestream.checkpoints import open_checkpoint
from mergestream.errors import MergestreamError
from mergestream.experts import make_task_vector
from mergestream.experts.names import Prefix, find_globs, prefix_between
from mergestream.experts.vector import TaskVector
from tests.conftest import StateDict, toy_base, toy_expert


def put_before(prefix: str, tensors: StateDict) -> StateDict:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def vector(
    expert: StateDict, base: StateDict | None = None, *, heads: tuple[str, ...] = (), **options: Any
) -> TaskVector:
    checkpoint = open_checkpoint(base or toy_base())
    return make_task_vector(BaseModel.examine(checkpoint, heads=heads), checkpoint, open_checkpoint(expert), **options)


HEAD = {"classifier.weight": torch.ones(3, 8), "classifier.bias": torch.ones(3)}


@pytest.mark.parametrize("theirs", ["", "bert.", "module.", "_orig_mod.", "module._orig_mod.", "model.model."])
@pytest.mark.parametrize("ours", ["", "bert.", "module."])
def test_a_prefix_on_either_side_makes_no_difference(theirs: str, ours: str) -> None:
    found = vector(put_before(theirs, toy_expert(1)), put_before(ours, toy_base()))
    plain = vector(toy_expert(1))
    assert found.names == tuple(ours + name for name in plain.names)
    assert set(found.actions.values()) == {"merged", "copied"}
    for name in plain.names:
        assert torch.equal(found.whole(ours + name), plain.whole(name))
        assert found.digests[ours + name] == plain.digests[name]
    if theirs == ours:
        assert found.notes == ()
    else:
        (note,) = found.notes
        assert theirs in note and ours in note


@pytest.mark.parametrize("wrapper", ["", "module.", "module._orig_mod."])
def test_a_head_keeps_its_name_in_the_class_of_the_expert(wrapper: str) -> None:
    task = put_before("bert.", toy_expert(1)) | HEAD
    found = vector(put_before(wrapper, task), heads=("classifier.*",))
    assert found.heads == tuple(HEAD)
    assert found.prefix == Prefix(f"{wrapper}bert.", "", wrapper)
    assert found.prefix.name_in_task("layers.0.q.weight") == "bert.layers.0.q.weight"


def test_a_tensor_that_the_base_lacks_keeps_its_name() -> None:
    pooler = {"bert.pooler.weight": torch.ones(8, 8)}
    found = vector(put_before("bert.", toy_expert(1)) | pooler | HEAD, heads=("bert.pooler.*", "classifier.*"))
    assert found.heads == (*pooler, *HEAD)


def test_a_base_with_a_head_and_experts_without() -> None:
    base = put_before("bert.", toy_base()) | HEAD
    with pytest.raises(MergestreamError, match=r"lacks 2 tensors .*--partial; --heads 'classifier.\*' when"):
        vector(toy_expert(1), base)
    assert vector(toy_expert(1), base, partial=True).actions["classifier.weight"] == "unchanged"
    bare = vector(toy_expert(1), base, heads=("classifier.*",))
    assert bare.heads == () and bare.actions["bert.layers.0.q.weight"] == "merged"
    both = vector(toy_expert(1) | HEAD, base, heads=("classifier.*",))
    assert both.heads == tuple(HEAD) and both.prefix == Prefix("", "bert.")


def test_a_tied_tensor_may_be_under_the_prefix() -> None:
    base = {"wte.weight": torch.randn(5, 4), **{f"h.{n}.weight": torch.randn(4, 4) for n in range(4)}}
    base["lm_head.weight"] = base["wte.weight"]
    moved = {name: tensor + 1 for name, tensor in base.items() if name != "wte.weight"}
    torch.testing.assert_close(vector(put_before("module.", moved), base).whole("wte.weight"), torch.ones(5, 4))


def test_two_fitting_prefixes_are_an_error() -> None:
    twice = put_before("student.", toy_expert(1)) | put_before("teacher.", toy_expert(2))
    sentence = r"more than once \(student\.embed.* and teacher\.embed.*\); .*, for example with --ignore 'teacher\.\*'"
    with pytest.raises(MergestreamError, match=sentence):
        vector(twice)
    chosen = vector(twice, ignore=["teacher.*"])
    assert torch.equal(chosen.whole("layers.0.q.weight"), vector(toy_expert(1)).whole("layers.0.q.weight"))


def test_a_prefix_that_fits_in_part_is_not_ambiguous() -> None:
    other = {name: tensor for name, tensor in toy_expert(2).items() if name != "half.weight"}
    chosen = vector(put_before("whole.", toy_expert(1)) | put_before("part.", other), ignore=["part.*"])
    assert chosen.prefix.theirs == "whole."
    with pytest.raises(MergestreamError, match=r"has 12 tensors .*--ignore 'part.\*'"):
        vector(put_before("whole.", toy_expert(1)) | put_before("part.", other))


@pytest.mark.parametrize(
    "expert",
    [
        {name: tensor for name, tensor in toy_expert(1).items() if "layers" not in name},  # too little to tell
        {name: torch.zeros(5, 5) for name in toy_expert(1)},  # other shapes
    ],
)
def test_a_few_matches_make_no_prefix(expert: Any) -> None:
    with pytest.raises(MergestreamError, match=r"lacks 11 tensors \(embed_tokens\.weight, .*pass --partial(\n|$)"):
        vector(put_before("bert.", expert))


def test_the_number_of_a_layer_is_no_prefix() -> None:
    block = {"attention.weight": torch.randn(4, 4), "mlp.weight": torch.randn(4, 4)}
    with pytest.raises(MergestreamError, match="lacks 2 tensors"):
        vector(put_before("layers.0.", block), block)


def test_another_module_of_the_same_shape_is_no_prefix() -> None:
    with pytest.raises(MergestreamError, match=r"lacks tensor query\.weight"):
        vector({"key.weight": torch.ones(4, 4)}, {"query.weight": torch.zeros(4, 4)})


def test_ignore_matches_names_of_the_file() -> None:
    for glob in ("bert.half.*", "half.*"):
        found = vector(put_before("bert.", toy_expert(1)), ignore=[glob])
        assert found.actions["half.weight"] == "ignored" and not found.whole("half.weight").any()


def test_an_error_names_the_tensor_as_the_file_does() -> None:
    expert = toy_expert(1)
    expert["half.weight"][0, 0] = float("nan")
    with pytest.raises(MergestreamError, match=r"tensor bert\.half\.weight in the state dict holds NaN"):
        list(vector(put_before("bert.", expert)).pieces("half.weight"))
    expert["half.weight"] = torch.ones(6, 7)
    with pytest.raises(MergestreamError, match=r"tensor bert\.half\.weight .* --ignore half\.weight"):
        vector(put_before("bert.", expert))


def test_a_tensor_that_is_there_twice_is_refused() -> None:
    expert = put_before("bert.", toy_expert(1)) | {"half.weight": torch.ones(6, 8)}
    with pytest.raises(MergestreamError, match=r"both bert.half.weight and half.weight for the tensor half.weight of"):
        vector(expert)
    assert vector(expert, ignore=["bert.half.weight"]).whole("half.weight").max() > 0.5


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            HEAD,
            r"2 tensors .* not have; --heads 'classifier.\*' in a store .*, --ignore 'classifier.\*' leaves it out\b",
        ),
        ({"layers.0.score": torch.ones(1)}, r"--heads 'layers.0.score' "),
        ({f"{letter}.w": torch.ones(1) for letter in "abcdefg"}, r"--heads GLOB .* --ignore GLOB leaves"),
        ({"half.weight": torch.ones(2, 8)}, r"--heads 'half.\*' when .* expert; else resize it"),
    ],
)
def test_the_options_for_a_head_can_be_copied(change: Any, sentence: str) -> None:
    with pytest.raises(MergestreamError, match=sentence):
        vector(toy_expert(1) | change)


def test_globs_match_whole_modules_and_nothing_else() -> None:
    names = ["cls.a.weight", "cls.a.bias", "bert.pooler.weight", "scale"]
    assert find_globs(names, ["bert.encoder.weight"]) == ["cls.*", "bert.pooler.*", "scale"]


def test_the_prefix_between_names_is_that_of_most() -> None:
    names = {"lm_head.weight": "wte.weight", **{f"transformer.h.{n}.weight": f"h.{n}.weight" for n in range(2)}}
    assert prefix_between(names) == Prefix("transformer.", "")
    assert prefix_between({"classifier.weight": None}) == Prefix()
