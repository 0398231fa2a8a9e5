"""DARE in a store: its masks belong to the experts, by name."""

from __future__ import annotations

import pytest
import torch

from mergestream import DARE, Merger, Store, TaskArithmetic
from mergestream.engine import LocalEngine
from mergestream.merging.step import Step
from mergestream.testing import assert_same, exported, make_models, make_store, merged_in_memory, saved


def test_all_entries_kept_is_task_arithmetic() -> None:
    base, *experts = make_models(3)
    merged = merged_in_memory(DARE(density=1.0), base, experts)
    assert_same(merged, merged_in_memory(TaskArithmetic(), base, experts), "with density 1")


def test_entries_are_dropped_or_rescaled_and_the_share_that_is_kept_is_told() -> None:
    base, expert = make_models(1, shapes={"a.weight": (300, 300)})
    merger = Merger(base, DARE(density=0.25, scale=1.0))
    totals = merger.add(expert)
    moved, delta = merger.state_dict()["a.weight"] - base["a.weight"], expert["a.weight"] - base["a.weight"]
    dropped = moved == 0
    assert float(dropped.float().mean()) == pytest.approx(0.75, abs=0.01)
    torch.testing.assert_close(moved[~dropped], 4 * delta[~dropped], rtol=1e-4, atol=1e-6)
    assert totals.kept == pytest.approx(0.25, abs=0.02)


def test_the_mask_is_another_for_every_seed_expert_and_tensor() -> None:
    shapes = {"a.weight": (30, 30), "b.weight": (30, 30)}
    base, expert = make_models(1, shapes=shapes)

    def dropped(seed: int, name: str) -> list[torch.Tensor]:
        merger = Merger(base, DARE(seed=seed))
        merger.add(expert, name)
        return [merger.state_dict()[tensor] == base[tensor] for tensor in shapes]

    masks = [*dropped(0, "legal"), *dropped(1, "legal"), *dropped(0, "medical")]
    for number, mask in enumerate(masks):
        assert not any(torch.equal(mask, other) for other in masks[:number])


def test_an_add_that_goes_on_under_another_name_begins_again() -> None:
    models = make_models(1)
    absorb = Step.absorb
    done: list[object] = []

    def interrupted(step: Step, *arguments: object) -> object:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(arguments[-1])
        return absorb(step, *arguments)  # type: ignore[arg-type]

    with saved(models) as (directory, base, (expert,)):
        store = make_store(directory / "store", DARE(), base)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Step, "absorb", interrupted)
            store.add(expert, name="legal")
        resumed = Store(store.path, engine=LocalEngine(1))
        resumed.add(expert, name="medical")
        straight = make_store(directory / "straight", DARE(), base)
        straight.add(expert, name="medical")
        assert_same(exported(resumed), exported(straight), "under another name")
