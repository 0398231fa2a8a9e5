"""The contracts of methods and of readouts as checks that anybody's can be held to, as ours are::

    @pytest.mark.parametrize("check", method_checks(MyMethod(), MyMethod(strength=2)), ids=str)
    def test_my_method_keeps_the_contract(check):
        check()

`readout_checks` does the same for readouts, by their names.

A check is called without arguments and raises an AssertionError that says what is wrong. Nothing here needs pytest.
What is computed is not checked: that it equals its formula, only its own test can know.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mergestream.algebra import pieces
from mergestream.algebra.lowrank import dense
from mergestream.api import Store
from mergestream.engine import LocalEngine
from mergestream.errors import MergestreamError, UsageError
from mergestream.export.one_shot import merge
from mergestream.ledger.method import Ledger
from mergestream.ledger.readouts import READOUTS
from mergestream.ledger.readouts.base import EntriesReadout
from mergestream.merging.merger import Merger
from mergestream.merging.step import Step
from mergestream.methods import METHODS, make_method
from mergestream.methods.base import Context, Method, State
from mergestream.methods.scale import NAMED

StateDict = dict[str, Tensor]

SHAPES: dict[str, tuple[int, ...]] = {
    "a.weight": (40, 24),
    "a.bias": (40,),
    "b.weight": (24, 40),
    "norm.weight": (24,),
    "embed.weight": (50, 24),
    "conv.weight": (8, 3, 3, 3),
}
LINEAR = ("a.weight", "b.weight")
TINY_SHAPES = {"a.weight": (5, 4), "b.weight": (3, 6), "embed.weight": (6, 4), "a.bias": (11,)}


@dataclass(frozen=True)
class Check:
    """One demand of a contract on one method, or on one readout."""

    subject: Any
    demand: Callable[[Any], None]

    def __call__(self) -> None:
        self.demand(self.subject)

    def __str__(self) -> str:
        return f"{self.demand.__name__}-{self.subject}"


def method_checks(*methods: Method) -> list[Check]:
    """All checks for each of the methods, which differ in their parameters or altogether."""
    return [Check(method, demand) for method in methods for demand in DEMANDS]


def readout_checks(*readouts: str) -> list[Check]:
    """All checks for each of the readouts of a ledger, by name."""
    return [Check(readout, demand) for readout in readouts for demand in READOUT_DEMANDS]


# --- models to merge --------------------------------------------------------------------------------------


def make_models(
    count: int = 4, dtype: torch.dtype = torch.float32, shapes: Mapping[str, tuple[int, ...]] = SHAPES, seed: int = 0
) -> list[StateDict]:
    """A base and ``count`` experts whose task vectors have decaying spectra, as real ones do."""
    generator = torch.Generator().manual_seed(seed)

    def noise(shape: tuple[int, ...]) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        if len(shape) != 2:
            return x
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        return (u * torch.arange(1, len(s) + 1).pow(-0.7)) @ vh * 3

    base = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    models = [base] + [{name: base[name] + 0.05 * noise(shape) for name, shape in shapes.items()} for _ in range(count)]
    return [{name: x.to(dtype) for name, x in model.items()} for model in models]


def make_odd_models(count: int = 3) -> list[StateDict]:
    """Models with every kind of tensor that a method meets: other types, stacked experts, a scalar, nothing at all."""
    models = make_models(count)
    for number, model in enumerate(models):
        generator = torch.Generator().manual_seed(number)
        model["half.weight"] = torch.randn(6, 8, generator=generator).bfloat16()
        model["double.weight"] = torch.randn(6, 8, generator=generator, dtype=torch.float64)
        model["mlp.experts.up"] = torch.randn(3, 8, 6, generator=generator)
        model["temperature"] = torch.randn((), generator=generator)
        model["empty"] = torch.zeros(0, 4)
        model["position_ids"] = torch.arange(24)
    return models


def save_models(directory: Path, models: Sequence[StateDict]) -> list[Path]:
    """The base as ``base.safetensors``, the experts beside it."""
    paths = [directory / f"{f'expert{number}' if number else 'base'}.safetensors" for number in range(len(models))]
    for path, model in zip(paths, models, strict=True):
        save_file(model, path)
    return paths


@contextmanager
def saved(models: Sequence[StateDict]) -> Iterator[tuple[Path, Path, list[Path]]]:
    """A temporary directory, with the base and the experts in it."""
    with tempfile.TemporaryDirectory(prefix="mergestream-") as place:
        base, *experts = save_models(Path(place), models)
        yield Path(place), base, experts


def save_adapter(directory: Path, factors: Mapping[str, tuple[Tensor, Tensor]]) -> Path:
    """A LoRA adapter as PEFT saves it: B (m×r) and A (r×n) for every linear weight, which moves by 2·B·A."""
    directory.mkdir(parents=True)
    tensors = {}
    for name, (B, A) in factors.items():
        module = name.removesuffix(".weight")
        tensors[f"base_model.model.{module}.lora_A.weight"] = A.contiguous()
        tensors[f"base_model.model.{module}.lora_B.weight"] = B.contiguous()
    save_file(tensors, directory / "adapter_model.safetensors")
    rank = min(A.shape[0] for _, A in factors.values())
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "base_model_name_or_path": "base"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


# --- merging them -----------------------------------------------------------------------------------------


@contextmanager
def pieces_of(size: int) -> Iterator[None]:
    """Tensors go by in pieces of so many elements: a small model is cut as only a large one is otherwise."""
    with patch.object(pieces, "PIECE", size):
        yield


def merger_of(method: Method, base: StateDict, experts: Sequence[StateDict], *, backwards: bool = False) -> Merger:
    """The experts are called as `save_models` calls them, whichever of them comes first."""
    merger = Merger(base, method)
    named = [(f"expert{number}", expert) for number, expert in enumerate(experts, 1)]
    for name, expert in reversed(named) if backwards else named:
        merger.add(expert, name)
    return merger


def merged_in_memory(
    method: Method, base: StateDict, experts: Sequence[StateDict], *, backwards: bool = False
) -> StateDict:
    return merger_of(method, base, experts, backwards=backwards).state_dict()


def make_store(directory: Path, method: Method, base: Path, experts: Sequence[Path] = (), workers: int = 1) -> Store:
    store = Store.create(directory, base, method, engine=LocalEngine(workers))
    for expert in experts:
        store.add(expert)
    return store


def exported(store: Store, scale: str | float | None = None, **selection: Any) -> StateDict:
    out = store.path.with_name(f"{store.path.name}-exported")
    return load_model(store.export(out, scale=scale, overwrite=True, pictures=False, **selection))


def load_model(directory: Path) -> StateDict:
    return {name: x.clone() for name, x in load_file(directory / "model.safetensors").items()}


def files(directory: Path) -> dict[str, bytes]:
    """The bytes of all files below a directory, but for the lock, which says who was here last."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def state_bytes(store: Store) -> dict[str, bytes]:
    """All that the store keeps of its last step but for the manifest."""
    number = f"{store.manifest.step:04d}"
    return {**files(store.path / "steps" / number), **files(store.path / "experts" / number)}


