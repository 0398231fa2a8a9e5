"""The contract of a readout, one function per requirement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mergestream.engine import LocalEngine
from mergestream.ledger.method import Ledger
from mergestream.ledger.readouts import READOUTS
from mergestream.ledger.readouts.base import EntriesReadout
from mergestream.store.store import Store
from mergestream.testing.models import (
    Check,
    assert_close,
    assert_same,
    exported,
    ledger_of,
    make_models,
    make_odd_models,
    make_store,
    pieces_of,
    saved,
    saved_adapters,
    scaled,
)

REQUIREMENTS: list[Callable[[str], None]] = []


def readout_checks(*readouts: str) -> list[Check]:
    """Return all checks for each of these readouts of a ledger."""
    return [Check(readout, requirement) for readout in readouts for requirement in REQUIREMENTS]


def required(check: Callable[[str], None]) -> Callable[[str], None]:
    """Add a function to the contract."""
    REQUIREMENTS.append(check)
    return check


@required
def readout_is_found_by_name(readout: str) -> None:
    """The registry has a readout of entries by this name."""
    assert readout in READOUTS, f"{readout} is unknown: add an entry point of mergestream.readouts, or register it"
    assert issubclass(READOUTS[readout], EntriesReadout), f"{readout} is not an EntriesReadout"


@required
def order_of_arrival_changes_no_bit(readout: str) -> None:
    """This holds for few experts, and for so many that entries are cut."""
    for count in (3, 10):
        models = make_models(count)
        order = list(range(1, count + 1))
        merged = ledger_of(models, order).state_dict(readout=readout)
        for other in (order[::-1], order[1::2] + order[::2]):
            assert_same(ledger_of(models, other).state_dict(readout=readout), merged, "in another order")


@required
def excluded_equals_never_added(readout: str) -> None:
    """``without``, weight 0 and ``only`` exclude an expert; weights of 1 change nothing."""
    models = make_models(4)
    never = ledger_of(models, [1, 3, 4]).state_dict(readout=readout)
    merger = ledger_of(models, [1, 2, 3, 4])
    choices: list[dict[str, Any]] = [{"without": ["2"]}, {"weights": {"2": 0.0}}, {"only": ["4", "1", "3"]}]
    for choice in choices:
        assert_same(merger.state_dict(readout=readout, **choice), never, f"with {choice}")
    weighted = merger.state_dict(readout=readout, weights={str(number): 1.0 for number in (1, 2, 3, 4)})
    assert_same(weighted, merger.state_dict(readout=readout), "with weights of 1")


@required
def removed_equals_never_added(readout: str) -> None:
    """`Store.remove` leaves no trace in the export."""
    with saved(make_models(4)) as (directory, base, experts):
        store = make_store(directory / "store", Ledger(), base, experts)
        store.remove("expert2")
        store.verify()
        never = make_store(directory / "never", Ledger(), base, [experts[0], *experts[2:]])
        assert_same(exported(store, readout=readout), exported(never, readout=readout), "after a removal")


@required
def readout_in_memory_equals_store(readout: str) -> None:
    """A `Merger` and a store give the same bits for every kind of tensor."""
    models = make_odd_models()
    merger = ledger_of(models, range(1, len(models)))
    with saved(models) as (directory, base, experts):
        store = make_store(directory / "store", Ledger(), base, experts)
        assert_same(exported(store, readout=readout), merger.state_dict(readout=readout), "through a store")
        assert_same(exported(store, 0.7, readout=readout), merger.state_dict(0.7, readout=readout), "with scale 0.7")
        selected = merger.state_dict(readout=readout, without=["1"], weights={"2": 0.5})
        through = exported(store, readout=readout, without=["expert1"], weights={"expert2": 0.5})
        assert_same(through, selected, "with selected and weighted experts")


@required
def readout_of_adapters_equals_full_models(readout: str) -> None:
    """Adapters and the full models they stand for merge alike."""
    with saved_adapters() as (directory, path, base, experts, adapters):
        method = Ledger(entries="float32")
        full = exported(make_store(directory / "full", method, path, experts), readout=readout)
        factored = exported(make_store(directory / "factors", method, path, adapters), readout=readout)
    assert_close(factored, full, base, 1e-5, "as adapters")


@required
def workers_and_pieces_change_no_bit(readout: str) -> None:
    """Neither the number of workers nor the size of pieces matters."""
    with saved(make_models(3)) as (directory, base, experts):
        store = make_store(directory / "store", Ledger(), base, experts)
        merged = exported(store, readout=readout)
        assert_same(exported(Store(store.path, engine=LocalEngine(4)), readout=readout), merged, "with four workers")
        for size in (7, 1000):
            with pieces_of(size):
                assert_same(exported(store, readout=readout), merged, f"in pieces of {size}")


@required
def zero_and_repeated_experts_are_merged(readout: str) -> None:
    """A zero task vector, a single expert and the same expert twice give finite weights."""
    base, one, _ = make_models(2)
    for experts in ([base], [base, base], [one, base], [one, one], [one]):
        merged = ledger_of([base, *experts], range(1, len(experts) + 1)).state_dict(readout=readout)
        assert all(bool(x.isfinite().all()) for x in merged.values()), "the merged model has NaN or Inf"
    assert_same(ledger_of([base, base], [1]).state_dict(readout=readout), base, "the base merged with itself")


@required
def readout_scales_with_any_number(readout: str) -> None:
    """Scale 0 gives the base, and the distance from the base is proportional to the scale."""
    models = make_models(3)
    merger, base = ledger_of(models, [1, 2, 3]), models[0]
    assert_same(merger.state_dict(0, readout=readout), base, "with scale 0")
    once = merger.state_dict(1, readout=readout)
    halved = merger.state_dict(-0.5, readout=readout)
    assert_close(halved, scaled(once, base, -0.5), base, 1e-3, "with scale -0.5")
