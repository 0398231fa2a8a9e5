"""What every method must do, present and future: a method that is not listed here fails the first test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mergestream import (
    EMA,
    LAWA,
    METHODS,
    OPCM,
    TIES,
    Average,
    LocalEngine,
    MagMax,
    Merger,
    Method,
    Store,
    TaskArithmetic,
    merge,
)
from mergestream.merging.step import Step
from tests.methods import formulas
from tests.methods.models import make_models

METHOD_CASES = [
    OPCM(),
    OPCM(alpha=0.3, projection="paper"),
    OPCM(projection="block"),
    OPCM(alpha=0.8, scaling="sqrt"),
    Average(),
    TaskArithmetic(),
    TaskArithmetic(scale=0.1),
    TIES(),
    TIES(mode="reference"),
    TIES(mode="streaming"),
    TIES(trim="tensor"),
    TIES(mode="streaming", trim="tensor", density=0.5, scale=1.0),
    EMA(),
    EMA(beta=0.5),
    LAWA(),
    LAWA(window=2),
    MagMax(),
]
every_method = pytest.mark.parametrize("method", METHOD_CASES, ids=str)


def formula(method: Method, base, experts) -> dict[str, Tensor]:
    return getattr(formulas, method.name)(base, experts, **method.parameters)


def merged_in_memory(method: Method, base, experts) -> dict[str, Tensor]:
    merger = Merger(base, method)
    for expert in experts:
        merger.add(expert)
    return merger.state_dict()


def save(directory: Path, models) -> list[Path]:
    paths = [directory / f"{'base' if i == 0 else f'expert{i}'}.safetensors" for i in range(len(models))]
    for path, model in zip(paths, models, strict=True):
        save_file(model, path)
    return paths


def state_bytes(store: Path) -> dict[str, bytes]:
    newest = max((store / "steps").iterdir())
    return {path.name: path.read_bytes() for path in newest.iterdir()}


def test_every_registered_method_is_under_contract():
    assert {method.name for method in METHOD_CASES} == set(METHODS)


@every_method
def test_equals_the_formula_in_float64(method):
    base, *experts = make_models(dtype=torch.float64)
    merged = merged_in_memory(method, base, experts)
    expected = formula(method, base, experts)
    for name in base:
        torch.testing.assert_close(merged[name] - base[name], expected[name], rtol=1e-7, atol=1e-9)


@every_method
def test_float32_state_stays_close_to_the_formula(method, models):
    base, *experts = models
    merged = merged_in_memory(method, base, experts)
    expected = formula(method, base, experts)
    difference = {name: merged[name].double() - base[name].double() - expected[name] for name in base}
    assert formulas.norm(difference) < 1e-4 * formulas.norm(expected)


@every_method
def test_first_model_alone(method, models):
    base, expert, *_ = models
    merged = merged_in_memory(method, base, [expert])
    expected = formula(method, base, [expert])
    for name in base:
        torch.testing.assert_close(merged[name].double() - base[name].double(), expected[name], rtol=1e-4, atol=1e-6)


@every_method
def test_in_memory_equals_through_a_store(method, models, tmp_path):
    base, *experts = save(tmp_path, models)
    store = Store.create(tmp_path / "store", base, method)
    for expert in experts:
        store.add(expert)
    exported = load_file(store.export(tmp_path / "out") / "model.safetensors")
    in_memory = merged_in_memory(method, models[0], models[1:])
    assert all(torch.equal(exported[name], in_memory[name]) for name in in_memory)


@every_method
def test_one_worker_equals_many_bit_for_bit(method, models, tmp_path):
    base, *experts = save(tmp_path, models)
    states = []
    for workers in (1, 4):
        store = Store.create(tmp_path / f"store{workers}", base, method, engine=LocalEngine(workers))
        for expert in experts:
            store.add(expert)
        states.append(state_bytes(store.path))
    assert states[0] == states[1]


@every_method
def test_interrupted_and_resumed_equals_uninterrupted(method, models, tmp_path, monkeypatch):
    base, *experts = save(tmp_path, models)
    straight = Store.create(tmp_path / "straight", base, method)
    broken = Store.create(tmp_path / "broken", base, method, engine=LocalEngine(1))
    absorb, done = Step.absorb, []

    def absorb_until(limit):
        def run(self, name, thresholds, write):
            if len(done) == limit:
                raise KeyboardInterrupt
            done.append(name)
            return absorb(self, name, thresholds, write)

        return run

    for expert in experts:
        straight.add(expert)
        done.clear()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Step, "absorb", absorb_until(3))
            broken.add(expert)
        first = list(done)
        with monkeypatch.context() as patch:
            patch.setattr(Step, "absorb", absorb_until(-1))
            Store(broken.path, engine=LocalEngine(1)).add(expert)
        assert len(first) == 3 and sorted(done) == sorted(models[0]), "what was done must not be done again"
    assert state_bytes(broken.path) == state_bytes(straight.path)
    assert [e.digest for e in Store(broken.path).history] == [e.digest for e in straight.history]


@every_method
def test_commutative_methods_do_not_mind_the_order(method, models):
    base, *experts = models
    forth = merged_in_memory(method, base, experts)
    back = merged_in_memory(method, base, experts[::-1])
    same = all(torch.allclose(forth[name], back[name], rtol=1e-5, atol=1e-6) for name in base)
    assert same == method.commutative or (method.name == "lawa" and method.parameters["window"] >= len(experts))


@every_method
def test_one_shot_merge_equals_the_stream(method, models, tmp_path):
    base, *experts = save(tmp_path, models)
    merge(base, experts, tmp_path / "out", method)
    one_shot = load_file(tmp_path / "out" / "model.safetensors")
    stream = merged_in_memory(method, models[0], models[1:])
    assert all(torch.equal(one_shot[name], stream[name]) for name in stream)


@every_method
def test_arguments_are_never_written_to(method, models):
    copies = [{name: x.clone() for name, x in model.items()} for model in models]
    merger = Merger(models[0], method)
    for expert in models[1:]:
        merger.add(expert)
    first = merger.state_dict()
    assert all(
        torch.equal(x, copy[name]) for model, copy in zip(models, copies, strict=True) for name, x in model.items()
    )
    assert all(torch.equal(x, first[name]) for name, x in merger.state_dict().items())


@every_method
def test_norms_and_distance_are_those_of_the_models(method, models):
    base, *experts = models
    merger = Merger(base, method)
    for expert, vector in zip(experts, formulas.deltas(base, experts), strict=True):
        totals = merger.add(expert)
        assert totals.norm == pytest.approx(formulas.norm(vector), rel=1e-6)
    assert (totals.distance is None) == (method.scale_rule != "adaptive"), "measured only where the scale needs it"
    merged = merger.state_dict()
    difference = {name: merged[name].double() - base[name].double() for name in base}
    if totals.distance is not None:
        assert totals.distance == pytest.approx(formulas.norm(difference), rel=1e-4)


@every_method
def test_a_zero_task_vector_is_absorbed(method, models):
    base, expert, *_ = models
    merged = merged_in_memory(method, base, [expert, base])
    assert all(bool(x.isfinite().all()) for x in merged.values())