def assert_same_steps(ours: Store, theirs: Store, what: str) -> None:
    """The same bytes, and the same in the manifest, but for the time."""
    assert state_bytes(ours) == state_bytes(theirs), f"{what}: the state is another"
    for mine, other in zip(ours.history, theirs.history, strict=True):
        assert replace(mine, added=other.added, seconds=other.seconds) == other, f"{what}: a scalar is another"


def assert_same(ours: StateDict, theirs: StateDict, what: str) -> None:
    """Bit for bit, but for the sign of zeros."""
    assert ours.keys() == theirs.keys(), f"{what}: other tensors"
    for name, x in ours.items():
        assert torch.equal(x, theirs[name]), f"{what}: {name} differs"


def assert_close(ours: StateDict, theirs: StateDict, base: StateDict, tolerance: float, what: str) -> None:
    """The two moved away from the base alike, relative to how far."""
    for name, x in theirs.items():
        moved = float((x.double() - base[name].double()).norm())
        apart = float((ours[name].double() - x.double()).norm())
        assert apart <= tolerance * max(moved, 1e-3 * float(base[name].double().norm())), f"{what}: {name} differs"


def norm(model: StateDict, base: StateDict) -> float:
    return math.sqrt(math.fsum(float((x.double() - base[name].double()).square().sum()) for name, x in model.items()))


