"""Task vectors: what happens to every tensor, and what is refused from the headers alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mergestream.algebra import pieces
from mergestream.base.model import BaseModel
from mergestream.checkpoints import open_checkpoint
from mergestream.digest import combined_digest, tensor_digest
from mergestream.errors import MergestreamError
from mergestream.experts import make_task_vector
from mergestream.experts.vector import TaskVector
from mergestream.testing import pieces_of
from tests.conftest import StateDict, toy_base, toy_expert


def vector(
    expert: StateDict, base: StateDict | None = None, *, heads: tuple[str, ...] = (), **options: Any
) -> TaskVector:
    checkpoint = open_checkpoint(base or toy_base())
    return TaskVector(BaseModel.examine(checkpoint, heads=heads), checkpoint, open_checkpoint(expert), **options)


def test_the_difference_is_taken_in_float32_and_in_float64_for_float64() -> None:
    base, expert = toy_base(), toy_expert(1)
    found = vector(expert)
    for name in found.names:
        delta = found.whole(name)
        wide = torch.float64 if base[name].dtype == torch.float64 else torch.float32
        assert delta.dtype == wide
        assert torch.equal(delta, expert[name].to(wide) - base[name].to(wide))
        assert found.norm2[name] == pytest.approx(float(delta.double().square().sum()))


def test_pieces_are_the_whole_in_order() -> None:
    found = vector(toy_expert(1))
    whole = found.whole("layers.0.up.weight").flatten()
    with pieces_of(7):
        parts = list(found.pieces("layers.0.up.weight"))
    assert [start for start, _ in parts] == list(range(0, 128, 7))
    assert torch.equal(torch.cat([part for _, part in parts]), whole)
    elements = found.elements("layers.0.up.weight")
    assert torch.equal(elements(10, 31), whole[10:31])


def test_digests_are_those_of_the_expert_whole_or_in_pieces() -> None:
    expert = toy_expert(1)
    digests = []
    for size in (pieces.PIECE, 7):
        found = vector(expert)
        with pieces_of(size):
            for name in found.names:
                list(found.pieces(name))
        digests.append(combined_digest(found.digests))
        assert found.digests["half.weight"] == tensor_digest(expert["half.weight"])
    assert digests[0] == digests[1]


def test_experts_may_have_another_dtype() -> None:
    expert = {name: t.double() if t.is_floating_point() else t for name, t in toy_expert(1).items()}
    assert vector(expert).whole("layers.0.q.weight").dtype == torch.float32


def test_every_tensor_has_an_action() -> None:
    head, extra = {"head.weight": torch.ones(3, 8)}, {"extra.bias": torch.ones(2)}
    expert = {n: t for n, t in toy_expert(1).items() if n != "temperature"} | head | extra
    found = vector(expert, heads=("head.*",), partial=True, ignore=["extra.*", "half.*"])
    assert found.actions == {
        **dict.fromkeys(toy_base(), "merged"),
        "position_ids": "copied",
        "mask": "copied",
        "temperature": "unchanged",
        "half.weight": "ignored",
        "extra.bias": "ignored",
        "head.weight": "head",
    }
    for name in ("temperature", "half.weight"):
        assert not found.whole(name).any() and found.norm2[name] == 0
        assert name not in found.digests


def test_integers_of_the_expert_do_not_matter() -> None:
    expert = toy_expert(1) | {"position_ids": torch.zeros(3, dtype=torch.int32)}
    assert vector(expert).actions["position_ids"] == "copied"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"temperature": None}, "lacks tensor temperature of the base; .*--partial"),
        ({"temperature": None, "empty": None}, r"lacks 2 tensors \(temperature, empty\)"),
        (
            {"a": torch.ones(1), "b": torch.ones(1)},
            r"has 2 tensors \(a, b\) that the base does not have.*--heads",
        ),
        ({"layers.0.q.weight": torch.ones(8, 7)}, r"layers.0.q.weight in the state dict has shape \[8, 7\]"),
        ({"layers.0.q.weight": torch.ones(64)}, r"has shape \[64\], the base has \[8, 8\]"),
        ({"embed_tokens.weight": torch.ones(25, 8)}, "25 rows and the base has 24, and no tokenizer shows"),
        ({"layers.0.q.weight": torch.ones(8, 8, dtype=torch.int8)}, "is I8, the base has F32; convert it"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_read(change: Any, sentence: str) -> None:
    expert = {name: tensor for name, tensor in (toy_expert(1) | change).items() if tensor is not None}
    with pytest.raises(MergestreamError, match=sentence):
        vector(expert)


def test_the_error_for_nan_names_the_model_that_has_it() -> None:
    bad = toy_expert(1)
    bad["half.weight"][0, 0] = float("nan")
    with pytest.raises(MergestreamError, match=r"half.weight in the state dict holds NaN"):
        list(vector(bad).pieces("half.weight"))


def tied_base(stored: bool) -> StateDict:
    base = {"embed_tokens.weight": torch.randn(5, 4), "layer.weight": torch.randn(4, 4)}
    return base | ({"lm_head.weight": base["embed_tokens.weight"]} if stored else {})


def test_a_tied_tensor_counts_once() -> None:
    base = tied_base(stored=True)
    expert = {name: tensor + 1 for name, tensor in base.items()}
    found = vector(expert, base)
    assert found.names == ("embed_tokens.weight", "layer.weight")
    assert found.actions["lm_head.weight"] == "tied"
    list(found.pieces("embed_tokens.weight"))
    untied = vector(expert | {"lm_head.weight": expert["lm_head.weight"] + 1}, base)
    with pytest.raises(MergestreamError, match=r"different values for embed_tokens.weight and lm_head.weight.*tie"):
        list(untied.pieces("embed_tokens.weight"))
    ignoring = vector(expert | {"lm_head.weight": torch.zeros(5, 4)}, base, ignore=["lm_head.*"])
    list(ignoring.pieces("embed_tokens.weight"))


def test_an_expert_may_store_a_tied_tensor_under_its_other_name() -> None:
    base = tied_base(stored=True)
    expert = {"lm_head.weight": base["lm_head.weight"] + 1, "layer.weight": base["layer.weight"] + 1}
    checkpoint = open_checkpoint(base)
    found = make_task_vector(BaseModel.examine(checkpoint), checkpoint, open_checkpoint(expert))
    torch.testing.assert_close(found.whole("embed_tokens.weight"), torch.ones(5, 4))
    model, opened = BaseModel.examine(checkpoint), open_checkpoint(expert)
    left_out = make_task_vector(model, checkpoint, opened, ignore=["lm_head.weight"], partial=True)
    assert left_out.actions["embed_tokens.weight"] == "unchanged" and not left_out.whole("embed_tokens.weight").any()
