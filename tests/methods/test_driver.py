"""What the driver does for every method: tied weights, and a full disk."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from mergestream import Method
from mergestream.errors import MergestreamError
from mergestream.testing import assert_same, exported, files, make_models, make_store, merged_in_memory, saved
from tests.methods.test_contract import every_method


@every_method
def test_tied_weights_are_merged_once(method: Method) -> None:
    """A head tied to the embedding has no state of its own and changes no other tensor."""
    shapes = {"embed_tokens.weight": (50, 24), "a.weight": (40, 24), "a.bias": (40,)}
    models = make_models(2, shapes=shapes)
    untied = merged_in_memory(method, models[0], models[1:])
    tied = [{**model, "lm_head.weight": model["embed_tokens.weight"]} for model in models]
    merged = merged_in_memory(method, tied[0], tied[1:])
    assert merged["lm_head.weight"] is merged["embed_tokens.weight"], "tied weights are no longer one tensor"
    with saved([{name: x.clone() for name, x in model.items()} for model in tied]) as (directory, base, experts):
        store = make_store(directory / "store", method, base, experts)
        assert_same(exported(store), merged, "tied weights through a store")
        with store.snapshot() as snapshot:
            slots = snapshot.state.digests
    assert not any("lm_head" in slot for slot in slots), "a tied weight has a state of its own"
    assert_same(merged, {**untied, "lm_head.weight": untied["embed_tokens.weight"]}, "tied weights")


@every_method
def test_a_full_disk_gives_one_sentence_and_changes_nothing(method: Method) -> None:
    with saved(make_models(2)) as (directory, base, experts):
        store = make_store(directory / "store", method, base, experts[:1])
        before = files(store.path)
        for call, free in (("posix_fallocate", 0), ("pwrite", 0), ("pwrite", 3)):
            with full_disk(call, free):
                store.add(experts[1])
            assert files(store.path) == before, f"a full disk ({call}) changes the store"
            with full_disk(call, free):
                store.export(directory / "out")
            assert not Path(directory / "out").exists(), f"a full disk ({call}) leaves half of a model"
        store.add(experts[1])
        store.verify()


@contextmanager
def full_disk(call: str, free: int) -> Iterator[None]:
    """The disk is full after ``free`` calls of a function of ``os``; the error must be one sentence."""
    original, calls = getattr(os, call), itertools.count()

    def limited(*arguments: Any) -> Any:
        if next(calls) >= free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments)

    with patch.object(os, call, limited), pytest.raises(MergestreamError) as raised:
        yield
    assert "\n" not in str(raised.value)
