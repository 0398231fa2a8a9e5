"""What the driver does for every method: norms, tied weights, resumed steps, and a full disk."""

from __future__ import annotations

import errno
import itertools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from mergestream import Average, Merger, Method, Store
from mergestream.algebra.lowrank import Value
from mergestream.engine import LocalEngine
from mergestream.errors import MergestreamError
from mergestream.methods.base import Absorbed, Context, State
from mergestream.testing import assert_same, exported, files, make_models, make_store, merged_in_memory, saved
from mergestream.testing.models import assert_same_steps, norm
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


@every_method
def test_the_history_has_the_norms_of_the_models(method: Method) -> None:
    """‖Δ‖ and its mean are recorded for every step; ‖direction‖ only if the scale needs it."""
    base, *experts = make_models(3)
    merger = Merger(base, method)
    norms = []
    for expert in experts:
        totals = merger.add(expert)
        norms.append(norm(expert, base))
        assert math.isclose(totals.norm, norms[-1], rel_tol=1e-6), "‖Δ‖ is wrong"
        assert math.isclose(totals.mean_norm, sum(norms) / len(norms), rel_tol=1e-6), "the mean of ‖Δ‖ is wrong"
    is_measured = totals.distance is not None
    assert is_measured == (method.scale_rule == "adaptive"), "‖direction‖ must be measured only if the scale needs it"
    if totals.distance is not None:
        assert math.isclose(totals.distance, norm(merger.state_dict(), base), rel_tol=1e-4), "the distance is wrong"


@every_method
def test_resumed_equals_uninterrupted(method: Method) -> None:
    """An interrupted `add` is resumed with the same bytes and without repeating work."""
    models = make_models(3)
    absorb = type(method).absorb
    done: list[str] = []

    @contextmanager
    def absorbing(limit: int) -> Iterator[None]:
        def run(self: Method, state: State | None, delta: Value, context: Context) -> Absorbed:
            if len(done) == limit:
                raise KeyboardInterrupt
            done.append(context.tensor)
            return absorb(self, state, delta, context)

        with patch.object(type(method), "absorb", run):
            yield

    with saved(models) as (directory, base, experts):
        straight = make_store(directory / "straight", method, base, experts)
        broken = make_store(directory / "broken", method, base)
        for expert in experts:
            done.clear()
            with absorbing(3), suppress(KeyboardInterrupt):
                broken.add(expert)
            assert len(done) == 3
            with absorbing(-1):
                Store(broken.path, engine=LocalEngine(1)).add(expert)
            assert sorted(done) == sorted(models[0]), "a tensor was absorbed twice"
        assert_same_steps(Store(broken.path), straight, "resumed")


def test_experts_without_a_name_are_numbered() -> None:
    merger = Merger({"a.weight": torch.zeros(2, 2)}, Average())
    for number in (1.0, 2.0):
        merger.add({"a.weight": torch.full((2, 2), number)})
    assert merger.names == ["1", "2"]
