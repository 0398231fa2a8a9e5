"""The contract of methods and readouts, one function per requirement.

A requirement of readouts gets a ledger and the name of the readout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mergestream.algebra.lowrank import dense
from mergestream.errors import MergestreamError, UsageError
from mergestream.export.one_shot import merge
from mergestream.ledger.method import Ledger
from mergestream.ledger.readouts import READOUTS
from mergestream.ledger.readouts.base import EntriesReadout
from mergestream.methods import METHODS, make_method
from mergestream.methods.base import Context, Method, State
from mergestream.methods.scale import NAMED
from mergestream.testing.models import (
    LINEAR,
    SHAPES,
    TINY_SHAPES,
    StateDict,
    assert_close,
    assert_same,
    assert_same_steps,
    exported,
    load_model,
    make_models,
    make_odd_models,
    make_store,
    merger_of,
    norm,
    pieces_of,
    saved,
    saved_adapters,
    scaled,
)

Requirement = Callable[..., None]


@dataclass(frozen=True)
class Check:
    """One requirement, checked on one method or on the readout of this name."""

    subject: Method | str
    requirement: Requirement

    def __call__(self) -> None:
        subject = self.subject
        self.requirement(*(subject,) if isinstance(subject, Method) else (Ledger(), subject))

    def __str__(self) -> str:
        return f"{self.requirement.__name__}-{self.subject}"


def method_checks(*methods: Method) -> list[Check]:
    """Return all checks for each of the methods, which may differ in their parameters only."""
    return [Check(method, requirement) for method in methods for requirement in OF_METHODS]


def readout_checks(*readouts: str) -> list[Check]:
    """Return all checks for each of these readouts of a ledger."""
    return [Check(readout, requirement) for readout in readouts for requirement in OF_READOUTS]


# --- methods -----------------------------------------------------------------------------------------------


def is_found_by_name(method: Method) -> None:
    """A store records a method's name and parameters, and must find the same method again."""
    name = type(method).name
    assert name in METHODS, f"{name} is unknown: add an entry point, or call mergestream.register_method"
    assert METHODS[name] is type(method), f"{name} is the name of another method"
    assert type(method)().parameters.keys() == method.parameters.keys()
    assert make_method(name, json.loads(json.dumps(method.parameters))) == method, "JSON changes its parameters"
    as_text = {key: str(value) for key, value in method.parameters.items()}
    assert make_method(name, as_text) == method, "its parameters cannot be given as text"


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
    merger = merger_of(method, models)
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
        context = Context(t, name in LINEAR, tuple(like.shape), like.dtype, thresholds, base=like)
        delta = expert[name] - like
        yield context, delta if method.is_whole(context) else delta.reshape(-1)


# --- methods and readouts ----------------------------------------------------------------------------------


def in_memory_equals_store(method: Method, readout: str | None = None) -> None:
    """A `Merger`, a store and `merge` give the same bits, for every kind of tensor, any scale and selected experts."""
    models = make_odd_models()
    merger = merger_of(method, models)
    choices: list[dict[str, Any]] = [{}, {"scale": 0.7}]
    if readout:
        choices.append({"without": ["expert1"], "weights": {"expert2": 0.5}})
    with saved(models) as (directory, base, experts):
        store = make_store(directory / "store", method, base, experts)
        store.verify()
        for choice in choices:
            merged = merger.state_dict(readout=readout, **choice)
            assert_same(exported(store, readout=readout, **choice), merged, f"through a store, with {choice}")
        if not readout:
            merge(base, experts, directory / "out", method)
            assert_same(load_model(directory / "out"), merger.state_dict(), "in one shot")


def workers_and_pieces_change_no_byte(method: Method, readout: str | None = None) -> None:
    """The number of workers and the size of pieces do not matter, including a partial last piece."""
    for shapes, sizes in ((TINY_SHAPES, (1, 7)), (SHAPES, (64, 1000, 1024))):
        with saved(make_models(3, shapes=shapes)) as (directory, base, experts):
            whole = make_store(directory / "whole", method, base, experts)
            model = exported(whole, readout=readout)
            many = make_store(directory / "many", method, base, experts, workers=4)
            assert_same_steps(many, whole, "with four workers")
            assert_same(exported(many, readout=readout), model, "with four workers")
            for size in sizes:
                case = f"in pieces of {size}"
                with pieces_of(size):
                    store = make_store(directory / f"{size}", method, base, experts)
                    assert_same(exported(store, readout=readout), model, case)
                    if not readout:
                        merge(base, experts, directory / f"{size}-out", method)
                        assert_same(load_model(directory / f"{size}-out"), model, f"in one shot, {case}")
                assert_same_steps(store, whole, case)