# --- what is demanded -------------------------------------------------------------------------------------

DEMANDS: list[Callable[[Method], None]] = []


def demanded(check: Callable[[Method], None]) -> Callable[[Method], None]:
    DEMANDS.append(check)
    return check


@demanded
def is_known_by_its_name(method: Method) -> None:
    """A store remembers a method by its name and its parameters, and must find the same one again."""
    name = type(method).name
    assert name in METHODS, f"{name} is not known: bring it by an entry point, or call mergestream.register_method"
    assert METHODS[name] is type(method), f"{name} is the name of another method"
    assert type(method)().parameters.keys() == method.parameters.keys()
    assert make_method(name, json.loads(json.dumps(method.parameters))) == method, "it does not survive the manifest"
    as_text = {key: str(value) for key, value in method.parameters.items()}
    assert make_method(name, as_text) == method, "its parameters cannot be given as text"


@demanded
def state_is_as_laid_out(method: Method) -> None:
    """Slots, shapes and types are what `layout` says, for whole tensors and for pieces of the others."""
    for name in SHAPES:
        state = None
        for context, delta in _arrivals(method, name):
            absorbed, layout = method.absorb(state, delta, context), method.layout(context)
            state, whole = absorbed.state, method.is_whole(context)
            assert list(state) == list(layout), f"after {context.t} models the slots of {name} are not as laid out"
            for slot, form in layout.items():
                assert whole or form.shape == context.shape, f"{slot} of {name} goes by in pieces, but has a shape"
                value, expected = dense(state[slot]), form.shape if whole else delta.shape
                assert tuple(value.shape) == tuple(expected), f"the shape of {slot} of {name} is not as laid out"
                assert value.dtype == form.dtype, f"the type of {slot} of {name} is not as laid out"
            for what, part in (("kept", absorbed.kept), ("direction", method.direction(state, context))):
                assert part is None or part.shape == delta.shape, f"{what} has not the shape of the task vector"


@demanded
def arguments_are_never_written_to(method: Method) -> None:
    for name in SHAPES:
        state: State | None = None
        for context, delta in _arrivals(method, name):
            given = {"the task vector": delta, **{slot: dense(value) for slot, value in (state or {}).items()}}
            copies = {what: x.clone() for what, x in given.items()}
            new = method.absorb(state, delta, context).state
            assert_same(given, copies, "what absorb is given")
            copies = {slot: dense(value).clone() for slot, value in new.items()}
            method.direction(new, context)
            assert_same({slot: dense(value) for slot, value in new.items()}, copies, "what direction is given")
            state = new
    models, originals = make_models(3), make_models(3)
    merger = merger_of(method, models[0], models[1:])
    assert_same(merger.state_dict(), merger.state_dict(), "read out once more")
    for model, original in zip(models, originals, strict=True):
        assert_same(model, original, "what was merged")


def _arrivals(method: Method, name: str, models: Sequence[StateDict] | None = None) -> Iterator[tuple[Context, Tensor]]:
    """The task vectors of one tensor as they come to a method: flat, where they come in pieces."""
    base, *experts = models or make_models(4)
    like, linear = base[name], name in LINEAR
    for t, expert in enumerate(experts, 1):
        ranking = method.ranking(t)
        thresholds = dict.fromkeys(ranking.names if ranking else (), 0.01)
        context = Context(t, linear, tuple(like.shape), like.dtype, thresholds)
        delta = expert[name] - like
        yield context, delta if method.is_whole(context) else delta.reshape(-1)


