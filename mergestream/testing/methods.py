"""The contract of a method, one function per requirement."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import patch

from torch import Tensor

from mergestream.algebra.lowrank import dense
from mergestream.engine import LocalEngine
from mergestream.errors import MergestreamError, UsageError
from mergestream.export.one_shot import merge
from mergestream.merging.merger import Merger
from mergestream.merging.step import Step
from mergestream.methods import METHODS, make_method
from mergestream.methods.base import Context, Method, State
from mergestream.methods.scale import NAMED
from mergestream.store.store import Store
from mergestream.testing.models import (
    LINEAR,
    SHAPES,
    TINY_SHAPES,
    Check,
    StateDict,
    assert_close,
    assert_same,
    assert_same_steps,
    exported,
    load_model,
    make_models,
    make_odd_models,
    make_store,
    merged_in_memory,
    merger_of,
    norm,
    pieces_of,
    saved,
    saved_adapters,
    scaled,
)

REQUIREMENTS: list[Callable[[Method], None]] = []


def method_checks(*methods: Method) -> list[Check]:
    """Return all checks for each of the methods, which may differ in their parameters only."""
    return [Check(method, requirement) for method in methods for requirement in REQUIREMENTS]


def required(check: Callable[[Method], None]) -> Callable[[Method], None]:
    """Add a function to the contract."""
    REQUIREMENTS.append(check)
    return check


@required
def is_found_by_name(method: Method) -> None:
    """A store records a method's name and parameters, and must find the same method again."""
    name = type(method).name
    assert name in METHODS, f"{name} is unknown: add an entry point, or call mergestream.register_method"
    assert METHODS[name] is type(method), f"{name} is the name of another method"
    assert type(method)().parameters.keys() == method.parameters.keys()
    assert make_method(name, json.loads(json.dumps(method.parameters))) == method, "JSON changes its parameters"
    as_text = {key: str(value) for key, value in method.parameters.items()}
    assert make_method(name, as_text) == method, "its parameters cannot be given as text"


@required
def state_matches_layout(method: Method) -> None:
    """`absorb` returns the slots, shapes and dtypes of `layout`, for whole tensors and for pieces."""
    for name in SHAPES:
        state = None
        for context, delta in _task_vectors(method, name):
            absorbed, layout = method.absorb(state, delta, context), method.layout(context)
            state, whole = absorbed.state, method.is_whole(context)
            assert list(state) == list(layout), f"after {context.t} experts the slots of {name} do not match the layout"
            for slot, form in layout.items():
                assert whole or form.shape == context.shape, f"{slot} of {name} must have the tensor's shape"
                value, expected = dense(state[slot]), form.shape if whole else delta.shape
                assert tuple(value.shape) == tuple(expected), f"the shape of {slot} of {name} does not match the layout"
                assert value.dtype == form.dtype, f"the dtype of {slot} of {name} does not match the layout"
            for what, part in (("kept", absorbed.kept), ("direction", method.direction(state, context))):
                assert part is None or part.shape == delta.shape, f"{what} must have the shape of the task vector"


@required
def arguments_are_not_modified(method: Method) -> None:
    """`absorb`, `direction` and a merger leave their arguments alone."""
    for name in SHAPES:
        state: State | None = None
        for context, delta in _task_vectors(method, name):
            given = {"delta": delta, **{slot: dense(value) for slot, value in (state or {}).items()}}
            copies = {what: x.clone() for what, x in given.items()}
            new = method.absorb(state, delta, context).state
            assert_same(given, copies, "arguments of absorb")
            copies = {slot: dense(value).clone() for slot, value in new.items()}
            method.direction(new, context)
            assert_same({slot: dense(value) for slot, value in new.items()}, copies, "arguments of direction")
            state = new
    models, originals = make_models(3), make_models(3)
    merger = merger_of(method, models[0], models[1:])
    assert_same(merger.state_dict(), merger.state_dict(), "read out twice")
    for model, original in zip(models, originals, strict=True):
        assert_same(model, original, "merged models")


def _task_vectors(
    method: Method, name: str, models: Sequence[StateDict] | None = None
) -> Iterator[tuple[Context, Tensor]]:
    """Yield the task vectors of one tensor as a method gets them: flat where it works on pieces."""
    base, *experts = models or make_models(4)
    like = base[name]
    for t, expert in enumerate(experts, 1):
        ranking = method.ranking(t)
        thresholds = dict.fromkeys(ranking.names if ranking else (), 0.01)
        context = Context(t, name in LINEAR, tuple(like.shape), like.dtype, thresholds)
        delta = expert[name] - like
        yield context, delta if method.is_whole(context) else delta.reshape(-1)


@required
def history_has_the_norms_of_the_models(method: Method) -> None:
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


@required
def zero_task_vectors_are_absorbed(method: Method) -> None:
    """A zero task vector causes no NaN. If its direction is zero, the base merged with itself is the base."""
    base, expert, *_ = make_models(1)
    for experts in ([expert, base], [base, expert], [base, base]):
        try:
            merged_in_memory(method, base, experts)
        except MergestreamError as error:  # a merger refuses NaN and Inf
            raise AssertionError(f"a zero task vector is not absorbed: {error}") from error
    for name in LINEAR[0], "a.bias":
        for context, zero in _task_vectors(method, name, [base, base]):
            if dense(method.direction(method.absorb(None, zero, context).state, context)).any():
                return
    assert_same(merged_in_memory(method, base, [base]), base, "the base merged with itself")