def order_does_not_matter(method: Method, readout: str | None = None) -> None:
    """A ledger gives the same bits in any order, also for so many experts that entries are cut.

    Other commutative methods give the same model up to rounding.
    """
    if not method.commutative:
        return
    for count in (3, 10):
        models, order = make_models(count), range(1, count + 1)
        merged = merger_of(method, models).state_dict(readout=readout)
        for other in (order[::-1], [*order[1::2], *order[::2]]):
            again = merger_of(method, models, other).state_dict(readout=readout)
            assert_close(again, merged, models[0], 1e-4, "in another order")
            if method.cut(count):
                assert_same(again, merged, "in another order")


def zero_and_repeated_experts_are_absorbed(method: Method, readout: str | None = None) -> None:
    """A zero task vector, a single expert and the same one twice give finite weights.

    If the direction of a zero task vector is zero, the base merged with itself is the base.
    """
    base, one = make_models(1)
    for experts in ([base], [base, base], [one, base], [base, one], [one, one], [one]):
        try:
            merged = merger_of(method, [base, *experts]).state_dict(readout=readout)
        except MergestreamError as error:  # a merger refuses NaN and Inf
            raise AssertionError(f"a zero task vector is not absorbed: {error}") from error
        assert all(bool(x.isfinite().all()) for x in merged.values()), "the merged model has NaN or Inf"
    for name in LINEAR[0], "a.bias":
        for context, zero in _task_vectors(method, name, [base, base]):
            if dense(method.direction(method.absorb(None, zero, context).state, context)).any():
                return
    assert_same(merger_of(method, [base, base]).state_dict(readout=readout), base, "the base merged with itself")


def adapters_equal_full_models(method: Method, readout: str | None = None) -> None:
    """Adapters merge like the full models they stand for (float64), unless the readout tells them apart; piece size
    changes no bit."""
    tolerance = 1e-6
    if readout:
        method, tolerance = Ledger(budget=8, entries="float32"), 1e-5
    elif isinstance(method, Ledger):  # the default readout differs for adapters, and full models may be cut
        method, readout = replace(method, budget=8), "agree"
    with saved_adapters() as (directory, path, base, experts, adapters):
        full = exported(make_store(directory / "full", method, path, experts), readout=readout)
        factored = exported(make_store(directory / "factors", method, path, adapters), readout=readout)
        with pieces_of(100):
            in_pieces = exported(make_store(directory / "pieces", method, path, adapters), readout=readout)
    if not (readout and READOUTS[readout].tells_adapters):
        assert_close(factored, full, base, tolerance, "as adapters")
    assert_same(in_pieces, factored, "as adapters, in pieces of 100")


def any_number_is_a_scale(method: Method, readout: str | None = None) -> None:
    """Numbers scale everything. Named scales need an additive method or the method's own rule."""
    models = make_models(3)
    base, merger = models[0], merger_of(method, models)
    assert_same(merger.state_dict(0, readout=readout), base, "with scale 0")
    once = merger.state_dict(1, readout=readout)
    for number in (-1.0, -0.5, 0.5):
        merged = merger.state_dict(number, readout=readout)
        assert_close(merged, scaled(once, base, number), base, 1e-3, f"with scale {number}")
    if readout:
        return
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


# --- readouts ----------------------------------------------------------------------------------------------


def readout_is_found_by_name(method: Method, readout: str) -> None:
    """The registry has a readout of entries by this name."""
    assert readout in READOUTS, f"{readout} is unknown: add an entry point of mergestream.readouts, or register it"
    assert issubclass(READOUTS[readout], EntriesReadout), f"{readout} is not an EntriesReadout"


def excluded_equals_never_added(method: Method, readout: str) -> None:
    """``without``, weight 0, ``only`` and `Store.remove` exclude an expert; weights of 1 change nothing."""
    models = make_models(4)
    never = merger_of(method, models, [1, 3, 4]).state_dict(readout=readout)
    merger = merger_of(method, models)
    choices: list[dict[str, Any]] = [
        {"without": ["expert2"]},
        {"weights": {"expert2": 0.0}},
        {"only": ["expert4", "expert1", "expert3"]},
    ]
    for choice in choices:
        assert_same(merger.state_dict(readout=readout, **choice), never, f"with {choice}")
    weighted = merger.state_dict(readout=readout, weights={f"expert{number}": 1.0 for number in (1, 2, 3, 4)})
    assert_same(weighted, merger.state_dict(readout=readout), "with weights of 1")
    with saved(models) as (directory, base, experts):
        store = make_store(directory / "store", method, base, experts)
        store.remove("expert2")
        store.verify()
        assert_same(exported(store, readout=readout), never, "after a removal")


SHARED = (
    in_memory_equals_store,
    workers_and_pieces_change_no_byte,
    order_does_not_matter,
    zero_and_repeated_experts_are_absorbed,
    adapters_equal_full_models,
    any_number_is_a_scale,
)
OF_METHODS: Sequence[Requirement] = (is_found_by_name, state_matches_layout, arguments_are_not_modified, *SHARED)
OF_READOUTS: Sequence[Requirement] = (readout_is_found_by_name, *SHARED, excluded_equals_never_added)