@demanded
def norms_are_those_of_the_models(method: Method) -> None:
    base, *experts = make_models(3)
    merger = Merger(base, method)
    norms = []
    for expert in experts:
        totals = merger.add(expert)
        norms.append(norm(expert, base))
        assert math.isclose(totals.norm, norms[-1], rel_tol=1e-6), "‖Δ‖ is another"
        assert math.isclose(totals.mean_norm, sum(norms) / len(norms), rel_tol=1e-6), "the mean of ‖Δ‖ is another"
    measured = totals.distance is not None
    assert measured == (method.scale_rule == "adaptive"), "‖direction‖ is measured where the scale needs it, only"
    if totals.distance is not None:
        assert math.isclose(totals.distance, norm(merger.state_dict(), base), rel_tol=1e-4), "the distance is another"


@demanded
def zero_task_vectors_are_absorbed(method: Method) -> None:
    """Nothing becomes NaN, and the base merged with itself is the base wherever nothing leads to nothing."""
    base, expert, *_ = make_models(1)
    for experts in ([expert, base], [base, expert], [base, base]):
        try:
            merged_in_memory(method, base, experts)
        except MergestreamError as error:  # whatever is not finite is refused
            raise AssertionError(f"a zero task vector is not absorbed: {error}") from error
    for name in LINEAR[0], "a.bias":
        for context, zero in _arrivals(method, name, [base, base]):
            if dense(method.direction(method.absorb(None, zero, context).state, context)).any():
                return
    assert_same(merged_in_memory(method, base, [base]), base, "the base merged with itself")


@demanded
def commutative_means_any_order(method: Method) -> None:
    if method.commutative:
        base, *experts = make_models(3)
        forth = merged_in_memory(method, base, experts)
        back = merged_in_memory(method, base, experts, backwards=True)
        assert_close(back, forth, base, 1e-4, "in the other order")


@demanded
def in_memory_equals_through_a_store(method: Method) -> None:
    """With every kind of tensor, and by the same scales."""
    models = make_odd_models()
    merger = merger_of(method, models[0], models[1:])
    with saved(models) as (directory, base, experts):
        store = make_store(directory / "store", method, base, experts)
        store.verify()
        assert_same(exported(store), merger.state_dict(), "through a store")
        assert_same(exported(store, 0.7), merger.state_dict(0.7), "through a store, by another scale")


@demanded
def one_shot_equals_the_stream(method: Method) -> None:
    models = make_odd_models()
    with saved(models) as (directory, base, experts):
        merge(base, experts, directory / "out", method)
        assert_same(load_model(directory / "out"), merged_in_memory(method, models[0], models[1:]), "in one go")


@demanded
def one_worker_equals_many(method: Method) -> None:
    with saved(make_models(3)) as (directory, base, experts):
        one, many = (make_store(directory / f"{n}", method, base, experts, workers=n) for n in (1, 4))
        assert_same_steps(many, one, "with four workers")


@demanded
def every_piece_size_gives_the_same_bytes(method: Method) -> None:
    """State, scalars and models, from pieces of one element on; the last piece is a partial one."""
    for shapes, sizes in ((TINY_SHAPES, (1, 7)), (SHAPES, (64, 1000, 1024))):
        with saved(make_models(2, shapes=shapes)) as (directory, base, experts):
            whole = make_store(directory / "whole", method, base, experts)
            model = exported(whole)
            for size in sizes:
                with pieces_of(size):
                    store = make_store(directory / f"{size}", method, base, experts)
                    merge(base, experts, directory / f"{size}-out", method)
                    assert_same(load_model(directory / f"{size}-out"), model, f"in one go, in pieces of {size}")
                    assert_same(exported(store), model, f"in pieces of {size}")
                assert_same_steps(store, whole, f"in pieces of {size}")


