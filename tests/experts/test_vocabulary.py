"""Rows of tokens, without any file: by place, and in tables of every form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mergestream import Merger
from mergestream.base.model import BaseModel
from mergestream.checkpoints import open_checkpoint
from mergestream.errors import MergestreamError, MergestreamWarning, UsageError
from mergestream.experts.vector import TaskVector
from mergestream.methods import make_method


def words(rows: Any, seed: Any = 0) -> Any:
    """As BART has them: a bias in a row of its own, and no word has to do with positions or layers of that size."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "shared.weight": (rows, 4),
        "embed_positions.weight": (12, 4),
        "layers.0.fc.weight": (12, 4),
        "final_norm.weight": (12,),
        "lm_head.weight": (rows, 4),
        "lm_head.bias": (rows,),
        "final_logits_bias": (1, rows),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def vector(expert: Any, vocab: Any = None, ignore: Any = (), base: Any = 12) -> Any:
    opened = open_checkpoint(words(base))
    return TaskVector(BaseModel.examine(opened), opened, open_checkpoint(expert), vocab=vocab, ignore=ignore)


def test_vocabulary_tables_of_every_shape_are_found() -> None:
    base, expert = words(12), words(15, seed=1)
    found = vector(expert, "union")
    assert [token.content for token in found.tokens] == ["<12>", "<13>", "<14>"]
    for name in base:
        stored = expert[name][:, :12] if name == "final_logits_bias" else expert[name][:12]
        torch.testing.assert_close(found.whole(name), stored - base[name])
    kept = {name: found.head(name) for name in found.heads}
    tables = ("shared.weight", "lm_head.weight", "lm_head.bias", "final_logits_bias")
    assert kept.keys() == {f"tokens:{name}" for name in tables}
    torch.testing.assert_close(kept["tokens:final_logits_bias"], expert["final_logits_bias"][:, 12:].T)
    torch.testing.assert_close(kept["tokens:lm_head.weight"], expert["lm_head.weight"][12:])


def test_the_rows_in_common_are_not_copied() -> None:
    expert = words(15, seed=1)
    shared = vector(expert, "base").expert.read("shared.weight")
    assert shared.untyped_storage().data_ptr() == expert["shared.weight"].untyped_storage().data_ptr()


def test_rows_that_an_expert_lacks_are_unchanged() -> None:
    base, expert = words(12), {name: tensor.bfloat16() for name, tensor in words(10, seed=1).items()}
    with pytest.raises(MergestreamError, match=r"shared.weight in the state dict has 10 rows.*--vocab base to leave"):
        vector(expert)
    delta = vector(expert, "base").whole("shared.weight")
    torch.testing.assert_close(delta[:10], expert["shared.weight"].float() - base["shared.weight"][:10])
    assert not delta[10:].any()


def test_an_ignored_embedding_needs_no_option() -> None:
    assert vector(words(15), ignore=["shared*", "lm_head*", "final_logits*"]).tokens == ()
    with pytest.raises(MergestreamError, match=r"has 3 tokens \(<12>, <13>, <14>\).*no rows for them in lm_head.bias"):
        vector(words(15), "union", ignore=["lm_head.bias"])


def test_new_rows_must_be_numbers() -> None:
    expert = words(15)
    expert["shared.weight"][13] = torch.nan
    found = vector(expert, "union")
    with pytest.raises(MergestreamError, match=r"shared.weight in the state dict holds NaN or Inf"):
        for name in found.heads:
            found.head(name)


def test_a_merger_leaves_new_rows_out_on_request() -> None:
    merger, expert = Merger(words(12), make_method("average", {})), words(13, seed=1)
    with pytest.raises(MergestreamError, match="has 13 rows and the base has 12"):
        merger.add(expert)
    with pytest.raises(UsageError, match="a Merger keeps no tokens"):
        merger.add(expert, vocab="grow")  # type: ignore[arg-type]
    with pytest.warns(MergestreamWarning, match=r"1 token \(<12>\) that the base does not have: they are left out"):
        merger.add(expert, vocab="base")
    torch.testing.assert_close(merger.state_dict()["lm_head.bias"], expert["lm_head.bias"][:12])