@required
def commutative_methods_ignore_the_order(method: Method) -> None:
    """A commutative method gives the same model for the reversed order, up to rounding."""
    if method.commutative:
        base, *experts = make_models(3)
        merged = merged_in_memory(method, base, experts)
        reverse = merged_in_memory(method, base, experts, backwards=True)
        assert_close(reverse, merged, base, 1e-4, "in reverse order")


@required
def in_memory_equals_store(method: Method) -> None:
    """A `Merger` and a store give the same bits, for every kind of tensor and any scale."""
    models = make_odd_models()
    merger = merger_of(method, models[0], models[1:])
    with saved(models) as (directory, base, experts):
        store = make_store(directory / "store", method, base, experts)
        store.verify()
        assert_same(exported(store), merger.state_dict(), "through a store")
        assert_same(exported(store, 0.7), merger.state_dict(0.7), "through a store, with scale 0.7")


@required
def one_shot_equals_stream(method: Method) -> None:
    """`merge` gives the same bits as adding one expert after the other."""
    models = make_odd_models()
    with saved(models) as (directory, base, experts):
        merge(base, experts, directory / "out", method)
        assert_same(load_model(directory / "out"), merged_in_memory(method, models[0], models[1:]), "in one shot")


@required
def one_worker_equals_many(method: Method) -> None:
    """The number of workers changes no byte."""
    with saved(make_models(3)) as (directory, base, experts):
        one, many = (make_store(directory / f"{n}", method, base, experts, workers=n) for n in (1, 4))
        assert_same_steps(many, one, "with four workers")


@required
def piece_size_changes_no_byte(method: Method) -> None:
    """State, scalars and models are the same for pieces of any size, including a partial last piece."""
    for shapes, sizes in ((TINY_SHAPES, (1, 7)), (SHAPES, (64, 1000, 1024))):
        with saved(make_models(2, shapes=shapes)) as (directory, base, experts):
            whole = make_store(directory / "whole", method, base, experts)
            model = exported(whole)
            for size in sizes:
                with pieces_of(size):
                    store = make_store(directory / f"{size}", method, base, experts)
                    merge(base, experts, directory / f"{size}-out", method)
                    assert_same(load_model(directory / f"{size}-out"), model, f"in one shot, in pieces of {size}")
                    assert_same(exported(store), model, f"in pieces of {size}")
                assert_same_steps(store, whole, f"in pieces of {size}")


@required
def resumed_equals_uninterrupted(method: Method) -> None:
    """An interrupted `add` is resumed with the same bytes and without repeating work."""
    models = make_models(3)
    absorb = Step.absorb
    done: list[str] = []

    def absorb_until(limit: int) -> Any:
        def run(step: Step, *arguments: Any) -> Any:
            if len(done) == limit:
                raise KeyboardInterrupt
            done.append(arguments[-1])
            return absorb(step, *arguments)

        return patch.object(Step, "absorb", run)

    with saved(models) as (directory, base, experts):
        straight = make_store(directory / "straight", method, base, experts)
        broken = make_store(directory / "broken", method, base)
        for expert in experts:
            done.clear()
            with absorb_until(3), suppress(KeyboardInterrupt):
                broken.add(expert)
            assert len(done) == 3
            with absorb_until(-1):
                Store(broken.path, engine=LocalEngine(1)).add(expert)
            assert sorted(done) == sorted(models[0]), "a tensor was absorbed twice"
        assert_same_steps(Store(broken.path), straight, "resumed")


@required
def adapters_equal_full_models(method: Method) -> None:
    """Adapters merge like the full models they stand for (float64), and piece size changes no bit."""
    with saved_adapters() as (directory, path, base, experts, adapters):
        readout = "agree" if method.remembers_experts else None  # the default readout differs for adapters
        full = exported(make_store(directory / "full", method, path, experts), readout=readout)
        factored = exported(make_store(directory / "factors", method, path, adapters), readout=readout)
        with pieces_of(100):
            in_pieces = exported(make_store(directory / "pieces", method, path, adapters), readout=readout)
    assert_close(factored, full, base, 1e-6, "as adapters")
    assert_same(in_pieces, factored, "as adapters, in pieces of 100")


@required
def any_number_is_a_scale(method: Method) -> None:
    """Numbers scale every method. Named scales need an additive method or the method's own rule."""
    base, *experts = make_models(3)
    merger = merger_of(method, base, experts)
    assert_same(merger.state_dict(0), base, "with scale 0")
    once = merger.state_dict(1)
    for number in (-1.0, 0.5):
        assert_close(merger.state_dict(number), scaled(once, base, number), base, 1e-3, f"with scale {number}")
    length = norm(once, base)
    values = {
        "adaptive": merger.history[-1].mean_norm / length if length else 1.0,
        "sqrt": 1 / math.sqrt(3),
        "mean": 1 / 3,
    }
    for rule in NAMED:
        if method.additive or method.scale_rule == rule:
            expected = merger.state_dict(values[rule])
            assert_close(merger.state_dict(rule), expected, base, 1e-3, f"with scale {rule}")
        else:
            with suppress(UsageError):
                merger.state_dict(rule)
                raise AssertionError(f"the method is not additive, but scale {rule} is not refused")