@demanded
def interrupted_and_resumed_equals_uninterrupted(method: Method) -> None:
    """The same bytes, and nothing is done twice."""
    models = make_models(3)
    absorb = Step.absorb
    done: list[str] = []

    def absorb_until(limit: int) -> Any:
        def run(step: Step, name: str, *arguments: Any) -> Any:
            if len(done) == limit:
                raise KeyboardInterrupt
            done.append(name)
            return absorb(step, name, *arguments)

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
            assert sorted(done) == sorted(models[0]), "what was done is done again"
        assert_same_steps(Store(broken.path), straight, "resumed")


@demanded
def tied_weights_are_merged_once_and_stay_tied(method: Method) -> None:
    """A head that is the embedding has no state of its own, and makes no difference to the others."""
    shapes = {"embed_tokens.weight": (50, 24), "a.weight": (40, 24), "a.bias": (40,)}
    models = make_models(2, shapes=shapes)
    alone = merged_in_memory(method, models[0], models[1:])
    tied = [{**model, "lm_head.weight": model["embed_tokens.weight"]} for model in models]
    merged = merged_in_memory(method, tied[0], tied[1:])
    assert merged["lm_head.weight"] is merged["embed_tokens.weight"], "tied weights are no longer one tensor"
    with saved([{name: x.clone() for name, x in model.items()} for model in tied]) as (directory, base, experts):
        store = make_store(directory / "store", method, base, experts)
        assert_same(exported(store), merged, "tied weights through a store")
        with store.snapshot() as snapshot:
            slots = snapshot.state.digests
    assert not any("lm_head" in slot for slot in slots), "a tied weight has a state of its own"
    assert_same(merged, {**alone, "lm_head.weight": alone["embed_tokens.weight"]}, "tied weights")


@contextmanager
def saved_adapters(rank: int = 3) -> Iterator[tuple[Path, Path, StateDict, list[Path], list[Path]]]:
    """A directory, a base in it and what it is, and three adapters in float64, as whole models and as adapters."""
    (base,) = make_models(0, torch.float64)
    generator = torch.Generator().manual_seed(1)

    def factors(name: str) -> tuple[Tensor, Tensor]:
        m, n = base[name].shape
        B, A = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((m, rank), (rank, n)))
        return B * 0.05, A

    drawn = [{name: factors(name) for name in LINEAR} for _ in range(3)]
    dense_forms = [base | {name: base[name] + 2 * B @ A for name, (B, A) in pairs.items()} for pairs in drawn]
    with saved([base, *dense_forms]) as (directory, path, experts):
        adapters = [
            save_adapter(directory / "adapters" / path.stem, pairs) for path, pairs in zip(experts, drawn, strict=True)
        ]
        yield directory, path, base, experts, adapters


@demanded
def adapter_equals_its_dense_form(method: Method) -> None:
    """In float64, where the two differ by rounding only; and in pieces that end within a row, to the last bit."""
    with saved_adapters() as (directory, path, base, experts, adapters):
        readout = "agree" if method.remembers_experts else None  # by default adapters have another one
        as_models = exported(make_store(directory / "dense", method, path, experts), readout=readout)
        as_adapters = exported(make_store(directory / "factors", method, path, adapters), readout=readout)
        with pieces_of(100):
            in_pieces = exported(make_store(directory / "pieces", method, path, adapters), readout=readout)
    assert_close(as_adapters, as_models, base, 1e-6, "as adapters")
    assert_same(in_pieces, as_adapters, "as adapters, in pieces of 100")


@demanded
def full_disk_gives_one_sentence(method: Method) -> None:
    """And the store is as before."""
    with saved(make_models(2)) as (directory, base, experts):
        store = make_store(directory / "store", method, base, experts[:1])
        before = files(store.path)
        for call, room in (("posix_fallocate", 0), ("pwrite", 0), ("pwrite", 3)):
            with _full_disk(call, room):
                store.add(experts[1])
            assert files(store.path) == before, f"a full disk ({call}) changes the store"
            with _full_disk(call, room):
                store.export(directory / "out", pictures=False)
            assert not (directory / "out").exists(), f"a full disk ({call}) leaves half of a model"
        store.add(experts[1])
        store.verify()


@contextmanager
def _full_disk(call: str, room: int) -> Iterator[None]:
    """The disk is full after ``room`` calls of a function of ``os``, which must give one sentence."""
    original, calls = getattr(os, call), itertools.count()

    def limited(*arguments: Any) -> Any:
        if next(calls) >= room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments)

    try:
        with patch.object(os, call, limited):
            yield
    except MergestreamError as error:
        assert "\n" not in str(error), f"more than one sentence: {error}"
    except OSError as error:
        raise AssertionError(f"a full disk gives no sentence but {error!r}") from error
    else:
        raise AssertionError("a full disk goes unnoticed")


@demanded
def any_number_is_a_scale(method: Method) -> None:
    """Named scales are for methods that add up, or their own; the others refuse them with a sentence."""
    base, *experts = make_models(3)
    merger = merger_of(method, base, experts)
    assert_same(merger.state_dict(0), base, "with the scale 0")
    once = merger.state_dict(1)
    for number in (-1.0, 0.5):
        expected = {name: base[name].double() + number * (once[name].double() - base[name].double()) for name in base}
        assert_close(merger.state_dict(number), expected, base, 1e-3, f"with the scale {number}")
    length = norm(once, base)
    values = {
        "adaptive": merger.history[-1].mean_norm / length if length else 1.0,
        "sqrt": 1 / math.sqrt(3),
        "mean": 1 / 3,
    }
    for rule in NAMED:
        if method.additive or method.scale_rule == rule:
            expected = merger.state_dict(values[rule])
            assert_close(merger.state_dict(rule), expected, base, 1e-3, f"with the scale {rule}")
        else:
            with suppress(UsageError):
                merger.state_dict(rule)
                raise AssertionError(f"the direction is no sum, but the scale {rule} is not refused")


# --- what is demanded of a readout ------------------------------------------------------------------------

READOUT_DEMANDS: list[Callable[[str], None]] = []


def readout_demanded(check: Callable[[str], None]) -> Callable[[str], None]:
    READOUT_DEMANDS.append(check)
    return check


def ledger_of(models: Sequence[StateDict], order: Sequence[int], method: Ledger | None = None) -> Merger:
    """A ledger in memory with the experts of these numbers, named by them, in this order; the base has the number 0."""
    merger = Merger(models[0], method or Ledger())
    for number in order:
        merger.add(models[number], name=str(number))
    return merger


@readout_demanded
def readout_is_known_by_its_name(readout: str) -> None:
    assert readout in READOUTS, f"{readout} is not known: bring it by an entry point of mergestream.readouts"
    assert issubclass(READOUTS[readout], EntriesReadout), f"{readout} is no readout of a ledger"


@readout_demanded
def order_of_arrival_changes_no_bit(readout: str) -> None:
    """With as many experts as there is room for, and with more, where entries have been cut on the way."""
    for count in (3, 10):
        models = make_models(count)
        order = list(range(1, count + 1))
        forth = ledger_of(models, order).state_dict(readout=readout)
        for other in (order[::-1], order[1::2] + order[::2]):
            assert_same(ledger_of(models, other).state_dict(readout=readout), forth, "in another order")


@readout_demanded
def left_out_means_never_there(readout: str) -> None:
    """Left out by name, by the weight 0 and by a choice of the others; and weights of 1 are none."""
    models = make_models(4)
    without = ledger_of(models, [1, 3, 4]).state_dict(readout=readout)
    every = ledger_of(models, [1, 2, 3, 4])
    choices: list[dict[str, Any]] = [{"without": ["2"]}, {"weights": {"2": 0.0}}, {"only": ["4", "1", "3"]}]
    for choice in choices:
        assert_same(every.state_dict(readout=readout, **choice), without, f"with {choice}")
    weighted = every.state_dict(readout=readout, weights={str(number): 1.0 for number in (1, 2, 3, 4)})
    assert_same(weighted, every.state_dict(readout=readout), "with weights of 1")


@readout_demanded
def removed_means_never_there(readout: str) -> None:
    models = make_models(4)
    with saved(models) as (directory, base, experts):
        store = make_store(directory / "store", Ledger(), base, experts)
        store.remove("expert2")
        store.verify()
        never = make_store(directory / "never", Ledger(), base, [experts[0], *experts[2:]])
        assert_same(exported(store, readout=readout), exported(never, readout=readout), "after a removal")


@readout_demanded
def readout_in_memory_equals_through_a_store(readout: str) -> None:
    """With every kind of tensor."""
    models = make_odd_models()
    merger = ledger_of(models, range(1, len(models)))
    with saved(models) as (directory, base, experts):
        store = make_store(directory / "store", Ledger(), base, experts)
        assert_same(exported(store, readout=readout), merger.state_dict(readout=readout), "through a store")
        assert_same(exported(store, 0.7, readout=readout), merger.state_dict(0.7, readout=readout), "by another scale")
        chosen = merger.state_dict(readout=readout, without=["1"], weights={"2": 0.5})
        through = exported(store, readout=readout, without=["expert1"], weights={"expert2": 0.5})
        assert_same(through, chosen, "with experts chosen and weighted")


@readout_demanded
def readout_of_adapters_equals_that_of_their_dense_forms(readout: str) -> None:
    with saved_adapters() as (directory, path, base, experts, adapters):
        method = Ledger(entries="float32")
        as_models = exported(make_store(directory / "dense", method, path, experts), readout=readout)
        as_adapters = exported(make_store(directory / "factors", method, path, adapters), readout=readout)
    assert_close(as_adapters, as_models, base, 1e-5, "as adapters")


@readout_demanded
def workers_and_pieces_change_no_bit(readout: str) -> None:
    with saved(make_models(3)) as (directory, base, experts):
        store = make_store(directory / "store", Ledger(), base, experts)
        once = exported(store, readout=readout)
        assert_same(exported(Store(store.path, engine=LocalEngine(4)), readout=readout), once, "with four workers")
        for size in (7, 1000):
            with pieces_of(size):
                assert_same(exported(store, readout=readout), once, f"in pieces of {size}")


@readout_demanded
def experts_that_did_not_move_do_no_harm(readout: str) -> None:
    """A zero task vector, one expert alone, and the same expert twice."""
    models = make_models(2)
    base = models[0]
    for experts in ([base], [base, base], [models[1], base], [models[1], models[1]], [models[1]]):
        merged = ledger_of([base, *experts], range(1, len(experts) + 1)).state_dict(readout=readout)
        assert all(bool(x.isfinite().all()) for x in merged.values()), "NaN or Inf comes of it"
    assert_same(ledger_of([base, base], [1]).state_dict(readout=readout), base, "the base merged with itself")


@readout_demanded
def readout_scales_with_any_number(readout: str) -> None:
    models = make_models(3)
    merger, base = ledger_of(models, [1, 2, 3]), models[0]
    assert_same(merger.state_dict(0, readout=readout), base, "with the scale 0")
    once = merger.state_dict(1, readout=readout)
    expected = {name: base[name].double() - 0.5 * (once[name].double() - base[name].double()) for name in base}
    assert_close(merger.state_dict(-0.5, readout=readout), expected, base, 1e-3, "with the scale -0.5")
